"""Linear layers in several forms: y = x @ w.T + b.

- A form is given a weight once and returns the product, so it may lay the weight out anew and forget the original.
- A form is chosen when a model is built; models never branch on it.
- `packed` and `invariant` give each row the same bits whatever other rows come with it; `plain` does not.
- `reference` is the oracle of the others, slow on purpose.

Shapes: x [N, K], w [M, K], b [M], y [N, M].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

Product = Callable[[Tensor], Tensor]
LinearForm = Callable[[Tensor, Tensor | None], Product]

ROW_TILE = 8
"""Products of fewer rows, or of a remainder of rows, go through other kernels of the BLAS with another order of sums.
Measured with MKL, fp32, 1 and 2 threads: over whole tiles of this many rows a row's bits depend on that row alone."""

PACKED_FOR_ROWS = 16
"""The number of rows a packed layout is chosen for. One layout serves any number; the choice moves only speed."""


def plain(w: Tensor, b: Tensor | None = None) -> Product:
    """The library's product. Its bits for one row may depend on how many rows there are."""
    return lambda x: functional.linear(x, w, b)


def invariant(w: Tensor, b: Tensor | None = None) -> Product:
    """The library's product over rows padded to whole tiles; the padding is cut off again."""

    def product(x: Tensor) -> Tensor:
        num_rows = x.shape[0]
        missing = -num_rows % ROW_TILE
        if missing == 0:
            return functional.linear(x, w, b)
        padded = x.new_zeros(num_rows + missing, x.shape[1])
        padded[:num_rows] = x
        return functional.linear(padded, w, b)[:num_rows]

    return product


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `packed` works here: oneDNN, and fp32 on a CPU."""
    return device.type == "cpu" and dtype == torch.float32 and torch.backends.mkldnn.is_available()


class PackedProduct:
    """oneDNN's product with the weight laid out once for its kernels: two to three times `plain` for few rows.

    Its kernels sum along K in one order for any number of rows from 2 on (measured to 2049, 1 and 2 threads). For one
    row some processors (AVX-512, K above 1024) have a kernel of another order, so it is multiplied as two.
    Another weight of the same shape may be loaded in the place of the first.
    """

    def __init__(self, w: Tensor, b: Tensor | None) -> None:
        if not can_pack(w.device, w.dtype):
            raise ValueError(f"packed products need oneDNN and float32 on a CPU, not {w.dtype} on {w.device}")
        self.shape = tuple(w.shape)
        self._bias = b
        self._multiply = torch.ops.mkldnn._linear_pointwise
        self.load(w)

    def load(self, w: Tensor) -> None:
        assert tuple(w.shape) == self.shape, (w.shape, self.shape)
        self._layout: Tensor | None = torch.ops.mkldnn._reorder_linear_weight(w.contiguous(), PACKED_FOR_ROWS)

    def dense(self) -> Tensor:
        """The weight as it was loaded, to the bit."""
        assert self._layout is not None
        return self._layout.to_dense()

    def release(self) -> None:
        """Hold no weight until the next is loaded."""
        self._layout = None

    def __call__(self, x: Tensor) -> Tensor:
        if x.shape[0] == 0:
            return x.new_empty(0, self.shape[0])
        y: Tensor = self._multiply(_two_at_least(x).contiguous(), self._layout, self._bias, "none", [], "")
        return y[: x.shape[0]]


def _two_at_least(x: Tensor) -> Tensor:
    return x.expand(2, -1) if x.shape[0] == 1 else x


def packed(w: Tensor, b: Tensor | None = None) -> Product:
    return PackedProduct(w, b)


def reference(w: Tensor, b: Tensor | None = None) -> Product:
    """Sums in float64, rounded once to x's dtype."""

    def product(x: Tensor) -> Tensor:
        y = x.to(torch.float64) @ w.to(torch.float64).T
        if b is not None:
            y += b.to(torch.float64)
        return y.to(x.dtype)

    return product


LINEAR_FORMS: dict[str, LinearForm] = {
    "packed": packed,
    "invariant": invariant,
    "plain": plain,
    "reference": reference,
}


def row_tile(form: str) -> int:
    """Rows a step should be padded to a multiple of, so that the form need not copy it."""
    return ROW_TILE if form == "invariant" else 1
