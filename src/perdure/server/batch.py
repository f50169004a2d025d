"""`Batch`: the engine's requests that one HTTP request became. Whatever ends early is aborted, and nothing is left.

A prompt that is refused stands as its error among the results of the others; the caller decides what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Generator, Sequence
from functools import partial
from typing import Any, NamedTuple, Self, TypeVar

from starlette.requests import Request

from perdure import InvalidValue, PerdureError, RequestOutput, SamplingParams
from perdure.server.front import Front, id_given_or_new
from perdure.server.prompts import Prompt
from perdure.server.stream import until_gone

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there to be answered."""


class _Taken:
    """In place of the handle of a request whose name is live at another front end."""

    def __init__(self, name: str) -> None:
        self.error = InvalidValue(f"request_id={name!r} is live: an id is free again when its request ended")

    def abort(self) -> None:
        pass

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return self.__anext__().__await__()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> RequestOutput:
        raise self.error


class Part(NamedTuple):
    """Of which prompt, and what: something new, the last with `finished`, or the error that ended or refused it."""

    prompt: int
    output: RequestOutput | PerdureError


class Batch:
    """All are submitted when this is made, but those with a name that is taken. Raises `EngineDead`."""

    @classmethod
    async def of(
        cls,
        front: Front,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request_id: str | None,
        kind: str,
        salt: str | None,
    ) -> Self:
        """request_id: None = one of this kind is made up, which nobody else has."""
        base = id_given_or_new(request_id, kind)
        names = [base] if len(prompts) == 1 else [f"{base}-{at}" for at in range(len(prompts))]
        taken, claim = await front.peers.claim(names) if request_id is not None else ((), 0)
        return cls(front, prompts, params, base, names, salt, taken, claim)

    def __init__(
        self,
        front: Front,
        prompts: Sequence[Prompt],
        params: SamplingParams,
        request_id: str,
        names: Sequence[str],
        salt: str | None,
        taken: Collection[str],
        claim: int,
    ) -> None:
        self._front = front
        self.request_id = request_id
        self._names = names
        self._claim = claim
        self.prompts = prompts
        self.params = params
        self.num_cached_tokens = 0
        self._handles: list[Any] = []
        self._ended: set[int] = set()
        try:
            for at, (prompt, name) in enumerate(zip(prompts, names, strict=True)):
                if name in taken:
                    refused = _Taken(name)
                    self._handles.append(refused)
                    self._over(at, refused.error)
                    continue
                if prompt.checkpoint is not None:
                    handle = front.llm.submit(prompt.checkpoint, request_id=name)
                else:
                    asked = {"prompt_token_ids": prompt.token_ids, "cache_salt": salt}
                    handle = front.llm.submit(asked, params, request_id=name)
                self._handles.append(handle)
                handle.add_done_callback(partial(self._over, at))
                front.feed.follow(handle, len(prompt.token_ids), params)
        except BaseException:
            self.abort()
            raise

    def abort(self) -> None:
        """End what has not ended."""
        for at, handle in enumerate(self._handles):
            if at not in self._ended:
                with contextlib.suppress(PerdureError):
                    handle.abort()
                self._release(at)

    def _over(self, at: int, result: RequestOutput | BaseException) -> None:
        """A request of the engine has ended, whoever still waits for it."""
        self._ended.add(at)
        self._release(at)
        self._front.ended(self._names[at], len(self.prompts[at].token_ids), self.params, result)

    def _release(self, at: int) -> None:
        if self._claim:
            self._front.peers.release([self._names[at]], self._claim)

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    async def results(self) -> list[RequestOutput | PerdureError]:
        """In the order of the prompts."""
        return [await self._result(at) for at in range(len(self._handles))]

    async def _result(self, at: int) -> RequestOutput | PerdureError:
        try:
            result: RequestOutput = await self._handles[at]
        except PerdureError as error:
            return error
        self.num_cached_tokens += result.num_cached_tokens
        return result

    async def parts(self) -> AsyncIterator[Part]:
        """Of all prompts as they come; the last of each is `finished` or an error."""
        if len(self._handles) == 1:
            async for part in self._parts_of(0):
                yield part
            return
        parts: asyncio.Queue[Part] = asyncio.Queue()

        async def follow(at: int) -> None:
            async for part in self._parts_of(at):
                parts.put_nowait(part)

        following = [asyncio.create_task(follow(at)) for at in range(len(self._handles))]
        try:
            left = len(following)
            while left:
                part = await parts.get()
                left -= isinstance(part.output, PerdureError) or part.output.finished
                yield part
        finally:
            for task in following:
                task.cancel()

    async def _parts_of(self, at: int) -> AsyncIterator[Part]:
        try:
            async for output in self._handles[at]:
                if output.finished:
                    self.num_cached_tokens += output.num_cached_tokens
                yield Part(at, output)
        except PerdureError as error:
            yield Part(at, error)


async def unless_gone(request: Request, work: Coroutine[Any, Any, T], abort: Callable[[], None]) -> T:
    """The work's result. If it fails, the client goes, or this is cancelled, `abort` is called."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(until_gone(request.receive))
    is_whole = False
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        result = task.result()
        is_whole = True
        return result
    finally:
        if not is_whole:
            abort()
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)
