"""Pinned prefixes as callers hold them, one form for each face."""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import Self

from perdure.api.errors import EngineDead
from perdure.engine.desk import Desk


class _Pin:
    """num_tokens: of the prefix's full pages, which are held as soon as they are computed.

    Only `release`, or the end of a `with` block, gives it up: one that is merely dropped stays pinned for ever.
    """

    def __init__(self, engine: Desk, pin: int, num_tokens: int) -> None:
        self._engine = engine
        self._pin = pin
        self.num_tokens = num_tokens

    def _released(self) -> Future[object] | None:
        """None: the engine is dead, and holds nothing."""
        with contextlib.suppress(EngineDead):
            return self._engine.unpin(self._pin)
        return None


class PinnedPrefix(_Pin):
    """`with llm.pin_prefix(prompt):` releases it at the end of the block."""

    def release(self) -> None:
        """Give it up; doing it twice is harmless. Its pages stay cached, and may be reclaimed."""
        with contextlib.suppress(EngineDead):
            if (released := self._released()) is not None:
                released.result()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class AsyncPinnedPrefix(_Pin):
    """`async with await llm.pin_prefix(prompt):` releases it at the end of the block."""

    async def release(self) -> None:
        """`PinnedPrefix.release`."""
        with contextlib.suppress(EngineDead):
            if (released := self._released()) is not None:
                await asyncio.wrap_future(released)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.release()
