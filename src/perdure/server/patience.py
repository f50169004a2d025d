"""Waiting no longer than was asked for what cannot be interrupted."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from perdure import InvalidValue

T = TypeVar("T")

RETRY_S = 0.1


async def in_time(call: Callable[[], T], timeout_s: float | None) -> T:
    """The call's result, from a thread of its own. Raises TimeoutError; then the call goes on, for nobody. It is not
    waited for when the process ends. timeout_s: None = it is waited for as long as it takes."""
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


def wait_for_listener(address: str, port: int, timeout_s: float) -> None:
    """Somebody will be there: two may come in either order. Raises `InvalidValue` for a name that is none, and
    RuntimeError."""
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise InvalidValue(f"master_address={address[:200]!r} is no address: {error}") from None
    give_up_at = time.monotonic() + timeout_s
    while True:
        left_s = give_up_at - time.monotonic()
        try:
            socket.create_connection((address, port), timeout=max(left_s, RETRY_S)).close()
            return
        except OSError as error:
            if time.monotonic() + RETRY_S > give_up_at:
                raise RuntimeError(f"nobody listens there ({error})") from None
        time.sleep(RETRY_S)


def first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
