"""`AsyncLLM`: the same engine for asyncio. `submit` gives a handle that streams, can be awaited, and aborted."""

from __future__ import annotations

import asyncio
import contextlib
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, cast

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.config import EngineConfig
from perdure.api.errors import InvalidValue, PerdureError
from perdure.api.event import Event
from perdure.api.output import Replicas, RequestMetrics, RequestOutput, Stats
from perdure.api.request import Request, RequestId
from perdure.api.sampling import SamplingParams
from perdure.coordinator.wire import read_secret
from perdure.engine.chat_template import Messages, TemplateKwargs, Tools
from perdure.engine.conversation import laid_out
from perdure.engine.desk import Desk
from perdure.engine.handle import REFUSALS, Arrivals, refused_output
from perdure.engine.pinned import AsyncPinnedPrefix
from perdure.engine.prompts import Prompt, PromptOrError, params_for, submission
from perdure.engine.remote import PATIENCE_S, RemoteEngine
from perdure.engine.scoring import SCORING, Scoring
from perdure.engine.start import start
from perdure.engine.text import StreamBuilder, build_completion, build_output
from perdure.engine.tokenizer import Tokenizer
from perdure.models.weight_set import Source


class Handle:
    """One submitted request.

    `async for part in handle` gives parts as they come, the last with `finished` True; with n > 1 each part is of one
    sample, whose `index` it has. `await handle` gives the whole result; both may be used, and awaited again. A refused
    request raises its error from either. Leaving an iteration early ends nothing: `abort` does.
    """

    def __init__(self, engine: Desk, submission: cmd.Submit) -> None:
        self._engine = engine
        self._request = request = submission.request
        self._loop = asyncio.get_running_loop()
        self._result: asyncio.Future[RequestOutput] = self._loop.create_future()
        self._result.add_done_callback(_seen)
        self._parts: asyncio.Queue[RequestOutput | None] = asyncio.Queue()
        self._receiver = Arrivals(submission, self._hand_over)
        cumulative = request.params.output_kind == "cumulative"
        children = range(request.params.n) if request.stream else ()
        self._builders = [StreamBuilder(request, engine.tokenizer, cumulative, child) for child in children]

    @property
    def request_id(self) -> RequestId:
        return self._request.request_id

    @property
    def receiver(self) -> Arrivals:
        return self._receiver

    @property
    def metrics(self) -> RequestMetrics:
        """What has happened to it until now, as far as it is known here."""
        return self._receiver.metrics()

    @property
    def num_output_tokens(self) -> int:
        """Of all samples; until it ends, of a request that streams."""
        return self._receiver.num_output_tokens

    def add_done_callback(self, call: Callable[[RequestOutput | BaseException], None]) -> None:
        """Called on the loop with the result, or with the error if there is nothing else."""
        self._result.add_done_callback(lambda done: call(done.exception() or done.result()))

    def abort(self) -> None:
        """End it with what it has; the handle then gives the partial result. Nothing happens if it has ended."""
        self._engine.send(cmd.Abort(tickets=[self._request.ticket]))

    async def checkpoint(self, end: bool = False) -> Checkpoint:
        """It as a plain value; it lives on, or ends with what it has. Raises `InvalidValue` if it has ended."""
        return await _checkpoint(self._engine.checkpoint(None, end, self._request.ticket))

    def __await__(self) -> Generator[Any, None, RequestOutput]:
        return asyncio.shield(self._result).__await__()

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        while (part := await self._parts.get()) is not None:
            yield part
        self._parts.put_nowait(None)
        if error := self._result.exception():
            raise error

    def _hand_over(self, event: Event | PerdureError) -> None:
        """On the engine's thread: go over to the caller's loop, unless that is gone."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.take, event)

    def take(self, event: Event | PerdureError) -> None:
        """What became of the request, on the caller's loop."""
        if self._result.done():
            return
        try:
            self._take(event)
        except Exception as error:  # a part could not be made: whoever waits hears of it, and nothing more is computed
            self._result.set_exception(error)
            self._parts.put_nowait(None)
            with contextlib.suppress(PerdureError):
                self.abort()

    def _take(self, event: Event | PerdureError) -> None:
        match event:
            case ev.Progress(_, _, token_ids, scores, epoch, child):
                if (part := self._builders[child].progress(token_ids, scores, epoch)) is not None:
                    self._parts.put_nowait(part)
                return
            case ev.Ended(_, record, num_left) if num_left:
                if self._builders:
                    self._parts.put_nowait(self._last_part(record))
                return
            case ev.Ended(_, record):
                metrics, engine = self._receiver.metrics(), self._engine
                records, tokenizer = self._receiver.records, engine.tokenizer
                result = part = build_output(self._request, records, tokenizer, metrics, engine.returns_prompt)
                if self._builders:
                    last = self._builders[record.child].end(result.outputs[record.child])
                    part = replace(result, outputs=[last])
                self._parts.put_nowait(part)
                self._result.set_result(result)
            case ev.Refused(_, _, failure):
                self._result.set_exception(failure.to_exception())
            case PerdureError():
                self._result.set_exception(event)
        self._parts.put_nowait(None)

    def _last_part(self, record: ev.Record) -> RequestOutput:
        """Of a sample that has ended before others."""
        completion, failure = build_completion(self._request, record, self._engine.tokenizer)
        last = self._builders[record.child].end(completion)
        error = None if failure is None else failure.to_exception()
        return RequestOutput(self._request.request_id, [last], finished=False, error=error)


