"""Linear layers in several forms with one signature: y = x @ w.T + b.

- A form is chosen when a model is built; models never branch on it.
- `linear_invariant` gives each row the same bits whatever other rows come with it; `linear_plain` does not.
- `linear_reference` is the oracle of the others, slow on purpose.

Shapes: x [N, K], w [M, K], b [M], y [N, M].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

LinearForm = Callable[[Tensor, Tensor, Tensor | None], Tensor]

ROW_TILE = 8
"""Products of fewer rows, or of a remainder of rows, go through other kernels of the BLAS with another order of sums.
Measured with MKL, fp32, 1 and 2 threads: over whole tiles of this many rows a row's bits depend on that row alone."""


def linear_plain(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """The library's product. Its bits for one row may depend on how many rows there are."""
    return functional.linear(x, w, b)


def linear_invariant(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """The library's product over rows padded to whole tiles; the padding is cut off again."""
    num_rows = x.shape[0]
    missing = -num_rows % ROW_TILE
    if missing == 0:
        return functional.linear(x, w, b)
    padded = x.new_zeros(num_rows + missing, x.shape[1])
    padded[:num_rows] = x
    return functional.linear(padded, w, b)[:num_rows]


def linear_reference(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """Sums in float64, rounded once to x's dtype."""
    y = x.to(torch.float64) @ w.to(torch.float64).T
    if b is not None:
        y += b.to(torch.float64)
    return y.to(x.dtype)


LINEAR_FORMS: dict[str, LinearForm] = {
    "invariant": linear_invariant,
    "plain": linear_plain,
    "reference": linear_reference,
}
