"""One simulated life: random traffic through the real loop and core onto the fake device, judged by the oracle.

Run a range of seeds, or one that failed, from the command line:

    python -m tests.sim.life --depth 2 --first 0 --count 2000
"""

from __future__ import annotations

import argparse
import random
import sys
from collections import Counter
from collections.abc import Sequence

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint, Sample
from perdure.api.config import CoreConfig
from perdure.api.directive import Directive
from perdure.api.event import Failure
from perdure.api.fingerprint import Fingerprint
from perdure.api.output import Stats
from perdure.api.plan import StepOutput, StepPlan
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.api.scores import TokenScores
from perdure.core.admission import derived_seed
from perdure.core.budget import num_pages_for
from perdure.core.lifecycle import Status
from perdure.core.scheduler import Scheduler
from perdure.core.stopping import Begins
from perdure.engine.loop import Inbox, Loop
from perdure.engine.pace import Pace
from perdure.runner.fake import FakeDevice
from tests.sim.elsewhere import Elsewhere
from tests.sim.oracle import PIECES, Expected, expected, text_of
from tests.sim.orders import Orders
from tests.sim.pinning import Pinning

MAX_TURNS = 20_000
SAME_WEIGHTS = Fingerprint(weights="0")
"""Of both engines at their start, and of the other one always."""


KINDS = (
    *(f"suspended by {kv}" for kv in ("persist", "offload", "recompute")),
    *("Pause done", "UpdateWeights done", "Reset done", "checkpoint while running"),
)
STORM = 5
"""A life in which so many kinds of interruption met is a storm."""


class PieceCursor:
    """Text for stop strings, of the simulation's alphabet."""

    def __init__(self) -> None:
        self.begins = Begins()
        self._num_chars = 0

    def push(self, token_ids: Sequence[int]) -> str:
        for token in token_ids:
            self.begins.add(self._num_chars)
            self._num_chars += len(PIECES[token % len(PIECES)])
        return text_of(token_ids)