def _seen(future: asyncio.Future[RequestOutput]) -> None:
    """Mark an error as retrieved: whoever iterates or awaits gets it, and nobody else needs a warning."""
    if not future.cancelled():
        future.exception()


class AsyncLLM:
    """`LLM` for asyncio; the settings are the same."""

    def __init__(self, model: str | None = None, **config: Any) -> None:
        self._engine: Desk = start(EngineConfig.of(model=None if model is None else str(model), **config))
        self._finalizer = weakref.finalize(self, self._engine.close)

    @classmethod
    def connect(
        cls,
        endpoint: str,
        *,
        tokenizer: str | None = None,
        secret_file: str | None = None,
        secret: str | None = None,
        return_prompt: bool = False,
        patience_s: float = PATIENCE_S,
    ) -> Self:
        """The replicas behind a coordinator that somebody else started; the arguments are `Client`'s. secret: what else
        would stand in the file. It waits until somebody serves: call it before the event loop runs, or by
        `asyncio.to_thread`."""
        self = cls.__new__(cls)
        self._engine = RemoteEngine(
            endpoint,
            secret=secret if secret_file is None else read_secret(secret_file),
            tokenizer=tokenizer,
            return_prompt=return_prompt,
            patience_s=patience_s,
        )
        self._finalizer = weakref.finalize(self, self._engine.close)
        return self

    def submit(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: RequestId | None = None
    ) -> Handle:
        """Submit one request, streaming unless `output_kind` is "final". Returns at once; a refusal is raised by the
        handle. A `Checkpoint` stands where a prompt does, and what it has already is its first part."""
        return self._submit(prompt, sampling_params, request_id)

    def _submit(
        self, prompt: PromptOrError, sampling_params: SamplingParams | None, request_id: RequestId | None = None
    ) -> Handle:
        engine = self._engine
        (params,) = params_for([prompt], sampling_params)
        (name,) = engine.names_for([prompt], [request_id])
        stream = params.output_kind != "final"
        try:
            wanted = submission(prompt, params, name, engine.ticket(), engine.tokenizer, stream)
        except InvalidValue as error:
            return self._refused(name, params, error)
        handle = Handle(engine, wanted)
        engine.submit([(wanted, handle.receiver)])
        return handle

    def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        *,
        request_id: RequestId | None = None,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        chat_template_kwargs: TemplateKwargs | None = None,
    ) -> Handle:
        """Submit one conversation, laid out as `LLM.chat` does: `await` gives the result, `async for` streams it."""
        try:
            prompt = self.lay_out(messages, add_generation_prompt, tools, chat_template_kwargs)
        except InvalidValue as error:
            (params,) = params_for([""], sampling_params)
            (name,) = self._engine.names_for([""], [request_id])
            return self._refused(name, params, error)
        return self.submit(prompt, sampling_params, request_id=request_id)

    def lay_out(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        chat_template_kwargs: TemplateKwargs | None = None,
    ) -> list[int]:
        """The ids that `chat` submits for a conversation. Raises `InvalidValue`."""
        return laid_out(self._engine.tokenizer, messages, add_generation_prompt, tools, chat_template_kwargs)

    def _refused(self, name: RequestId, params: SamplingParams, error: PerdureError) -> Handle:
        """The handle of a request that is wrong in itself."""
        handle = Handle(self._engine, cmd.Submit(Request(name, self._engine.ticket(), [], params)))
        handle.take(error)
        return handle

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, request_id: RequestId | None = None
    ) -> RequestOutput:
        """The whole result of one request. Cancelling the call aborts the request: nobody else could."""
        handle = self.submit(prompt, sampling_params, request_id=request_id)
        try:
            return await handle
        except asyncio.CancelledError:
            handle.abort()
            raise

    async def logprobs(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt] | None = None
    ) -> list[RequestOutput]:
        """Score without generating (`LLM.logprobs`). Cancelling the call aborts its requests."""
        scoring = Scoring(prompts, continuations, self.tokenizer, self.vocab_size)
        handles = [self._submit(prompt, SCORING) for prompt in scoring.prompts]
        try:
            return scoring.shown([await _result_of(handle, scoring.bare) for handle in handles])
        except asyncio.CancelledError:
            for handle in handles:
                handle.abort()
            raise

    async def abort(self, request_ids: RequestId | list[RequestId] | None = None) -> None:
        """End live requests with what they have; None = all."""
        self._engine.abort(request_ids)

    async def checkpoint(self, request_id: RequestId, end: bool = False) -> Checkpoint:
        """A live request as a plain value; it lives on, or ends with what it has."""
        return await _checkpoint(self._engine.checkpoint(request_id, end))

    async def pause(self, mode: cmd.PauseMode = "keep") -> None:
        """Returns when no token will come before `resume`."""
        await _wrapped(self._engine.pause(mode))

    async def suspend(self, kv: cmd.KVMode = "persist", weights: cmd.WeightsMode = "keep") -> None:
        """Returns when no step is in flight and memory is given back, until `resume` (`LLM.suspend`)."""
        await _wrapped(self._engine.suspend(kv, weights))

    async def resume(self, tags: Sequence[cmd.Tag] | None = None) -> None:
        """Go on after `pause` or `suspend` (`LLM.resume`)."""
        await _wrapped(self._engine.resume(tags))

    async def reset(self) -> None:
        """Begin anew, as after start (`LLM.reset`)."""
        await _wrapped(self._engine.ask(cmd.Reset))

    async def update_weights(
        self,
        weights: Source | None,
        *,
        epoch: int | None = None,
        cache: cmd.CachePolicy = "invalidate",
        in_flight: cmd.InFlightPolicy = "recompute",
    ) -> None:
        """Compute with other weights of the same model from now on (`LLM.update_weights`)."""
        order = asyncio.to_thread(self._engine.update_weights, weights, epoch, cache, in_flight)
        await _wrapped(await order)

    async def reset_prefix_cache(self) -> None:
        await _wrapped(self._engine.ask(cmd.ResetPrefixCache))

    async def pin_prefix(self, prompt: Prompt) -> AsyncPinnedPrefix:
        """Keep a prompt's cached pages until `release`, or the end of an `async with` block (`LLM.pin_prefix`)."""
        pin, answer = self._engine.pin(prompt)
        try:
            return AsyncPinnedPrefix(self._engine, pin, cast(int, await _wrapped(answer)))
        except asyncio.CancelledError:  # nobody could release it
            self._engine.unpin(pin)
            raise

    async def stats(self) -> Stats:
        found = await _wrapped(self._engine.ask(cmd.GetStats))
        assert isinstance(found, Stats)
        return found

    async def replicas(self) -> Replicas:
        """Who computes, and how much each has to do (`LLM.replicas`)."""
        found = await _wrapped(self._engine.replicas())
        assert isinstance(found, Replicas)
        return found

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """The width of the logits."""
        return self._engine.vocab_size

    @property
    def coordinator(self) -> tuple[str, str | None] | None:
        """Where others reach what computes here, and with which secret (`connect`); None = it is in this process."""
        return self._engine.coordinator

    def describe(self) -> dict[str, Any]:
        return self._engine.describe()

    def shutdown(self) -> None:
        """End everything and give memory and threads back. Later calls raise `EngineDead`."""
        self._finalizer()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.shutdown)


async def _checkpoint(future: Future[object]) -> Checkpoint:
    found = await _wrapped(future)
    assert isinstance(found, Checkpoint)
    return found


async def _result_of(handle: Handle, bare: bool) -> RequestOutput:
    """A refused request's error stands in its result, unless it was the only one."""
    try:
        return await handle
    except REFUSALS as error:
        if bare:
            raise
        return refused_output(handle.request_id, SCORING, error)


async def _wrapped(future: Future[object]) -> object:
    return await asyncio.wrap_future(future)
