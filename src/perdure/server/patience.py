"""Waiting no longer than was asked for what cannot be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_time(call: Callable[[], T], timeout_s: float) -> T:
    """The call's result, from a thread of its own. Raises TimeoutError; then the call goes on, for nobody, and is not
    waited for when the process ends."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def tell(told: Callable[[], None]) -> None:
        if not done.done():
            told()

    def work() -> None:
        try:
            result = call()
        except BaseException as error:
            found = error
            _tell_loop(loop, lambda: tell(lambda: done.set_exception(found)))
        else:
            _tell_loop(loop, lambda: tell(lambda: done.set_result(result)))

    threading.Thread(target=work, name="perdure-patience", daemon=True).start()
    return await asyncio.wait_for(done, timeout_s)


def _tell_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    with contextlib.suppress(RuntimeError):  # it has ended meanwhile
        loop.call_soon_threadsafe(call)
