"""The scripted model S of the cases: the real loop and core, a device whose tokens come from a script, exact timing.

- A turn of the loop happens when a test says so; what is sent before it is applied in it.
- The device's memory is the fake device's: it fails on any read of a position that was not written, and scores depend
  on everything before them. Only the tokens are the script's.
- No torch, no thread, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.config import CoreConfig
from perdure.api.output import Stats
from perdure.api.plan import NO_LOGPROBS, RowInit, StepOutput, StepPlan
from perdure.api.request import Request, RequestId
from perdure.api.sampling import SamplingParams
from perdure.api.scores import TokenScores
from perdure.core.group import Group
from perdure.core.scheduler import Scheduler
from perdure.core.state import RequestState
from perdure.engine.loop import Inbox, Loop
from perdure.engine.spelling import Spelling, sentencepiece, text_cursor
from perdure.ops.philox import uniforms
from perdure.runner import fake

Script = Sequence[int] | Callable[[RowInit, int], int]
"""The tokens of a request by output index (the last one again and again), or a function of settings and index."""

VOCAB, END = 512, 257
MAX_TURNS = 5_000


def counting(first: int) -> Script:
    """first, first + 1, ... and round again after 50: never stops."""
    return lambda settings, index: first + index % 50


def flat(settings: RowInit, index: int) -> int:
    """The keyed draw from equal logits."""
    u = uniforms(np.array([settings.seed], np.uint64), np.array([index], np.int64), settings.child)
    return int(u[0] * VOCAB)


class ScriptedDevice(fake.FakeDevice):
    """script_of(serial number) is the script of a request. on_launch is told of each plan; plans are all of them."""

    def __init__(
        self, config: CoreConfig, script_of: Callable[[int], Script], on_launch: Callable[[StepPlan], None]
    ) -> None:
        super().__init__(config.num_pages, config.page_size, config.max_num_seqs, config.vocab_size)
        self.plans: list[StepPlan] = []
        self.during_step: Callable[[StepPlan], None] = lambda plan: None
        """Called when a step is executed, before its output is known to anybody."""
        self.accepted: dict[int, int] = {}
        """How many tokens a step gives that gives one of this output index, as with accepted drafts; the request must
        end among them. 1 if not named."""
        self._script_of = script_of
        self._on_launch = on_launch
        self._scripts: dict[int, Script] = {}

    def launch(self, plan: StepPlan) -> fake.FakeTicket:
        self.plans.append(plan)
        self._on_launch(plan)
        for arrival in plan.request:
            self._scripts.setdefault(arrival, self._script_of(arrival))
        return super().launch(plan)

    def _execute(self, plan: StepPlan) -> StepOutput:
        self.during_step(plan)
        return super()._execute(plan)

    def _run_row(
        self, plan: StepPlan, row: int, given: list[int], targets: list[int], made: fake.Made, may_draw: bool
    ) -> int:
        if not super()._run_row(plan, row, given, targets, made, may_draw):
            return 0
        slot = plan.slot[row]
        settings, end = self._settings[slot], self._position[slot]
        assert settings is not None
        token = self._scripted(settings, end - settings.prompt_length)
        made.tokens[-1] = self._last_token[slot] = self._history[slot][-1] = token
        content = self._kv[self._tables[slot]].reshape(-1)[:end]
        scores = settings.num_logprobs != NO_LOGPROBS
        if scores:
            made.records.columns.chosen[-1] = fake.score(self._read(content), token)
        count = self.accepted.get(end - settings.prompt_length, 1)
        for index in range(end - settings.prompt_length + 1, end - settings.prompt_length + count):
            content = np.append(content, np.uint64(fake.chain(int(content[-1]), token, self.weights)))
            token = self._scripted(settings, index)
            made.tokens.append(token)
            if scores:
                at, known = settings.prompt_length + index, self._read(content)
                drawn = fake.draw(known, settings.seed, index, settings, self.vocab_size)
                ids, values = fake.top(known, drawn, settings.num_logprobs, self.vocab_size)
                made.records.add(row, at, fake.score(known, token), 1 + known % 5, ids, values)
        return count

    def _scripted(self, settings: RowInit, index: int) -> int:
        script = self._scripts[settings.request]
        token = script(settings, index) if callable(script) else script[min(index, len(script) - 1)]
        while index < settings.min_tokens and token in settings.masked_ids:
            token = (token + 1) % self.vocab_size
        return token


class Pieces:
    """A tokenizer whose ids have each a piece of their own, or the character of that number; END is special.

    A piece `<0xF0>` is one byte.
    """

    all_special_ids = (END,)

    def __init__(self, pieces: dict[int, str]) -> None:
        self.pieces = pieces
        self.spelling = Spelling(lambda token: self.pieces.get(token, chr(token)), (END,), sentencepiece)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.spelling.decode(ids, skip_special_tokens)


class Call:
    """One submitted request and all that was told of it.

    streamed, scores_of: as streamed, by child. records: of children, as they ended. token_ids, scores, record: of the
    first child, which most have alone. told: what a stream is made of. residencies: how many output tokens the first
    child had each time it was given a slot.
    """

    def __init__(self, stage: Stage, request: Request, script: Script) -> None:
        self.stage = stage
        self.request = request
        self.script = script
        children = range(request.params.n)
        self.records: dict[int, ev.Record] = {}
        self.refusal: ev.Failure | None = None
        self.streamed: list[list[int]] = [[] for _ in children]
        self.scores_of = [TokenScores(listed_ids=request.params.logprob_token_ids) for _ in children]
        self.token_ids, self.scores = self.streamed[0], self.scores_of[0]
        self.told: list[ev.Progress | ev.Ended] = []
        self.residencies: list[int] = []
        self.num_ends = 0

    def take(self, event: ev.Event) -> None:
        assert not self.num_ends, f"{event} after the end of {self.request.request_id!r}"
        if isinstance(event, (ev.Progress, ev.Ended)):
            self.told.append(event)
        match event:
            case ev.Refused(_, request_id, failure):
                assert request_id == self.request.request_id
                self.num_ends, self.refusal = self.num_ends + 1, failure
            case ev.Ended(_, record, num_left):
                assert repr(record.request_id) == repr(self.request.request_id)  # 7 and "7" differ
                assert record.child not in self.records, "two ends of one child"
                self.records[record.child] = record
                assert num_left == self.request.params.n - len(self.records)
                self.num_ends += not num_left
            case ev.Progress(_, first, token_ids, scores, _, child):
                assert child not in self.records and first == len(self.streamed[child])
                self.streamed[child] += token_ids
                if scores is not None:
                    self.scores_of[child].extend(scores)

    @property
    def record(self) -> ev.Record | None:
        return self.records.get(0)

    @property
    def ended(self) -> ev.Record:
        """How it ended; a failure if it has not."""
        assert self.record is not None, f"{self.request.request_id!r} has not ended (refused: {self.refusal})"
        return self.record

    @property
    def group(self) -> Group:
        """The core's own record, while live."""
        group = self.stage.scheduler.requests.live[self.request.request_id]
        assert group.request.ticket == self.request.ticket
        return group

    @property
    def state(self) -> RequestState:
        """Of its first child."""
        return self.group.children[0]

    @property
    def is_live(self) -> bool:
        group = self.stage.scheduler.requests.live.get(self.request.request_id)
        return group is not None and group.request.ticket == self.request.ticket

    @property
    def num_output(self) -> int:
        """Tokens known so far."""
        return self.state.num_output if self.is_live else len(self.ended.token_ids)


