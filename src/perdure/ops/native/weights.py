"""A weight [n, k] as the kernels read it: in panels of 16 rows, in the narrowest form that loses nothing.

- `stored` "f32", "bf16", "f16", "e4m3": floats. Or the name of a GGUF block type: its codes and scales, laid out anew.
- Whatever it is, a product multiplies the same fp32 values, those the reference decoder gives.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from perdure.ops.native.build import Library

PANEL = 16
BLOCKS = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")
"""In the order of weights.c."""

_FLOATS = ("f32", "bf16", "f16", "e4m3")
FLOAT_TYPES: dict[torch.dtype, Literal["f32", "bf16", "f16"]] = {
    torch.float32: "f32",
    torch.bfloat16: "bf16",
    torch.float16: "f16",
}


class PackedWeight:
    """Filled row by row, then read by products and look-ups. num_bytes: what it takes in memory; data: that memory."""

    def __init__(self, library: Library, stored: str, n: int, k: int) -> None:
        self._c = library.c
        self.stored, self.n, self.k = stored, n, k
        self._code = _FLOATS.index(stored) if stored in _FLOATS else len(_FLOATS)
        self._kind = BLOCKS.index(stored) if self._code == len(_FLOATS) else 0
        self.num_bytes = math.ceil(n / PANEL) * self._c.panel_bytes(self._code, self._kind, k)
        self.reserve()

    def reserve(self) -> None:
        """Take memory; what it holds is to be filled in."""
        self.data = torch.empty(self.num_bytes, dtype=torch.uint8)  # what lies past row n is never used
        self._address = self.data.data_ptr()
        self._fixed = (self._code, self._kind, self.n, self.k, self._address)

    def release(self) -> None:
        """Give the memory back; nothing may be read until it was reserved and filled again."""
        self.data = torch.empty(0, dtype=torch.uint8)

    def fill(self, first: int, rows: Tensor) -> None:
        """Rows first .. of the weight: floats [r, k], or a file's blocks as bytes [r, bytes]. A row filled again is
        replaced."""
        count = rows.shape[0]
        assert first >= 0 and first + count <= self.n, (first, count, self.n)
        if self._code == len(_FLOATS):
            rows = rows.contiguous()
            self._c.pack_blocks(self._kind, rows.data_ptr(), first, count, self.k, self._address)
        else:
            rows = rows.float().contiguous()
            self._c.pack_floats(self._code, rows.data_ptr(), first, count, self.k, self._address)

    def rows(self, ids: Tensor) -> Tensor:
        """The rows ids [m] (int64) in fp32, [m, k]."""
        ids = ids.contiguous()
        assert ids.dtype == torch.int64, ids.dtype
        assert not len(ids) or (int(ids.min()) >= 0 and int(ids.max()) < self.n), "an id is no row"
        out = torch.empty(ids.shape[0], self.k)
        self._c.rows_of(*self._fixed, ids.data_ptr(), ids.shape[0], out.data_ptr())
        return out

    def multiply(self, x: Tensor, bias: Tensor | None, out: Tensor, column: int) -> None:
        """out[:, column : column + n] = x @ w.T + bias. x [m, k] and out [m, >= n] are dense in a row."""
        num_rows, apart = x.shape[0], x.stride(0)
        at = 4 * column
        bias_at = None if bias is None else bias.data_ptr() + at
        self._c.product(*self._fixed, x.data_ptr(), num_rows, apart, bias_at, out.data_ptr() + at, out.stride(0))


class JoinedWeight:
    """Packed weights one below the other, [n, k]: what was stored apart, and perhaps in several types."""

    def __init__(self, parts: tuple[PackedWeight, ...]) -> None:
        assert len({part.k for part in parts}) == 1, "joined parts have rows of one width"
        self.parts = parts
        self.shape = (sum(part.n for part in parts), parts[0].k)

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def memories(self) -> list[Tensor]:
        """All it holds, as bytes."""
        return [part.data for part in self.parts]

    def release(self) -> None:
        for part in self.parts:
            part.release()

    def reserve(self) -> None:
        for part in self.parts:
            part.reserve()

    def rows(self, ids: Tensor) -> Tensor:
        """The rows ids [m] (int64) in fp32, [m, k]."""
        assert len(self.parts) == 1, "a look-up reads one part"
        return self.parts[0].rows(ids)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x @ w.T + bias, [m, n], of x [m, k]."""
        assert x.dim() == 2 and x.shape[1] == self.shape[1] and x.dtype == torch.float32, (x.shape, x.dtype, self.shape)
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = x.new_empty(x.shape[0], self.shape[0])
        column = 0
        for part in self.parts:
            part.multiply(x, bias, out, column)
            column += part.n
        return out


def packed_floats(library: Library, w: Tensor) -> JoinedWeight:
    """A whole fp32 weight, kept in fp32: the fastest, and as large as it was."""
    weight = PackedWeight(library, "f32", *w.shape)
    weight.fill(0, w)
    return JoinedWeight((weight,))
