"""Before attention over pages, in most forms, one kernel turns queries and keys, and writes keys and values."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from torch import Tensor

from perdure.ops.rope import Turning


class TurnedFirst(ABC):
    """`attend` of a form by its `run` (`paged.PagedAttention`)."""

    @abstractmethod
    def run(self, q: Tensor, cache: Tensor, rows: Any, sinks: Tensor | None = None) -> Tensor: ...

    def attend(
        self, qk: Tensor, values: Tensor, turning: Turning, cache: Tensor, rows: Any, write: Tensor,
        sinks: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        from perdure.ops.triton.pages import turn_and_write

        return self.run(turn_and_write(qk, values, turning, cache, write), cache, rows, sinks)
