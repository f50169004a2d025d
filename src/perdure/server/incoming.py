"""Weights that a trainer sends in several parts, and that the engine gets when all of them are here.

- A part is received when its call comes, or after its call was answered, as the trainer's client has it.
- Nothing of the engine changes before `apply`. What goes wrong on the way ends all that came before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from torch import Tensor

from perdure import AsyncLLM

Receiving = Callable[[], Awaitable[dict[str, Tensor]]]


class Incoming:
    """All parts so far. Those that are under way are received one after another, in the order they were announced."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = {}
        self._under_way: asyncio.Task[None] | None = None
        self.has_begun = False

    def begin(self) -> None:
        """What came before and was not applied is forgotten."""
        self.forget()
        self.has_begun = True

    async def add(self, receiving: Receiving) -> None:
        """Receive a part now. Raises what receiving raises."""
        self.announce(receiving)
        await self._settled()

    def announce(self, receiving: Receiving) -> None:
        """Receive a part after those that were announced before. What goes wrong is raised by whoever comes next."""
        if self._under_way is not None and self._under_way.done() and (failed := self._under_way.exception()):
            self.forget()
            raise failed
        before, self.has_begun = self._under_way, True
        self._under_way = asyncio.create_task(self._take(before, receiving))
        self._under_way.add_done_callback(lambda task: task.cancelled() or task.exception())  # somebody will ask

    async def _take(self, before: asyncio.Task[None] | None, receiving: Receiving) -> None:
        if before is not None:
            await before
        self._tensors.update(await receiving())

    async def _settled(self) -> None:
        if self._under_way is None:
            return
        try:
            await asyncio.shield(self._under_way)
        except BaseException:
            self.forget()
            raise

    async def apply(self, llm: AsyncLLM) -> None:
        """Compute with them. Nothing happens if nothing came. Raises what receiving and `update_weights` raise."""
        await self._settled()
        tensors = self._tensors
        self.forget()
        if tensors:
            await llm.update_weights(tensors)

    def forget(self) -> None:
        if self._under_way is not None:
            self._under_way.cancel()
        self._tensors, self._under_way, self.has_begun = {}, None, False
