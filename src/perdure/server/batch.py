"""`Batch`: the engine's requests that one HTTP request became. Whatever ends early is aborted, and nothing is left.

A prompt that is refused stands as its error among the results of the others; the caller decides what becomes of it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, NamedTuple, TypeVar

from starlette.requests import Request

from perdure import PerdureError, RequestOutput, SamplingParams
from perdure.server.front import Front
from perdure.server.prompts import Prompt
from perdure.server.stream import until_gone

T = TypeVar("T")


class ClientGone(Exception):
    """Nobody is there to be answered."""


class Part(NamedTuple):
    """Of which prompt, and what: something new, the last with `finished`, or the error that ended or refused it."""

    prompt: int
    output: RequestOutput | PerdureError


class Batch:
    """All are submitted when this is made. Raises `EngineDead`."""

    def __init__(
        self, front: Front, prompts: Sequence[Prompt], params: SamplingParams, request_id: str, salt: str | None
    ) -> None:
        self._front = front
        self.prompts = prompts
        self.params = params
        self.num_cached_tokens = 0
        self._handles: list[Any] = []
        self._ended: set[int] = set()
        self._num_tokens: Counter[tuple[int, int]] = Counter()
        """Of each prompt's samples, as told so far."""
        names = [request_id] if len(prompts) == 1 else [f"{request_id}-{at}" for at in range(len(prompts))]
        try:
            for prompt, name in zip(prompts, names, strict=True):
                if prompt.checkpoint is not None:
                    self._handles.append(front.llm.submit(prompt.checkpoint, request_id=name))
                    continue
                asked = {"prompt_token_ids": prompt.token_ids, "cache_salt": salt}
                handle = front.llm.submit(asked, params, request_id=name)
                self._handles.append(handle)
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

    @property
    def num_prompt_tokens(self) -> int:
        return sum(len(prompt.token_ids) for prompt in self.prompts)

    async def results(self) -> list[RequestOutput | PerdureError]:
        """In the order of the prompts."""
        return [await self._result(at) for at in range(len(self._handles))]

    async def _result(self, at: int) -> RequestOutput | PerdureError:
        try:
            result: RequestOutput | PerdureError = await self._handles[at]
        except PerdureError as error:
            result = error
        self._count(at, result)
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
                self._count(at, output)
                yield Part(at, output)
        except PerdureError as error:
            self._count(at, error)
            yield Part(at, error)

    def _count(self, at: int, told: RequestOutput | PerdureError) -> None:
        metrics = self._front.metrics
        if isinstance(told, RequestOutput):
            for output in told.outputs:
                self._num_tokens[at, output.index] += len(output.token_ids)
                if output.finish_reason is not None:
                    metrics.output_ended(self._num_tokens[at, output.index], output.finish_reason)
            if not told.finished:
                return
            self.num_cached_tokens += told.num_cached_tokens
        self._ended.add(at)
        metrics.ended(len(self.prompts[at].token_ids), self.params, told)


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