class RandomPace(Pace):
    """Bursts of any length, now and then."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self._rng = rng

    def most_steps(self, requests: object) -> int:
        return self._rng.choice((1, 2, 3, 4, 8, 16))


class MarkingScheduler(Scheduler):
    """The real scheduler; notes rare ways of ending."""

    marks: Counter[str]

    def commit(self, plan: StepPlan, output: StepOutput) -> list[ev.Event]:
        before = {(state.request.ticket, state.child): state.status for state in self.requests.states.values()}
        told = super().commit(plan, output)
        for event in told:
            if isinstance(event, ev.Ended):
                record = event.record
                self.marks[f"{record.finish_reason} while {before[event.ticket, record.child].value}"] += 1
                if plan.num_steps > 1 and record.finish_reason != "abort":
                    self.marks[f"{record.finish_reason} in a burst"] += 1
        return told

    def plan(self, most_steps: int = 1) -> StepPlan | None:
        replays = any(state.replay is not None for state in self.requests.waiting)  # nobody overtakes those
        decoding = [s for s in self.requests.residents if s.prefill_end <= s.num_planned < s.last_position]
        plan = super().plan(most_steps)
        if plan is not None:
            self.marks["bursts"] += plan.num_steps > 1
            self.marks["longest bursts"] += plan.num_steps == 16
            self.marks["copies"] += len(plan.copy_from)
            self.marks["later children in prefill"] += sum(init.child > 0 for init in plan.row_inits)
            if not replays:
                self._check_order(plan)
            if all(plan.num_tokens) and any(s.is_resident and not s.needs_host for s in decoding):
                self._check_wait(plan)
        return plan

    def _check_wait(self, plan: StepPlan) -> None:
        """Rows that could decode are not in this step: nobody follows them, and prompts have all of it."""
        requests = self.requests
        if not requests.pool.num_free or any(state.status is Status.PAUSED for state in requests.residents):
            return  # they wait for a page
        assert self.config.prompts_first and not requests.num_open, "a row waits for prompts that should not"
        assert sum(plan.length) == self.config.max_num_batched_tokens, "rows wait, and nothing is in their place"
        self.marks["prompts before rows that decode"] += 1

    def _check_order(self, plan: StepPlan) -> None:
        """No prompt goes on while one that goes before it, and that could be taken in, waits."""
        requests, config = self.requests, self.config
        begun = {init.request for init in plan.row_inits}
        orders = {
            arrival: requests.states[arrival].order
            for arrival, num_tokens in zip(plan.request, plan.num_tokens)
            if num_tokens
        }
        going_on = [order for arrival, order in orders.items() if arrival not in begun]
        latest = max(going_on, default=None)
        if latest is None:
            return
        self.marks["taken in before a prompt that goes on"] += any(orders[one] < latest for one in begun)
        num_paused = sum(state.status is Status.PAUSED for state in requests.residents)
        if not requests.slots.num_free or (num_paused and not config.admit_beside_paused):
            return
        ready = (s for s in requests.waiting if not s.group.waits_for and self._control.may_admit(s.arrival))
        first = next(ready, None)
        if first is None or first.order > latest or first.in_flight or first.awaits or first.group.must_wait(first):
            return
        needed = num_pages_for(min(len(first.tokens), first.last_position), config.page_size)
        needed += len(requests.residents) if first.num_evictions else 0
        assert needed > requests.pool.num_free - num_paused, f"{first.order} waits while {latest} goes on"


class Life:
    """Everything random comes from one seed."""

    def __init__(self, seed: int, depth: int, marks: Counter[str]) -> None:
        self.rng = rng = random.Random(f"{seed}/{depth}")
        self.marks = marks
        self.marks_before = marks.copy()
        page_size = rng.choice((1, 2, 4, 8))
        max_len = rng.choice((16, 32, 48))
        num_pages = max(1, rng.choice((4, 5, 6, 10)) * max_len // 4 // page_size - rng.randrange(3))
        own = random.Random(f"closed {seed}")
        self.is_closed = own.random() < 0.4
        is_roomy = self.is_closed and own.random() < 0.4  # else prompts never come before rows that decode
        self.config = CoreConfig(
            num_pages=num_pages * (8 if is_roomy else 1),
            page_size=page_size,
            max_model_len=max_len,
            max_num_seqs=rng.randint(1, 6) + 12 * is_roomy,
            max_num_batched_tokens=rng.choice((1, 3, 7, 16, 64)),
            max_num_mixed_tokens=random.Random(f"mixed {seed}").choice((0, 1, 4, 12)),
            prompts_first=random.Random(f"first {seed}").random() < 0.7,
            vocab_size=len(PIECES),
            end_token_ids=(0,) if rng.random() < 0.5 else (),
            paused_pages=rng.randint(0, num_pages),
            admit_beside_paused=rng.random() < 0.7,
            enable_prefix_caching=rng.random() < 0.8,
            seed=rng.randrange(5),
            fingerprint=SAME_WEIGHTS,
            poison_free_pages=rng.random() < 0.5,
        )
        self.faulty = rng.random() < 0.25
        self.is_stormy = rng.random() < 0.7
        """Every kind of order, and more of them."""
        self.cancels = rng.random() < 0.3
        """Whether a resume or an abort may help a pause that is not answered yet; else it must come by itself."""
        self.device = FakeDevice(
            self.config.num_pages,
            page_size,
            self.config.max_num_seqs,
            self.config.vocab_size,
            self._fail,
            self._fail_all,
            self._fail_directive,
        )
        self.scheduler = MarkingScheduler(self.config, lambda request: PieceCursor())
        self.scheduler.marks = marks
        self.inbox = Inbox()
        self.loop = Loop(self.scheduler, self.device, self.inbox, self._publish, steps_in_flight=depth, check=True)
        self.shares = rng.random() < 0.5
        """Whether most requests begin alike, as those of a rollout do."""
        self.bases = [[rng.randrange(self.config.vocab_size) for _ in range(max_len)] for _ in range(2)]
        self.requests: dict[int, Request] = {}
        self.ended: set[int] = set()
        """Requests of which every child has ended."""
        self.records: dict[tuple[int, int], ev.Record] = {}
        """By ticket and child, as all that is told of one."""
        self.refused: set[int] = set()
        self.parts: dict[tuple[int, int], tuple[list[int], TokenScores]] = {}
        self.part_epochs: dict[tuple[int, int], list[tuple[int, int]]] = {}
        self.moments: dict[tuple[int, int], list[ev.Moment]] = {}
        self.first_child: dict[int, int] = {}
        """Of each request, whose token came first: it saw the weights that scored the prompt."""
        self.elsewhere = Elsewhere(self.config, rng, lambda request: PieceCursor(), self._publish, self._fail)
        self.taken: list[tuple[int, Checkpoint]] = []
        """Every checkpoint, with the ticket of the request it was taken of."""
        self.at_rest: list[tuple[int, Checkpoint]] = []
        """Those of them that may still be submitted."""
        self.went_on: dict[int, Checkpoint] = {}
        """By the ticket under which it went on."""
        self.is_elsewhere: set[int] = set()
        self.unprepared: list[int] = []
        """Those whose grammar is still being compiled, as it were."""
        self.unmade: set[int] = set()
        """Those whose grammar cannot be: refused, unless they have ended before."""
        self.must_refuse: set[int] = set()
        self.may_refuse: set[int] = set()
        self.next_ticket = 1
        self.orders = Orders(self)
        self.pinning = Pinning(self)
        self.faulty_device = rng.random() < 0.2
        self.most_at_end = 1
        """Tokens that come with an end: those of one step."""
        bursts = random.Random(f"bursts of {seed}/{depth}")  # of its own: lives without any are as they always were
        if bursts.random() < 0.4:
            self.loop.pace, self.elsewhere.loop.pace = RandomPace(bursts), RandomPace(bursts)
            self.most_at_end = 16

    def _fail(self, plan: StepPlan) -> dict[int, Failure]:
        if self.faulty and self.rng.random() < 0.04:
            return {self.rng.randrange(len(plan.slot)): Failure("StepFailed", "planted")}
        return {}

    def _fail_all(self, plan: StepPlan) -> bool:
        return self.faulty and self.rng.random() < 0.02

    def _fail_directive(self, directive: Directive) -> bool:
        return self.faulty_device and self.rng.random() < 0.2

    # Traffic

    def run(self) -> None:
        to_submit = self.rng.randint(2, 12)
        for _ in range(MAX_TURNS):
            roll = self.rng.random()
            if to_submit and roll < 0.34:
                for _ in range(min(to_submit, self.rng.choice((1, 1, 2, 6)))):
                    to_submit -= 1
                    self._submit()
            elif roll < 0.39 and (self.cancels or not self.orders.is_pausing):
                self._abort()
            elif roll < (0.60 if self.is_stormy else 0.50):
                self.orders.give()
            elif roll < 0.61:
                self.send(cmd.ResetPrefixCache(self.ticket()))
            elif roll < 0.70:
                self._take_checkpoint()
            elif roll < 0.80 and self.at_rest:
                self._go_on()
            elif roll < 0.84:
                self.pinning.give()
            if self.unprepared and self.rng.random() < 0.2:
                self._prepare()
            self.loop.turn(block=False)
            self.elsewhere.loop.turn(block=False)
            if not to_submit and len(self.ended) + len(self.refused) == len(self.requests):
                break
            if not to_submit and self.rng.random() < 0.3:
                self.orders.go_on()
        else:
            raise AssertionError(f"after {MAX_TURNS} turns requests are still alive: a live-lock")
        self.pinning.end()
        self.loop.turn(block=False)
        while self.loop._in_flight or self.scheduler.directive():
            self.loop.turn(block=False)
        while self.elsewhere.loop._in_flight:
            self.elsewhere.loop.turn(block=False)
        self._judge()

    def ticket(self) -> int:
        self.next_ticket += 1
        return self.next_ticket

    def send(self, command: cmd.Command) -> None:
        self.inbox.put(command)

    def _submit(self) -> None:
        rng, config = self.rng, self.config
        length = rng.randint(1, max(1, config.max_num_tokens * 2 // 3))
        shares = self.shares and rng.random() < 0.8
        base = self.bases[0] if shares else rng.choice(self.bases)
        shared = rng.randint(length * 3 // 4 if shares else 0, length)
        prompt = base[:shared] + [rng.randrange(config.vocab_size) for _ in range(length - shared)]
        ticket = self.ticket()
        if rng.random() < 0.05:
            prompt = rng.choice(([], [config.vocab_size], [-1, 2], prompt + [1] * config.max_num_tokens))
            self.must_refuse.add(ticket)
        salt = None if shares else rng.choice((None, "a", "b", f"of {ticket} alone"))
        request = Request(
            rng.randint(0, 12), ticket, prompt, self._params(), stream=rng.random() < 0.5, cache_salt=salt,
            is_closed=self.is_closed,
        )  # fmt: skip
        if self.orders.is_suspended or any(request.request_id == other.request_id for other in self._live()):
            self.must_refuse.add(ticket)
        if length + len(request.params.forced_token_ids or ()) > config.max_num_tokens:
            self.must_refuse.add(ticket)
        if self.faulty_device:
            self.may_refuse.add(ticket)
        self._enter(request)
        self.send(cmd.Submit(request))

    def _enter(self, request: Request) -> None:
        self.requests[request.ticket] = request
        if request.params.structured_outputs is not None:
            self.unprepared.append(request.ticket)

    def _prepare(self) -> None:
        """Somebody's grammar, in any order, is there or cannot be; who has ended since hears of it too."""
        rng = self.rng
        ticket = self.unprepared.pop(rng.randrange(len(self.unprepared)))
        failure = Failure("InvalidValue", "planted") if rng.random() < 0.15 else None
        if failure is not None:
            self.unmade.add(ticket)
        inbox = self.elsewhere.inbox if ticket in self.is_elsewhere else self.inbox
        inbox.put(cmd.Prepared(ticket, failure))

    def _live(self, there: bool = False) -> list[Request]:
        """Those that will be live, here or elsewhere, when what is sent now is applied."""
        return [
            request
            for ticket, request in self.requests.items()
            if (ticket in self.is_elsewhere) == there
            and ticket not in self.ended | self.must_refuse | self.unmade
            and (ticket in self.unprepared or not _ends_at_once(request))
        ]

    def _take_checkpoint(self) -> None:
        """Of somebody here or there, who lives on or ends with it."""
        rng, live = self.rng, [ticket for ticket in self.requests if ticket not in self.ended]
        if not live:
            return
        ticket = rng.choice(live)
        inbox = self.elsewhere.inbox if ticket in self.is_elsewhere else self.inbox
        inbox.put(cmd.TakeCheckpoint(self.ticket(), request_ticket=ticket, end=rng.random() < 0.5))

    def _go_on(self) -> None:
        """Submit a checkpoint here or elsewhere, under its own id or another; it can be submitted again."""
        rng = self.rng
        origin, checkpoint = rng.choice(self.at_rest)
        if rng.random() < 0.7:
            self.at_rest.remove((origin, checkpoint))
        ticket = self.ticket()
        name = checkpoint.request_id if rng.random() < 0.6 else rng.randint(0, 12)
        request = checkpoint.as_request(name, ticket, stream=rng.random() < 0.5)
        there = rng.random() < 0.6
        if (not there and self.orders.is_suspended) or any(name == one.request_id for one in self._live(there)):
            self.must_refuse.add(ticket)
        if not there and self.faulty_device:
            self.may_refuse.add(ticket)
        self._enter(request)
        self.went_on[ticket] = checkpoint
        if checkpoint.num_output:
            self.first_child[ticket] = self.first_child[origin]
        if there:
            self.is_elsewhere.add(ticket)
        inbox = self.elsewhere.inbox if there else self.inbox
        inbox.put(cmd.Submit(request, Checkpoint.from_bytes(checkpoint.to_bytes())))

    def _num_known(self, ticket: int, child: int) -> int:
        """Output tokens that came with the request's checkpoint."""
        return self.went_on[ticket].samples[child].num_output if ticket in self.went_on else 0

    def _params(self) -> SamplingParams:
        rng, vocab = self.rng, self.config.vocab_size
        max_tokens = rng.choice((None, None, 0, 1, 3, 8, 20))
        least = 0 if max_tokens is None else max_tokens
        ids = lambda most: [rng.randrange(vocab) for _ in range(rng.randint(1, most))]  # noqa: E731
        forced = ids(min(4, least)) if least and rng.random() < 0.15 else None
        return SamplingParams(
            n=1 if max_tokens == 0 else rng.choice((1, 1, 1, 1, 2, 3, 6)),
            max_tokens=max_tokens,
            min_tokens=rng.randint(0, min(6, least)) if rng.random() < 0.3 else 0,
            temperature=rng.choice((0.0, 1.0)),
            seed=rng.choice((None, rng.randrange(2**64))),
            stop=[rng.choice(("bca", "aab", "da", "ee", "cabc", "g"))] if rng.random() < 0.2 else [],
            stop_token_ids=ids(1) if rng.random() < 0.2 else [],
            stop_token_sequences=[ids(3) for _ in range(2)] if rng.random() < 0.3 else [],
            ignore_eos=rng.random() < 0.3,
            repetition_penalty=rng.choice((1.0, 1.0, 1.0, 1.3)),
            logits_processors=["any:function"] if rng.random() < 0.1 else [],
            logprob_token_ids=ids(2) if rng.random() < 0.1 else None,
            forced_token_ids=forced,
            structured_outputs={"regex": "any"} if forced is None and rng.random() < 0.15 else None,
            logprobs=rng.choice((None, None, 0, 2, -1)),
            prompt_logprobs=rng.choice((None, None, None, 0, 2)),
            priority=rng.choice((0, 0, 0, -1, 1)),
            skip_reading_prefix_cache=rng.random() < 0.1,
        )

    def _abort(self) -> None:
        if self.rng.random() < 0.1:
            self.send(cmd.Abort(everything=True))
        elif self.rng.random() < 0.5:
            self.send(cmd.Abort(request_ids=[self.rng.randint(0, 12), "unknown"]))
        else:
            self.send(cmd.Abort(tickets=[self.rng.randint(1, self.next_ticket)]))

    # What is told

    def _publish(self, events: list[ev.Event], time: float) -> None:
        for event in events:
            match event:
                case ev.Ended(ticket, record, num_left):
                    assert (ticket, record.child) not in self.records, f"two ends of child {record.child} of {ticket}"
                    assert ticket not in self.refused
                    self.records[ticket, record.child] = record
                    num_ended = sum(number == ticket for number, _ in self.records)
                    assert num_left == self.requests[ticket].params.n - num_ended
                    if not num_left:
                        self.ended.add(ticket)
                    self.orders.ended(ticket, record, ticket in self.is_elsewhere)
                case ev.Refused(ticket, request_id, _):
                    assert ticket not in self.ended and ticket not in self.refused
                    assert ticket in self.must_refuse | self.may_refuse | self.unmade, f"for no reason: {event}"
                    assert request_id == self.requests[ticket].request_id
                    self.refused.add(ticket)
                    if told := [key for key in self.moments if key[0] == ticket]:
                        for key in told:
                            assert [moment.kind for moment in self.moments[key]][:2] == ["queued", "held"]
                        assert len(told) == self.requests[ticket].params.n
                        assert ticket in self.unmade and not any(key in self.parts for key in told)
                        self.marks["refused while held"] += 1
                        self.orders.refused_late(len(told), ticket in self.is_elsewhere)
                case ev.Progress(ticket, first, token_ids, scores, epoch, child):
                    is_free = ticket in self.is_elsewhere or first < self._num_known(ticket, child)
                    assert is_free or not self.orders.is_halted, "a token came while paused or suspended"
                    self.part_epochs.setdefault((ticket, child), []).append((first, epoch))
                    ids, log = self.parts.setdefault((ticket, child), ([], self._no_scores(ticket)))
                    assert (ticket, child) not in self.records and first == len(ids)
                    assert (scores is not None) == self.requests[ticket].params.asks_scores
                    ids += token_ids
                    if scores is not None:
                        assert scores.num_scored == len(token_ids)
                        log.extend(scores)
                case ev.Done(ticket, value, failure):
                    self.orders.answered(ticket, failure)
                    self.pinning.answered(ticket, value, failure)
                case ev.Taken(_, ticket, checkpoint):
                    assert ticket not in self.ended and checkpoint.request_id == self.requests[ticket].request_id
                    self.taken.append((ticket, checkpoint))
                    self.at_rest.append((ticket, checkpoint))
                    self.marks[f"checkpoint while {checkpoint.status}"] += 1
                    self.marks["checkpoint while suspended"] += self.orders.is_halted and self.orders.is_suspended
                case ev.Moment(ticket, kind, _, _, child):
                    assert (ticket, child) not in self.records, f"{event} after the end"
                    self.moments.setdefault((ticket, child), []).append(event)
                    if kind == "first_token":
                        self.first_child.setdefault(ticket, child)

    # Judgement

    def _judge(self) -> None:
        for scheduler in (self.elsewhere.scheduler, self.scheduler):
            stats = scheduler.stats()
            assert stats.num_free_pages == stats.num_pages, "pages are lost"
            assert stats.num_running == stats.num_waiting == stats.num_paused == 0
            assert not scheduler.requests.states and not scheduler.requests.live, "something is kept after its end"
        if not self.faulty_device:
            assert self.must_refuse == self.refused - (self.unmade - self.must_refuse)
        self.orders.judge()
        self.marks["evictions"] += stats.num_evictions
        self.marks["pauses"] += stats.num_pauses
        self.marks["cached tokens"] += stats.num_cached_tokens
        waits = [moment for moments in self.moments.values() for moment in moments if moment.kind == "awaits"]
        self.marks["waits for a prefix"] += len(waits)
        self.marks["refused"] += len(self.refused)
        self._mark_kinds(stats)
        for (ticket, child), record in self.records.items():
            request, past = self.requests[ticket], self.went_on.get(ticket)
            given = request.params.seed
            if past is not None:
                given = past.seed
            elif given is None:
                given = derived_seed(self.config.seed, self.config.replica, record.arrival - child)
            assert record.seed == given and record.child == child
            spans = record.weight_epochs
            for first, epoch in self.part_epochs.get((ticket, child), ()):
                assert epoch == [number for begin, number in spans if begin <= first][-1]
            if record.exact or not self.orders.keeps:  # else some KV is of several weights
                weights_at = self.orders.weights_of(ticket, record)
                self._judge_one(request, record, expected(request, record.seed, self.config, weights_at, child), past)
            if not record.exact:
                # between engines, or over an update of this one's weights
                moved_on = past is not None and (
                    not past.exact or past.fingerprint != SAME_WEIGHTS or self.orders.staged
                )
                crossed = past is not None and past.num_output and moved_on
                assert self.orders.keeps or crossed, "only KV of several weights, or a move to others, is not exact"
                assert record.scores is None or record.scores.num_scored == len(record.token_ids)
                self.marks["inexact after a checkpoint" if past is not None else "inexact"] += 1
            _judge_moments(self.moments[ticket, child], record, past)
            assert record.num_checkpoints == (past.num_checkpoints if past is not None else 0)
            if past is not None:
                self.marks[f"{record.finish_reason} after {min(record.num_checkpoints, 3)} checkpoints"] += 1
                self.marks[f"went on {'elsewhere' if ticket in self.is_elsewhere else 'here'}"] += 1
            self.marks[f"children: {record.finish_reason}"] += request.params.n > 1
        for ticket in self.ended:
            self._judge_prompt_scores(ticket)
        for ticket, checkpoint in self.taken:
            if ticket in self.unmade and ticket in self.refused:
                continue
            for child, sample in enumerate(checkpoint.samples):
                record, count = self.records[ticket, child], sample.num_output
                assert sample.token_ids == record.token_ids[:count]
                assert sample.ending is None or (count, sample.ending.reason) == (
                    len(record.token_ids),
                    record.finish_reason,
                )
                self.marks["checkpoints with ended children"] += sample.ending is not None
                if sample.scores is not None and record.scores is not None:
                    assert TokenScores.unpack(
                        sample.scores, sample.token_ids, listed_ids=checkpoint.params.logprob_token_ids
                    ) == record.scores.cut(0, count)

    def _judge_prompt_scores(self, ticket: int) -> None:
        """Once for all children, by the weights that drew the first token of any: in the record of the last to end."""
        request = self.requests[ticket]
        records = [self.records[ticket, child] for child in range(request.params.n)]
        given = [record for record in records if record.prompt_scores is not None]
        assert len(given) == (request.params.prompt_logprobs is not None)
        if not given or (self.orders.keeps and not all(record.exact for record in records)):
            return
        (last,) = given
        assert last.prompt_scores is not None
        judge = records[self.first_child[ticket]] if ticket in self.first_child else last
        truth = expected(request, last.seed, self.config, self.orders.weights_of(ticket, judge)).prompt_scores
        if not any(record.finish_reason in ("stop", "length") for record in records):
            truth = truth[: last.prompt_scores.num_scored]
        _judge_scores(last.prompt_scores, truth, True)

    def _no_scores(self, ticket: int) -> TokenScores:
        return TokenScores(listed_ids=self.requests[ticket].params.logprob_token_ids)

    def _mark_kinds(self, stats: Stats) -> None:
        """How many kinds of interruption met in this one life."""
        met = [self.marks[name] > self.marks_before[name] for name in KINDS]
        met += [bool(one) for one in (stats.num_evictions, stats.num_pauses, stats.num_cached_tokens, self.went_on)]
        met.append(any(record.finish_reason == "abort" for record in self.records.values()))
        self.marks["storms"] += sum(met) >= STORM

    def _judge_one(self, request: Request, record: ev.Record, truth: Expected, past: Checkpoint | None) -> None:
        count = len(record.token_ids)
        assert record.token_ids == truth.token_ids[:count], (request, record.token_ids, truth.token_ids)
        assert record.request_id == request.request_id and record.prompt_token_ids == request.prompt_token_ids
        assert record.num_cached_tokens < len(request.prompt_token_ids)
        salts = [one.cache_salt for one in self.requests.values()]
        if request.cache_salt == f"of {request.ticket} alone" and salts.count(request.cache_salt) == 1:
            # More have it where a checkpoint of it went on here, perhaps before itself.
            assert not record.num_cached_tokens, "pages of another salt"
        self.marks["prompt scores that came with pages"] += record.num_cached_tokens > 0 and bool(record.prompt_scores)
        ids, log = self.parts.get((request.ticket, record.child), ([], self._no_scores(request.ticket)))
        if request.stream and (past is None or past.samples[record.child].ending is None):
            kinds = [moment.kind for moment in self.moments[request.ticket, record.child]]
            ended_held = kinds.count("held") > kinds.count("released")  # what it had already is told with its end
            assert ids == record.token_ids[: len(ids)] and (len(ids) >= count - self.most_at_end or ended_held)
            assert record.scores is None or log == record.scores.cut(0, len(ids))
        else:
            assert not ids
        if record.finish_reason in ("stop", "length"):
            assert count == len(truth.token_ids) and record.finish_reason == truth.reason
            stop = record.stop
            found = None if stop is None else (stop.reason, stop.num_tokens, stop.num_matched, stop.text_end)
            assert found == truth.stop, (found, truth.stop)
            self.marks[f"stop by {type(stop.reason).__name__}" if stop else "length"] += 1
        else:
            assert (record.failure is not None) == (record.finish_reason == "error")
        _judge_scores(record.scores, truth.scores[:count], request.params.asks_scores)
        if record.scores is not None:
            width = len(request.params.logprob_token_ids or ())
            assert record.scores.listed_scores.tolist() == truth.listed[: count * width]


