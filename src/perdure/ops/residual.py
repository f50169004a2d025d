"""The residual stream of a decoder, and products that read and write it.

- A layer reads the norm of the stream and adds to it. A sum is left open until the next norm makes it on its way, so
  that no kernel only adds.
- A device may have forms of its own for few rows, where what a kernel costs beside its bytes is most of it (`FewRows`).

Shapes: N rows, H = hidden_size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from perdure.ops.linear import Product


@dataclass(frozen=True, slots=True)
class Stream:
    """x + more, both [N, H]; more None: x."""

    x: Tensor
    more: Tensor | None = None

    def rows(self, index: Tensor) -> Stream:
        """These rows of it."""
        return Stream(self.x[index], None if self.more is None else self.more[index])

    def total(self) -> Tensor:
        return self.x if self.more is None else self.x + self.more


ReadProduct = Callable[[Stream], tuple[Stream, Tensor]]
"""A product of the norm of a stream; with the stream, whose sum is made."""

WriteProduct = Callable[[Stream, Tensor], Stream]
"""A product of rows, added to a stream."""


class FewRows(Protocol):
    """Forms for few rows. otherwise: serves any number."""

    def reading(
        self, product: Product, norm_weight: Tensor, eps: float, gated: bool, otherwise: ReadProduct
    ) -> ReadProduct: ...

    def writing(self, product: Product, otherwise: WriteProduct) -> WriteProduct: ...
