"""What crosses between the process that supervises and its front ends: the table of messages, and a channel of them.

Either side asks and answers, over a pair of sockets. The channel ends when one of the processes does, however that is.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Self

import msgspec

from perdure.api.ending import Failure
from perdure.api.errors import PerdureError, described
from perdure.api.request import RequestId
from perdure.server.config import ServeConfig
from perdure.server.protocol.live import Live

log = logging.getLogger("perdure")

LENGTH_BYTES = 4


class Begin(msgspec.Struct, frozen=True, tag=True):
    """To a front end: what it is. endpoint, secret: the coordinator's."""

    endpoint: str
    secret: str | None
    tokenizer: str | None
    return_prompt: bool
    created: int
    serving: ServeConfig


class Ready(msgspec.Struct, frozen=True, tag=True):
    """From one: it takes requests."""


class Drain(msgspec.Struct, frozen=True, tag=True):
    """To all: take no new requests, and end when those inside have."""


class Claim(msgspec.Struct, frozen=True, tag=True):
    """From one: may it use these names for requests?"""

    names: list[str]


class Claimed(msgspec.Struct, frozen=True, tag=True):
    """Those that are live elsewhere, and under which number it has the others."""

    taken: list[str]
    number: int


class Release(msgspec.Struct, frozen=True, tag=True):
    """From one: requests with these names, claimed under this number, have ended."""

    names: list[str]
    number: int


class Abort(msgspec.Struct, frozen=True, tag=True):
    """From one, then to all: end these requests; None = all."""

    request_ids: RequestId | list[RequestId] | None


class TakeCheckpoint(msgspec.Struct, frozen=True, tag=True):
    """From one, then to all."""

    request_id: RequestId
    end: bool


class Look(msgspec.Struct, frozen=True, tag=True):
    """From one, then to all: what the page shows."""


class Seen(msgspec.Struct, frozen=True, tag=True):
    """What each of them sees."""

    looks: list[Live]


class Taken(msgspec.Struct, frozen=True, tag=True):
    """A checkpoint's bytes."""

    data: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """What was asked is done."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """It is not."""

    failure: Failure


Message = (
    Begin | Ready | Drain | Claim | Claimed | Release | Abort | TakeCheckpoint | Taken | Look | Seen | Done | Failed
)


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """number: of a question and its answer; 0 = no answer is expected."""

    number: int
    is_answer: bool
    message: Message


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Packet).decode


class Channel:
    """One end. answer: what is called with each message of the other side; what it gives goes back, if asked for."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        answer: Callable[[Message], Awaitable[Message | None]],
    ) -> None:
        self._reader = reader
        self._writer = writer
        self._answer = answer
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._answering: set[asyncio.Task[None]] = set()
        self._is_over = False

    @classmethod
    async def over(cls, end: socket.socket, answer: Callable[[Message], Awaitable[Message | None]]) -> Self:
        reader, writer = await asyncio.open_unix_connection(sock=end)
        return cls(reader, writer, answer)

    def tell(self, message: Message) -> None:
        """Nothing comes back. Nothing happens if nobody is there any more."""
        self._send(Packet(0, False, message))

    async def ask(self, message: Message) -> Message:
        """Raises `ConnectionError` when the other side is gone."""
        if self._is_over:
            raise ConnectionError("the other process is gone")
        number = next(self._numbers)
        self._asked[number] = asyncio.get_running_loop().create_future()
        self._send(Packet(number, False, message))
        try:
            return await self._asked[number]
        finally:
            del self._asked[number]

    async def run(self) -> None:
        """Until the other side is gone."""
        try:
            while True:
                length = int.from_bytes(await self._reader.readexactly(LENGTH_BYTES), "little")
                self._take(_decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, OSError):
            pass
        finally:
            self.close()

    def close(self) -> None:
        self._is_over = True
        self._writer.close()
        for asked in self._asked.values():
            if not asked.done():
                asked.set_exception(ConnectionError("the other process is gone"))

    def _send(self, packet: Packet) -> None:
        if not self._is_over:
            body = _encode(packet)
            self._writer.write(len(body).to_bytes(LENGTH_BYTES, "little") + body)

    def _take(self, packet: Packet) -> None:
        if packet.is_answer:
            asked = self._asked.get(packet.number)
            if asked is not None and not asked.done():
                asked.set_result(packet.message)
            return
        task = asyncio.ensure_future(self._answered(packet))
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    async def _answered(self, packet: Packet) -> None:
        try:
            told = await self._answer(packet.message)
        except Exception as error:  # whoever asked must not wait for ever
            log.exception("a message of another process could not be answered")
            told = Failed(Failure.of(PerdureError(f"{type(packet.message).__name__}: {described(error)}")))
        if packet.number:
            self._send(Packet(packet.number, True, told or Done()))
