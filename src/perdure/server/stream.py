"""Server-sent events: one `data:` line each, `[DONE]` at the end, and an abort when the reader goes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from perdure.server.errors import Words, as_http
from perdure.server.protocol.common import ErrorBody

_encode = msgspec.json.Encoder().encode
DONE = b"data: [DONE]\n\n"
IN_A_ROW = 4
"""So many parts are written before the event loop may find out that the connection broke by one of them: it complains
of writes beyond the fifth."""
LINE_ENDS = {mark.encode(): f"\\u{ord(mark):04x}".encode() for mark in "\u0085\u2028\u2029"}
"""What JSON leaves as it is in a string, and some clients take for the end of a line."""
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(value: msgspec.Struct, name: str | None = None) -> bytes:
    """One event. name: its kind, where the interface gives events kinds."""
    head = b"" if name is None else b"event: " + name.encode() + b"\n"
    data = _encode(value)
    if not data.isascii():
        for mark, escaped in LINE_ENDS.items():
            data = data.replace(mark, escaped)
    return head + b"data: " + data + b"\n\n"


class EventStream(Response):
    """events: what is sent; an error among them is told in OpenAI's form, as the last event. on_end is called however
    this ends, and must abort what has not ended."""

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncGenerator[bytes], on_end: Callable[[], None], headers: dict[str, str], done: bytes = DONE
    ) -> None:
        super().__init__(None, 200, {**HEADERS, **headers})
        del self.headers["content-length"]
        self._events = events
        self._on_end = on_end
        self._done = done

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send, scope.get("state", {}).get("words", {})))
        gone = asyncio.ensure_future(until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            self._on_end()
            for task in (sending, gone):
                task.cancel()
            await asyncio.gather(sending, gone, return_exceptions=True)

    async def _send(self, send: Send, words: Words) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        with contextlib.suppress(OSError):  # the reader is gone
            num_sent = 0
            async for part in _told(self._events, self._done, words):
                await send({"type": "http.response.body", "body": part, "more_body": True})
                num_sent += 1
                if num_sent % IN_A_ROW == 0:
                    await asyncio.sleep(0)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _told(events: AsyncGenerator[bytes], done: bytes, words: Words) -> AsyncIterator[bytes]:
    try:
        async for one in events:
            yield one
    except Exception as error:
        yield event(ErrorBody(error=as_http(error, words).detail))
    yield done


async def until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