class Stage:
    """A scheduler, its loop and a scripted device, turned by hand.

    Pages are roomy unless num_pages is given. pieces: the text of ids. Other settings: `CoreConfig`.
    """

    def __init__(self, depth: int = 1, *, pieces: dict[int, str] | None = None, **settings: Any) -> None:
        defaults: dict[str, Any] = {"num_pages": 320, "page_size": 16, "max_model_len": 256, "max_num_seqs": 16}
        defaults |= {"max_num_batched_tokens": 512, "vocab_size": VOCAB, "end_token_ids": (END,)}
        self.config = CoreConfig(**{**defaults, **settings})
        self.tokenizer = Pieces(pieces or {})
        self.scheduler = Scheduler(
            self.config, lambda request: text_cursor(self.tokenizer, request.params.skip_special_tokens)
        )
        self.device = ScriptedDevice(self.config, self._script_of, self._on_launch)
        self.inbox = Inbox()
        self.loop = Loop(self.scheduler, self.device, self.inbox, self._publish, steps_in_flight=depth, check=True)
        self.calls: dict[int, Call] = {}
        self.answers: dict[int, object] = {}
        self.events: list[ev.Event] = []
        self._next_ticket = 0

    def _call(self, arrival: int) -> Call:
        return self.calls[self.scheduler.requests.states[arrival].request.ticket]

    def _script_of(self, arrival: int) -> Script:
        return self._call(arrival).script

    def _on_launch(self, plan: StepPlan) -> None:
        for settings in plan.row_inits:
            state = self.scheduler.requests.states[settings.request]
            if state.child == 0:
                self._call(settings.request).residencies.append(state.num_output)

    def _publish(self, events: list[ev.Event], time: float) -> None:
        self.events += events
        for event in events:
            if isinstance(event, ev.Done):
                assert event.ticket not in self.answers, "a command answered twice"
                self.answers[event.ticket] = event.value if event.failure is None else event.failure
            elif isinstance(event, ev.Taken):
                assert event.request_ticket in self.calls
                self.answers[event.ticket] = event.checkpoint
            else:
                self.calls[event.ticket].take(event)

    # Sending: applied in the next turn

    def ticket(self) -> int:
        self._next_ticket += 1
        return self._next_ticket

    def submit(
        self,
        prompt: Sequence[int],
        script: Script,
        *,
        request_id: RequestId | None = None,
        stream: bool = True,
        params: SamplingParams | None = None,
        **settings: Any,
    ) -> Call:
        """Submit a request, greedy and with scores unless the settings say otherwise."""
        ticket = self.ticket()
        params = params or SamplingParams(**{"temperature": 0.0, "logprobs": 0, **settings})
        name = f"request-{ticket}" if request_id is None else request_id
        call = Call(self, Request(name, ticket, list(prompt), params, stream=stream), script)
        self.calls[ticket] = call
        self.inbox.put(cmd.Submit(call.request))
        return call

    def go_on(self, checkpoint: Checkpoint, script: Script, request_id: RequestId | None = None) -> Call:
        """Submit a checkpoint; script: of the whole request."""
        ticket = self.ticket()
        name = checkpoint.request_id if request_id is None else request_id
        call = Call(self, checkpoint.as_request(name, ticket, stream=True), script)
        self.calls[ticket] = call
        self.inbox.put(cmd.Submit(call.request, checkpoint))
        return call

    def ask_checkpoint(self, request_id: RequestId, end: bool = False) -> Checkpoint | ev.Failure:
        """Taken in the next turn, and through its file form."""
        ticket = self.ticket()
        self.inbox.put(cmd.TakeCheckpoint(ticket, request_id, end=end))
        self.turn()
        found = self.answers[ticket]
        assert isinstance(found, (Checkpoint, ev.Failure))
        assert isinstance(found, ev.Failure) or Checkpoint.from_bytes(found.to_bytes()) == found
        return found

    def checkpoint(self, call: Call, end: bool = False) -> Checkpoint:
        found = self.ask_checkpoint(call.request.request_id, end)
        assert isinstance(found, Checkpoint)
        return found

    def abort(self, *request_ids: RequestId) -> None:
        self.inbox.put(cmd.Abort(request_ids=list(request_ids)))

    def abort_all(self) -> None:
        self.inbox.put(cmd.Abort(everything=True))

    def pause(self, mode: cmd.PauseMode = "keep") -> int:
        """The ticket of the answer."""
        ticket = self.ticket()
        self.inbox.put(cmd.Pause(ticket, mode))
        return ticket

    def suspend(self, kv: cmd.KVMode) -> int:
        """The ticket of the answer."""
        ticket = self.ticket()
        self.inbox.put(cmd.Suspend(ticket, kv))
        return ticket

    def resume(self) -> None:
        self.inbox.put(cmd.Resume(self.ticket()))

    # Turning

    @property
    def num_in_flight(self) -> int:
        return len(self.loop._in_flight)

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn(block=False)

    def until(self, holds: Callable[[], bool]) -> None:
        """Turn until all that was sent is applied and it holds."""
        for _ in range(MAX_TURNS):
            if not self.inbox._commands and holds():
                return
            self.turn()
        raise AssertionError(f"it never came to hold: {self.stats()}")

    def run(self) -> None:
        """Turn until every request has ended and nothing is in flight."""
        self.until(lambda: not self.num_in_flight and all(call.num_ends for call in self.calls.values()))

    def stats(self) -> Stats:
        return self.scheduler.stats()

    # Judging

    def check_clean_end(self) -> None:
        """Runs to the end; then nothing is left of anything, and a fresh request equals its reference."""
        self.run()
        self._check_empty()
        fresh = self.submit([3, 1, 4, 1, 5], counting(40), max_tokens=5)
        self.run()
        check_equals_solo(fresh)
        assert fresh.ended.token_ids == [40, 41, 42, 43, 44]
        self._check_empty()

    def _check_empty(self) -> None:
        stats = self.stats()
        assert stats.num_free_pages == stats.num_pages == self.config.num_pages
        assert stats.num_running == stats.num_waiting == stats.num_paused == 0
        assert not self.scheduler.requests.live and not self.scheduler.requests.states
        assert all(call.num_ends == 1 for call in self.calls.values())


