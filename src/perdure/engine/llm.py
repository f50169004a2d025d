"""`LLM`: the engine for scripts. Calls block; any number of threads may call at once, each gets its own results."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self, cast

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.config import EngineConfig
from perdure.api.errors import InvalidValue, PerdureError, shown
from perdure.api.event import Event
from perdure.api.output import Replicas, RequestOutput, Stats
from perdure.api.request import RequestId
from perdure.api.sampling import SamplingParams
from perdure.engine.conversation import all_laid_out, laid_out
from perdure.engine.desk import Desk
from perdure.engine.handle import REFUSALS, Arrivals, refused_output
from perdure.engine.pinned import PinnedPrefix
from perdure.engine.progress import follow
from perdure.engine.prompts import Prompt, PromptOrError, as_batch, is_list, name_of, params_for, submission
from perdure.engine.scoring import SCORING, Scoring
from perdure.engine.start import start
from perdure.engine.text import build_output
from perdure.engine.tokenizer import Tokenizer
from perdure.models.weight_set import Source

Conversation = Sequence[Mapping[str, Any]]


class Call:
    """One call's requests: wakes its caller when the last of them ended."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._ends: dict[int, Event | PerdureError] = {}

    def receiver(self, submission: cmd.Submit) -> Arrivals:
        def ended(event: Event | PerdureError) -> None:
            if isinstance(event, ev.Ended) and event.num_left:
                return
            with self._changed:
                self._ends[submission.request.ticket] = event
                self._changed.notify()

        return Arrivals(submission, ended)

    def wait(self, count: int, timeout_s: float | None = None) -> dict[int, Event | PerdureError]:
        """How each request ended, by ticket, once at least `count` have or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: len(self._ends) >= count, timeout_s)
            return dict(self._ends)


class LLM:
    """A model ready to generate.

    model: a directory, a .gguf file, a Hub id (`org/name`), or nothing for the default model. The other settings are
    `EngineConfig`'s fields.
    Raises `ModelLoadError` (`ModelNotFound`) and `InvalidValue`.
    """

    def __init__(self, model: str | None = None, **config: Any) -> None:
        self._engine: Desk = start(EngineConfig.of(model=None if model is None else str(model), **config))
        self._finalizer = weakref.finalize(self, self._engine.close)

    # Generating

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None = None,
        *,
        request_ids: RequestId | Sequence[RequestId | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Results in the order of the prompts.

        A `Checkpoint` stands where a prompt does: it goes on, with its own settings, and with its own id unless another
        is given.

        One bare prompt that is refused raises its error; in a list it stands as a result with `error` set.
        use_tqdm: show progress on stderr, if that is a terminal.
        """
        batch, bare = as_batch(prompts)
        return self._generate(batch, bare, sampling_params, request_ids, use_tqdm)

    def chat(
        self,
        messages: Conversation | Sequence[Conversation],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        request_ids: RequestId | Sequence[RequestId] | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """Continue one conversation (a list of {"role", "content"}) or several, laid out by the model's template.
        Refusals are as in `generate`, also of what cannot be laid out. A content is a text, or a list of parts
        {"type": "text", "text"}, of which each is a line.

        tools: JSON schemas that the template describes to the model. A message may have `tool_calls`, as in OpenAI's
        interface. chat_template_kwargs: what else the template knows, such as `enable_thinking`.
        """
        if not is_list(messages):
            raise InvalidValue(f"messages={shown(messages)} is neither a conversation nor a list of conversations")
        bare = bool(messages) and isinstance(messages[0], Mapping)
        given: Any = messages
        prompts: Sequence[PromptOrError]
        if bare:
            prompts = [laid_out(self.tokenizer, given, add_generation_prompt, tools, chat_template_kwargs)]
        else:
            prompts = all_laid_out(self.tokenizer, given, add_generation_prompt, tools, chat_template_kwargs)
        return self._generate(prompts, bare, sampling_params, request_ids, use_tqdm)

    def logprobs(
        self, prompts: Prompt | Sequence[Prompt], continuations: Prompt | Sequence[Prompt] | None = None
    ) -> list[RequestOutput]:
        """Score without generating: `prompt_logprobs` of each result holds a score of every prompt token but the first.

        With continuations, one a prompt, these are scored instead, each given its prompt: they stand in `outputs[0]`
        as if they had been generated. Refusals are as in `generate`.
        """
        scoring = Scoring(prompts, continuations, self.tokenizer, self.vocab_size)
        return scoring.shown(self._generate(scoring.prompts, scoring.bare, SCORING))

    def _generate(
        self,
        batch: Sequence[PromptOrError],
        bare: bool,
        sampling_params: SamplingParams | Sequence[SamplingParams | None] | None,
        request_ids: RequestId | Sequence[RequestId | None] | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """The results of a batch; the refusal of a bare prompt is raised."""
        params = params_for(batch, sampling_params)
        named, ids = self._named(batch, request_ids)
        results = self._run(named, params, ids, use_tqdm)
        error = results[0].error if bare else None
        if isinstance(error, REFUSALS):
            raise error
        return results

    def _named(
        self, prompts: Sequence[PromptOrError], given: RequestId | Sequence[RequestId | None] | None
    ) -> tuple[list[PromptOrError], list[RequestId]]:
        """What is submitted, and under which ids. In place of a prompt whose id can be none stands that refusal."""
        if given is None:
            given = [None] * len(prompts)
        if not isinstance(given, (str, int, Sequence)):
            raise InvalidValue(f"request_ids={shown(given)} is neither an id nor a list of ids")
        ids: list[RequestId | None] = [given] if isinstance(given, (str, int)) else list(given)
        if len(ids) != len(prompts):
            raise InvalidValue(f"request_ids has {len(ids)} entries for {len(prompts)} prompts")
        named: list[PromptOrError] = list(prompts)
        for at, one in enumerate(ids):
            try:
                name_of(prompts[at], one)
            except InvalidValue as error:
                named[at], ids[at] = error, None
        return named, self._engine.names_for(named, ids)

    def _run(
        self, prompts: Sequence[PromptOrError], params: list[SamplingParams], ids: list[RequestId], use_tqdm: bool
    ) -> list[RequestOutput]:
        call = Call()
        results: dict[int, RequestOutput] = {}
        receivers: dict[int, tuple[int, Arrivals]] = {}
        for at, (prompt, one, request_id) in enumerate(zip(prompts, params, ids, strict=True)):
            ticket = self._engine.ticket()
            try:
                wanted = submission(prompt, one, request_id, ticket, self.tokenizer, stream=False, is_closed=True)
            except InvalidValue as error:
                results[at] = refused_output(request_id, one, error)
                continue
            receivers[ticket] = (at, call.receiver(wanted))
        start, reporter = time.monotonic(), self._engine.reporter
        self._engine.submit([(receiver.submission, receiver) for _, receiver in receivers.values()])
        try:
            follow(
                lambda timeout_s: len(call.wait(len(receivers), timeout_s)),
                len(receivers),
                lambda: self._engine.ask(cmd.GetStats),
                reporter,
                bar=use_tqdm or reporter.asked,
            )
        except KeyboardInterrupt:
            self._engine.send(cmd.Abort(tickets=list(receivers)))
            call.wait(len(receivers))
            raise
        ends = call.wait(len(receivers))
        reporter.generated([receiver.records for _, receiver in receivers.values()], time.monotonic() - start)
        for ticket, end in ends.items():
            at, receiver = receivers[ticket]
            results[at] = self._result(receiver, end)
        return [results[at] for at in range(len(prompts))]

    def _result(self, receiver: Arrivals, end: Event | PerdureError) -> RequestOutput:
        match end:
            case PerdureError():
                raise end
            case ev.Refused(_, request_id, failure):
                return refused_output(request_id, receiver.request.params, failure.to_exception())
            case ev.Ended():
                return build_output(
                    receiver.request,
                    receiver.records,
                    self.tokenizer,
                    receiver.metrics(),
                    self._engine.returns_prompt,
                )
        raise AssertionError(end)

    # Control

    def abort(self, request_ids: RequestId | Sequence[RequestId] | None = None) -> None:
        """End live requests with what they have, from any thread; None = all. Unknown and finished ids do nothing."""
        self._engine.abort(request_ids)

    def checkpoint(self, request_id: RequestId, end: bool = False) -> Checkpoint:
        """A live request as a plain value, from any thread; it lives on, or ends with what it has.

        Submitted in place of a prompt, here, in another engine or another process, it goes on to the same result.
        Raises `InvalidValue` if no live request has this id.
        """
        found = self._engine.checkpoint(request_id, end).result()
        assert isinstance(found, Checkpoint)
        return found

    def pause(self, mode: cmd.PauseMode = "keep") -> None:
        """Returns when no token will come before `resume`. keep: requests stay; wait: they end first; abort: now."""
        self._engine.pause(mode).result()

    def suspend(self, kv: cmd.KVMode = "persist", weights: cmd.WeightsMode = "keep") -> None:
        """Returns when no step is in flight and memory is given back, until `resume`. Requests inside stay and go on
        with the same result; new ones are refused (`StateError`). Suspending twice is suspending once.

        kv: "persist" keeps the KV where it is; "offload" copies what is wanted of it out and gives the pool back;
        "recompute" drops it, to be computed again. weights: "keep" them in memory; "offload" them to a temporary file;
        "drop" them, to be updated before the KV wakes: `resume(tags=["weights"])`, `update_weights(...)`, `resume()`.
        """
        self._engine.suspend(kv, weights).result()

    def resume(self, tags: Sequence[cmd.Tag] | None = None) -> None:
        """Go on after `pause` or `suspend`. tags: what wakes of a suspended engine, "weights" and "kv"; None = all. It
        runs again when all is back. Nothing happens in a running engine."""
        self._engine.resume(tags).result()

    def reset(self) -> None:
        """Begin anew, as after start: an empty cache, counts at zero; weights and their epoch stay. `StateError` with
        requests inside, while a prefix is pinned, or while suspended; nothing has changed then."""
        self._engine.ask(cmd.Reset).result()

    def update_weights(
        self,
        weights: Source | None,
        *,
        epoch: int | None = None,
        cache: cmd.CachePolicy = "invalidate",
        in_flight: cmd.InFlightPolicy = "recompute",
    ) -> None:
        """Compute with other weights of the same model from now on. All is checked before the first byte is written; a
        failure after that leaves the engine suspended, until a whole update succeeds.

        weights: a directory, a GGUF file, or tensors by the names of Hugging Face's files (a mapping, or pairs: all are
        taken before the first is written). None moves the epoch alone. epoch: the number of these weights in
        `weight_epochs`; None = one more than now. It names the weights: the same number, the same weights.
        cache: "invalidate" forgets cached prefixes; "salt" keeps them for the epoch they belong to; "keep" goes on
        using them, and results that do are not `exact`. in_flight: "recompute" computes what requests inside have so
        far with the new weights; "keep" leaves it, and their results are not `exact`. Tokens stay in both.
        """
        self._engine.update_weights(weights, epoch, cache, in_flight).result()

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; live requests keep their pages."""
        self._engine.ask(cmd.ResetPrefixCache).result()

    def pin_prefix(self, prompt: Prompt) -> PinnedPrefix:
        """Keep a prompt's cached pages, however full the pool is, until `release`, or the end of a `with` block: the
        prompt that many requests begin with is computed once.

        Nothing is computed for it: its full pages are held from when a request has computed them. Where the cache is
        cleared, the KV dropped or other weights loaded, they go like all others, and are held again when they are
        computed again. Raises `InvalidValue` where it would leave the longest request no room, or holds no full page.
        """
        pin, answer = self._engine.pin(prompt)
        return PinnedPrefix(self._engine, pin, cast(int, answer.result()))

    def stats(self) -> Stats:
        found = self._engine.ask(cmd.GetStats).result()
        assert isinstance(found, Stats)
        return found

    def replicas(self) -> Replicas:
        """Who computes, and how much each has to do; it waits for no step. Without a coordinator that is one."""
        found = self._engine.replicas().result()
        assert isinstance(found, Replicas)
        return found

    # What it is

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self._engine.tokenizer

    @property
    def vocab_size(self) -> int:
        """The width of the logits, which may be more than the tokenizer has ids."""
        return self._engine.vocab_size

    def get_default_sampling_params(self) -> SamplingParams:
        """What the model's generation config suggests; never applied unless passed."""
        return SamplingParams(**self._engine.sampling_defaults)

    def describe(self) -> dict[str, Any]:
        """The configuration as resolved: model, weights, pool, backends."""
        return self._engine.describe()

    def shutdown(self) -> None:
        """End everything and give memory and threads back. Later calls raise `EngineDead`."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
