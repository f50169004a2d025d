"""Numbers of 8 bits (e4m3): how weights, products' inputs and pages are rounded to them, and products of them.

- Of a weight each row has a factor, of a product's input each row its own, found when it is there: the largest
  magnitude of a row becomes the largest number there is. So a row's bits depend on that row alone.
- A product adds up codes in fp32 and is scaled after: codes of both sides multiply exactly.
- Pages have no factor: keys and values are rounded as they are, and what is too large becomes the largest.
- NaN stays NaN everywhere.
- Here is what a CPU does, which has no such products; on a GPU the roundings are the same (`ops.triton.float8`).

Shapes: x [N, K], w [M, K], y [N, M].
"""

from __future__ import annotations

import torch
from torch import Tensor

from perdure.ops.linear import Product, invariant
from perdure.ops.native.build import Library
from perdure.ops.native.weights import PackedWeight

E4M3 = torch.float8_e4m3fn
MOST = 448.0
"""The largest number of e4m3. It has no infinity."""

TILE = 16
"""Sizes of codes that lie on a GPU are multiples of it."""


def to_e4m3(x: Tensor) -> Tensor:
    """Rounded to the nearest, ties to even; what is beyond the largest becomes it."""
    return x.float().clamp(-MOST, MOST).to(E4M3)


def quantised_rows(x: Tensor, most: float | None = None) -> tuple[Tensor, Tensor]:
    """Codes of x [N, K], and the factor [N] (fp32) that each row of them is to be multiplied by.

    most: no magnitude counts as larger when the factor is found. A row of zeros has the factor 1.
    """
    x = x.float()
    largest = x.abs().amax(1)
    if most is not None:
        largest = largest.clamp(max=most)
    most_of_all = torch.full_like(largest, MOST)  # a GPU multiplies by the reciprocal of a plain number
    factors = torch.where(largest == 0, 1.0, largest / most_of_all)
    return to_e4m3(x / factors[:, None]), factors


class Float8Weight:
    """A weight [M, K] as codes and a factor for each row. Filled row by row, then read by products.

    codes: for compiled kernels their panels; else a tensor, which on a GPU is padded to tiles, with zeros. factors:
    fp32, padded as codes are. most: of the inputs of its products (`quantised_rows`), as some checkpoints have it.
    """

    def __init__(
        self, shape: tuple[int, int], device: torch.device, library: Library | None = None, most: float | None = None
    ) -> None:
        self.shape = shape
        self.most = most
        tile = TILE if device.type == "cuda" else 1
        padded = [-(-size // tile) * tile for size in shape]
        self.factors = torch.zeros(padded[0], device=device)
        self.codes: Tensor | PackedWeight
        if library is None:
            self.codes = torch.zeros(padded, dtype=torch.uint8, device=device).view(E4M3)
        else:
            self.codes = PackedWeight(library, "e4m3", *shape)

    @property
    def num_bytes(self) -> int:
        return self.factors.nbytes + (self.codes.nbytes if isinstance(self.codes, Tensor) else self.codes.num_bytes)

    def fill(self, first: int, rows: Tensor) -> None:
        """Rows first .. of the weight [r, K], rounded where the weight lies."""
        self.fill_codes(first, *quantised_rows(rows.to(self.factors.device, non_blocking=True)))

    def fill_codes(self, first: int, codes: Tensor, factors: Tensor) -> None:
        """Rows first .. as they were rounded elsewhere: codes [r, K] and factors [r]."""
        rows = slice(first, first + codes.shape[0])
        codes, factors = (one.to(self.factors.device, non_blocking=True) for one in (codes, factors))
        unusable = codes.float().isnan().any(1)  # panels hold no NaN
        self.factors[rows] = torch.where(unusable, torch.nan, factors.float())
        if isinstance(self.codes, PackedWeight):
            self.codes.fill(first, codes.float().nan_to_num(0.0))
        else:
            self.codes[rows, : self.shape[1]] = codes

    def memories(self) -> list[Tensor]:
        """All it holds, as bytes."""
        codes = self.codes.view(torch.uint8).flatten() if isinstance(self.codes, Tensor) else self.codes.data
        return [codes, self.factors.view(torch.uint8)]

    def release(self) -> None:
        """Give the memory back; nothing may be read until it was reserved and filled again."""
        self.factors.untyped_storage().resize_(0)
        if isinstance(self.codes, Tensor):
            self.codes.untyped_storage().resize_(0)
        else:
            self.codes.release()

    def reserve(self) -> None:
        """Take memory; what it holds is to be filled in."""
        self.factors.untyped_storage().resize_(self.factors.nbytes)
        self.factors.zero_()
        if isinstance(self.codes, Tensor):
            self.codes.untyped_storage().resize_(self.codes.nbytes)
            self.codes.view(torch.uint8).zero_()
        else:
            self.codes.reserve()


def emulated(weight: Float8Weight, bias: Tensor | None) -> Product:
    """x @ w.T + bias on a CPU: rounded as in 8 bits, added up in fp32, with the same bits for a row in any company."""

    def product(x: Tensor) -> Tensor:
        codes, factors = quantised_rows(x, weight.most)
        if isinstance(weight.codes, PackedWeight):
            sums = torch.empty(x.shape[0], weight.shape[0])
            weight.codes.multiply(codes.float(), None, sums, 0)
        else:
            sums = invariant(weight.codes.float())(codes.float())
        y = sums * factors[:, None] * weight.factors
        return (y if bias is None else y + bias.float()).to(x.dtype)

    return product


def reference(weight: Float8Weight, bias: Tensor | None) -> Product:
    """The oracle of the others, on any device: summed in fp64 and rounded once to the type of x."""
    num_out, num_in = weight.shape

    def product(x: Tensor) -> Tensor:
        assert isinstance(weight.codes, Tensor), "only compiled kernels read panels"
        codes, factors = quantised_rows(x, weight.most)
        w = weight.codes[:num_out, :num_in].double() * weight.factors[:num_out, None].double()
        y = codes.double() @ w.T * factors[:, None].double()
        return (y if bias is None else y + bias.double()).to(x.dtype)

    return product