def solo(call: Call, num_tokens: int | None = None) -> ev.Record:
    """The same request, alone, with room for everything, one step at a time: its reference. Or only its beginning."""
    config, params = call.stage.config, call.request.params
    stage = Stage(
        max_model_len=min(config.max_num_tokens, config.max_model_len),
        page_size=config.page_size,
        pieces=call.stage.tokenizer.pieces,
        num_pages=-(-config.max_model_len // config.page_size),
    )
    params = replace(params, seed=call.ended.seed)
    if num_tokens is not None:
        params = replace(params, max_tokens=num_tokens, min_tokens=min(num_tokens, params.min_tokens))
    alone = stage.submit(call.request.prompt_token_ids, call.script, params=params, request_id=call.request.request_id)
    stage.run()
    return alone.ended


def check_equals_solo(call: Call, num_tokens: int | None = None) -> None:
    """Ids, scores and prompt scores are those of its reference. num_tokens: it was cut short after so many."""
    record, truth = call.ended, solo(call, num_tokens)
    assert record.failure is None
    assert record.token_ids == truth.token_ids
    assert record.scores == truth.scores
    if num_tokens is None:
        assert (record.finish_reason, record.stop) == (truth.finish_reason, truth.stop)
        assert record.prompt_scores == truth.prompt_scores
    if call.request.stream:
        told = len(call.token_ids)
        assert call.token_ids == record.token_ids[:told]
        assert record.scores is None or call.scores == record.scores.cut(0, told)