def _judge_moments(moments: list[ev.Moment], record: ev.Record, past: Checkpoint | None) -> None:
    """They tell the whole way here: in an order that can be, and as often as the record says."""
    sample = Sample() if past is None else past.samples[record.child]
    before = sample.num_output, sample.num_pauses, sample.num_evictions
    kinds = [moment.kind for moment in moments]
    assert kinds[0] == "queued" and moments[0].detail == record.request_id
    assert kinds.count("queued") == 1 and kinds.count("first_token") == (len(record.token_ids) > 0 == before[0])
    assert kinds.count("paused") == record.num_pauses - before[1]
    assert kinds.count("evicted") == record.num_evictions - before[2]
    is_resident = is_paused = False
    left = 0  # known tokens that this residency has to compute still
    for moment in moments[1:]:
        match moment.kind:
            case "awaits":
                assert not is_resident
            case "scheduled":
                assert not is_resident
                is_resident, left = True, moment.num_tokens
            case "chunk":
                assert is_resident and 0 < moment.num_tokens <= left
                left -= moment.num_tokens
            case "paused":
                assert is_resident and not is_paused
                is_paused = True
            case "resumed":
                assert is_paused
                is_paused = False
            case "evicted" | "dropped":
                assert is_resident
                is_resident = is_paused = False
            case kind:
                assert kind in ("first_token", "checkpoint", "held", "released")


