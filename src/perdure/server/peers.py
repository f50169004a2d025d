"""`Peers`: what one front end cannot say or do alone, where several serve one port.

Names of requests are the front end's own where it is alone, and are claimed at the supervising process where there are
several; a verb that names requests reaches whoever has them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from perdure import AsyncLLM, InvalidValue
from perdure.api.ending import Failure
from perdure.api.errors import PerdureError
from perdure.api.request import RequestId
from perdure.server.channel import (
    Abort,
    Channel,
    Claim,
    Claimed,
    Done,
    Failed,
    Look,
    Message,
    Release,
    Seen,
    TakeCheckpoint,
    Taken,
)
from perdure.server.feed import Feed
from perdure.server.protocol.live import Live


class Peers:
    """Of a front end that is alone."""

    def __init__(self, llm: AsyncLLM) -> None:
        self._llm = llm

    async def claim(self, names: Sequence[str]) -> tuple[Collection[str], int]:
        """Those of these names that are live elsewhere, and the number under which the others are claimed."""
        return (), 0

    def release(self, names: Sequence[str], number: int) -> None:
        """The requests of these names, claimed under this number, have ended."""

    async def abort(self, request_ids: RequestId | list[RequestId] | None) -> None:
        """As `AsyncLLM.abort`, wherever they are."""
        await self._llm.abort(request_ids)

    async def checkpoint(self, request_id: RequestId, end: bool) -> bytes:
        """As `AsyncLLM.checkpoint`, wherever it is: its bytes."""
        return (await self._llm.checkpoint(request_id, end)).to_bytes()

    async def looks(self, feed: Feed, is_draining: bool) -> list[Live]:
        """What each front end sees. Raises `EngineDead`."""
        return [await feed.look(is_draining)]


class Connected(Peers):
    """Of one of several: the supervising process asks all of them, this one too (`answer`)."""

    def __init__(self, llm: AsyncLLM, channel: Channel) -> None:
        super().__init__(llm)
        self._channel = channel

    async def claim(self, names: Sequence[str]) -> tuple[Collection[str], int]:
        found = await self._asked(Claim(list(names)))
        assert isinstance(found, Claimed)
        return found.taken, found.number

    def release(self, names: Sequence[str], number: int) -> None:
        self._channel.tell(Release(list(names), number))

    async def abort(self, request_ids: RequestId | list[RequestId] | None) -> None:
        await self._asked(Abort(request_ids))

    async def checkpoint(self, request_id: RequestId, end: bool) -> bytes:
        found = await self._asked(TakeCheckpoint(request_id, end))
        assert isinstance(found, Taken)
        return found.data

    async def looks(self, feed: Feed, is_draining: bool) -> list[Live]:
        found = await self._asked(Look())
        assert isinstance(found, Seen)
        return found.looks

    async def _asked(self, message: Message) -> Message:
        found = await self._channel.ask(message)
        if isinstance(found, Failed):
            raise found.failure.to_exception()
        return found

    async def answer(self, message: Message, feed: Feed, is_draining: bool) -> Message:
        """What this one has to say to what is asked of all."""
        try:
            match message:
                case Abort(request_ids):
                    await self._llm.abort(request_ids)
                    return Done()
                case TakeCheckpoint(request_id, end):
                    return Taken((await self._llm.checkpoint(request_id, end)).to_bytes())
                case Look():
                    return Seen([await feed.look(is_draining)])
        except PerdureError as error:
            return Failed(Failure.of(error))
        raise AssertionError(message)


def of_all(message: Message, answers: Sequence[Message]) -> Message:
    """One answer of those that all front ends gave. A request is at one of them, and an abort is harmless elsewhere."""
    done = [one for one in answers if not isinstance(one, Failed)]
    if done and isinstance(message, Look):
        return Seen([look for one in done if isinstance(one, Seen) for look in one.looks])
    if done:
        return done[0]
    if answers:
        return answers[0]
    error = InvalidValue("the request is not live: it has ended, or never began")
    return Done() if isinstance(message, Abort) else Failed(Failure.of(error))