def _judge_scores(given: TokenScores | None, truth: list[tuple[float, list[int], list[float]]], asked: bool) -> None:
    assert (given is not None) == asked
    if given is None:
        return
    assert given.num_scored == len(truth)
    for i, (chosen, ids, scores) in enumerate(truth):
        low = given.top_first[i]
        high = low + given.num_top[i]
        assert given.chosen[i] == chosen
        assert list(given.top_ids[low:high]) == ids and list(given.top_scores[low:high]) == scores


def _ends_at_once(request: Request) -> bool:
    params = request.params
    return params.max_tokens == 0 and (params.prompt_logprobs is None or len(request.prompt_token_ids) == 1)


def run_lives(first: int, count: int, depth: int) -> Counter[str]:
    """Run these seeds; the first failure names its seed and how to replay it."""
    marks: Counter[str] = Counter()
    for seed in range(first, first + count):
        try:
            Life(seed, depth, marks).run()
        except Exception as error:
            again = f"python -m tests.sim.life --depth {depth} --first {seed} --count 1"
            raise AssertionError(f"life with seed {seed} at depth {depth} failed; replay: {again}") from error
    return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=2000)
    args = parser.parse_args()
    marks = run_lives(args.first, args.count, args.depth)
    print(f"{args.count} lives at depth {args.depth}, all equal the oracle")
    for name, number in sorted(marks.items()):
        print(f"  {name}: {number}")


if __name__ == "__main__":
    sys.exit(main())
