"""A device without a model: lazy, in order, and unforgiving. The simulation drives the real core against it.

- "KV" at a position is a 64-bit number chained from the one before it, read back through the block table, so a wrong
  page, a lost token or a stale row changes every later token.
- It fails on any read of a slot that was never written or is away, and on any tail of a page that was not cleared
  before use.
- Its weights are a number that changes the content of every position.
- A row whose settings look back draws by its whole history, and fails if that is not the true one; a row that the host
  has a say in fails if two of its draws are in flight, or a burst of them.
- Nothing is executed before somebody waits for it, so a decision that needs a result in flight cannot be right by luck.
- Each plan is encoded and decoded on its way in.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
from msgspec.structs import replace

from perdure.api.directive import Clear, Directive, LoadWeights, Outcome, Sleep, Wake
from perdure.api.ending import Failure
from perdure.api.errors import DeviceError, StepFailed
from perdure.api.plan import DEVICE_POSITION, NO_LOGPROBS, DeviceRow, RowInit, ScoreColumns, StepOutput, StepPlan

_MASK = 2**63 - 1
_DIRT = np.uint64(2**64 - 1)
_CLEARED = np.uint64(0)
_BROKEN = -1
"""Weights that were dropped, or written in part."""


class DeviceFault(AssertionError):
    """The plan made the device read what nobody wrote."""


def chain(before: int, token: int, weights: int = 0) -> int:
    """The content of a position: of its token, of all before it and of the weights. Never zero."""
    mixed = (before * 6364136223846793005 + (token + 1 + weights * 1013904223) * 1442695040888963407) & _MASK
    return ((mixed ^ (mixed >> 29)) * 0x2545F4914F6CDD1D & _MASK) | 1


def draw(content: int, seed: int, index: int, settings: RowInit, vocab_size: int) -> int:
    """The token that follows a context: greedy of the context alone, else of (seed, child, output index) too."""
    key = seed + settings.child * 0x9E3779B97F4A7C15
    mixed = content if settings.temperature == 0 else chain(content ^ key & _MASK, index)
    token = (mixed >> 7) % vocab_size
    if index < len(settings.forced_ids):
        return settings.forced_ids[index]
    while index < settings.min_tokens and token in settings.masked_ids:
        token = (token + 1) % vocab_size
    return token


def score(content: int, token: int) -> float:
    """A stand-in for a log-probability, exact in float32."""
    return -float(chain(content, token) % 4096) / 256


def top(content: int, token: int, count: int, vocab_size: int) -> tuple[list[int], list[float]]:
    ids = [(token + 1 + i) % vocab_size for i in range(vocab_size if count < 0 else count)]
    return ids, [score(content, i) for i in ids]


def look_back(content: int, settings: RowInit, history: Sequence[int]) -> int:
    """What a draw depends on: the context, and the history where the settings look back."""
    if settings.adjustments is None or not settings.adjustments.looks_back:
        return content
    for token in history:
        content = chain(content, token)
    return content


class FakeDevice:
    """rows, pages and arithmetic as above. fail(plan) names rows of a step that shall fail, and what with;
    fail_all(plan): the whole step fails before anything of it took place; fail_directive(directive): it fails.

    staged: weights by the ticket of their update, put here before it is sent.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_slots: int,
        vocab_size: int,
        fail: Callable[[StepPlan], dict[int, Failure]] = lambda plan: {},
        fail_all: Callable[[StepPlan], bool] = lambda plan: False,
        fail_directive: Callable[[Directive], bool] = lambda directive: False,
    ) -> None:
        self.vocab_size = vocab_size
        self.num_executed = 0
        self._page_size = page_size
        self._fail = fail
        self._raise = fail_all
        self._fail_directive = fail_directive
        self.staged: dict[int, int] = {}
        self.weights = 0
        self._kv_asleep = False
        self._away: dict[int, np.ndarray] = {}
        """Content of pages that were copied out."""
        self._weights_away: int | None = None
        self._kv = np.full((num_pages, page_size), _DIRT, np.uint64)
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self._settings: list[RowInit | None] = [None] * num_slots
        self._position = [0] * num_slots
        self._last_token = [0] * num_slots
        self._history: list[list[int]] = [[] for _ in range(num_slots)]
        self._host_has_a_say: set[int] = set()
        """Requests whose rows call functions or follow a grammar."""
        self._failed: dict[int, Failure] = {}
        """Slots whose row failed: it fails in later launched steps too, until the slot gets another request."""
        self._queue: deque[FakeTicket] = deque()
        self._decoder = msgspec.msgpack.Decoder(StepPlan)

    def launch(self, plan: StepPlan) -> FakeTicket:
        wire = msgspec.msgpack.encode(plan)
        received = self._decoder.decode(wire)
        assert received == plan, "a plan changes on the wire"
        if self._kv_asleep or self._weights_away is not None or self.weights == _BROKEN:
            raise DeviceFault("a step is launched while the device is asleep, or its weights are not whole")
        self._check_one_draw_in_flight(received)
        ticket = FakeTicket(self, received)
        self._queue.append(ticket)
        return ticket

    def _check_one_draw_in_flight(self, plan: StepPlan) -> None:
        for init in plan.row_inits:
            self._host_has_a_say.discard(init.request)  # numbers begin anew after a reset
            if init.adjustments is not None and (init.adjustments.functions or init.adjustments.structure is not None):
                self._host_has_a_say.add(init.request)
        drawing = {r for other in self._queue for r, s in zip(other.plan.request, other.plan.sample, strict=True) if s}
        for request in plan.request:
            if request in self._host_has_a_say and request in drawing:
                raise DeviceFault(f"request {request} is planned before its last token is known to the host")
        if plan.num_steps > 1:
            if self._host_has_a_say & {*plan.request}:
                raise DeviceFault("a burst with a row that the host has a say in")
            if any(start != DEVICE_POSITION for start in plan.start) or not all(plan.sample):
                raise DeviceFault("a burst with a row that does not decode")

    def check(self, rows: Sequence[DeviceRow]) -> None:
        for row in rows:
            slot = row.settings.slot
            found = self._settings[slot]
            assert found is not None and _but_history(found) == _but_history(row.settings)
            assert self._tables[slot] == row.pages
            told = row.settings.adjustments
            assert told is None or not told.looks_back or self._history[slot] == [*told.history]
            assert self._position[slot] == row.position
            assert row.last_token is None or self._last_token[slot] == row.last_token
            is_due = row.position - found.prompt_length >= max(found.min_tokens, len(found.forced_ids))
            assert row.last_token not in found.end_ids or not is_due, f"slot {slot}: a burst would have left it out"

    def close(self) -> None:
        self._queue.clear()

    def perform(self, directive: Directive) -> Outcome:
        received = msgspec.msgpack.decode(msgspec.msgpack.encode(directive), type=Directive)
        assert received == directive, "a directive changes on the wire"
        if self._queue:
            raise DeviceFault("a directive while steps are in flight")
        if self._fail_directive(directive):
            if isinstance(directive, LoadWeights):
                self.weights = _BROKEN
            return Outcome(Failure.of(DeviceError("planted")), changed=isinstance(directive, LoadWeights))
        match directive:
            case Sleep():
                self._sleep(directive)
            case Wake():
                self._wake(directive)
            case Clear():
                self._kv[:] = _DIRT
            case LoadWeights(ticket):
                if self._weights_away is not None:
                    raise DeviceFault("weights are loaded while they are asleep")
                self.weights = self.staged.pop(ticket)
                return Outcome(weights=str(self.weights))
        return Outcome()

    def _sleep(self, directive: Sleep) -> None:
        if self._kv_asleep:
            raise DeviceFault("asleep already")
        self._kv_asleep = True
        if directive.kv != "persist":
            self._away = {page: self._kv[page].copy() for page in directive.pages}
            self._kv[:] = _DIRT
        if directive.weights != "keep":
            self._weights_away = self.weights if directive.weights == "offload" else _BROKEN
            self.weights = _BROKEN

    def _wake(self, directive: Wake) -> None:
        if directive.weights and self._weights_away is not None:
            self.weights, self._weights_away = self._weights_away, None
        if directive.kv:
            if not self._kv_asleep:
                raise DeviceFault("not asleep")
            if not {*directive.pages} <= {*self._away}:
                raise DeviceFault("a page is wanted back that was not copied out")
            for page in directive.pages:
                self._kv[page] = self._away[page]
            self._away = {}
            self._kv_asleep = False

    def run_until(self, ticket: FakeTicket) -> None:
        while ticket.output is None:
            first = self._queue.popleft()
            first.output = self._execute(first.plan)
            self.num_executed += 1

    def _execute(self, plan: StepPlan) -> StepOutput:
        for settings in plan.row_inits:
            self._settings[settings.slot] = settings
            self._history[settings.slot] = list(settings.adjustments.history) if settings.adjustments else []
            self._tables[settings.slot] = []
            self._failed.pop(settings.slot, None)
        if self._raise(plan):
            self._failed.update((slot, Failure.of(StepFailed("the step raised"))) for slot in plan.slot)
            errors = [(row, self._failed[slot]) for row, slot in enumerate(plan.slot)]
            nothing = ScoreColumns.empty()
            return StepOutput(plan.step, [0] * len(plan.slot), [], nothing, nothing, errors)
        for slot, index, page in zip(plan.table_slot, plan.table_index, plan.table_page, strict=True):
            if slot in self._failed:
                continue
            table = self._tables[slot]
            if index != len(table):
                raise DeviceFault(f"slot {slot}: entry {index} of a block table with {len(table)} entries")
            table.append(page)
        self._kv[plan.poisoned_pages] = _DIRT
        self._kv[plan.fresh_pages] = _CLEARED
        self._copy(plan)
        draw_nothing = {row: why for row, why in self._fail(plan).items() if plan.slot[row] not in self._failed}
        self._failed.update((plan.slot[row], why) for row, why in draw_nothing.items())
        failed = {row: self._failed[slot] for row, slot in enumerate(plan.slot) if slot in self._failed}
        made = Made(list(failed.items()))
        token_at = target_at = 0
        for row in range(len(plan.slot)):
            given = plan.tokens[token_at : token_at + plan.num_tokens[row]]
            targets = plan.targets[target_at : target_at + plan.num_targets[row]]
            token_at += len(given)
            target_at += len(targets)
            turns = plan.length[row] if plan.start[row] == DEVICE_POSITION else 1
            if row in draw_nothing:  # in any of them
                good = plan.step % turns
                turns = good + 1
            else:
                good = 0 if row in failed else turns
                turns = good
            drawn = [self._run_row(plan, row, given, targets, made, turn < good) for turn in range(turns)]
            made.num_sampled.append(sum(drawn))
        return made.output(plan.step)

    def _copy(self, plan: StepPlan) -> None:
        for source, target, length in zip(plan.copy_from, plan.copy_to, plan.copy_length, strict=True):
            if source in plan.fresh_pages or target not in plan.fresh_pages:
                raise DeviceFault(f"page {source} is copied to page {target}, and the second alone must be fresh")
            content = self._kv[source, :length]
            if (content == _DIRT).any() or (content == _CLEARED).any():
                raise DeviceFault(f"{length} positions of page {source} are copied, and not all were written")
            self._kv[target, :length] = content

    def _run_row(
        self, plan: StepPlan, row: int, given: list[int], targets: list[int], made: Made, may_draw: bool
    ) -> int:
        """One step of the row; how many tokens it drew."""
        slot = plan.slot[row]
        settings = self._settings[slot]
        if settings is None or settings.request != plan.request[row]:
            raise DeviceFault(f"slot {slot} does not hold request {plan.request[row]}")
        start = plan.start[row]
        if start == DEVICE_POSITION:
            start, given = self._position[slot], [self._last_token[slot]]
        end = start + len(given)
        content = self._write(slot, start, given)
        for at, target in enumerate(targets, plan.target_start[row]):
            before = int(content[at - 1])
            if not start < at <= end:
                raise DeviceFault(f"slot {slot}: a score of position {at} from positions {start} to {end - 1}")
            self._score(made.prompt_records, row, at, before, target, settings.num_prompt_logprobs)
        self._position[slot] = end
        if not plan.sample[row] or not may_draw:
            return 0
        known = self._read(content)
        history = self._history[slot]
        if settings.adjustments is not None and settings.adjustments.looks_back and len(history) != end:
            raise DeviceFault(f"slot {slot}: a history of {len(history)} tokens before the token at {end}")
        drawn_from = look_back(known, settings, history)
        token = draw(drawn_from, settings.seed, end - settings.prompt_length, settings, self.vocab_size)
        self._last_token[slot] = token
        history.append(token)
        made.tokens.append(token)
        if settings.num_logprobs != NO_LOGPROBS:
            self._score(made.records, row, end, known, token, settings.num_logprobs, settings.listed_ids)
        return 1

    def _write(self, slot: int, start: int, tokens: list[int]) -> np.ndarray:
        """Write these positions; returns the content of all positions of the row so far."""
        size, end = self._page_size, start + len(tokens)
        num_pages = -(-end // size)
        pages = self._tables[slot][:num_pages]
        if len(pages) < num_pages:
            raise DeviceFault(f"slot {slot}: position {end - 1} has no page")
        content = self._kv[pages].reshape(-1)
        if (content[:start] == _DIRT).any() or (content[:start] == _CLEARED).any():
            raise DeviceFault(f"slot {slot}: reads a position before {start} that was never written")
        if content[start:].any():
            raise DeviceFault(f"slot {slot}: a page after position {start} was not cleared before use")
        before = int(content[start - 1]) if start else 1
        for at, token in enumerate(tokens, start):
            before = chain(before, token, self.weights)
            content[at] = before
            self._kv[pages[at // size], at % size] = before
        return content[:end]

    @staticmethod
    def _read(content: np.ndarray) -> int:
        """Attention of a sort: depends on every position."""
        return int(content.sum(dtype=np.uint64)) & _MASK

    def _score(
        self, into: _Scored, row: int, at: int, content: int, token: int, num_top: int, listed: Sequence[int] = ()
    ) -> None:
        ids, scores = top(content, token, num_top, self.vocab_size)
        ranks, listed_scores = [1 + (content ^ id_) % 7 for id_ in listed], [score(content, id_) for id_ in listed]
        into.add(row, at, score(content, token), 1 + content % 5, ids, scores, ranks, listed_scores)


def _but_history(settings: RowInit) -> RowInit:
    """The history grows as the row does."""
    adjustments = settings.adjustments
    return settings if adjustments is None else replace(settings, adjustments=replace(adjustments, history=()))


class _Scored:
    """Scores as they are made; the packed pairs grow in arrays."""

    def __init__(self) -> None:
        self.columns = ScoreColumns.empty()
        self.top_ids = array("i")
        self.top_scores = array("f")
        self.listed_ranks = array("i")
        self.listed_scores = array("f")

    def add(
        self,
        row: int,
        at: int,
        chosen: float,
        rank: int,
        ids: list[int],
        scores: list[float],
        listed_ranks: Sequence[int] = (),
        listed_scores: Sequence[float] = (),
    ) -> None:
        self.columns.row.append(row)
        self.columns.position.append(at)
        self.columns.chosen.append(chosen)
        self.columns.rank.append(rank)
        self.columns.num_top.append(len(ids))
        self.top_ids.extend(ids)
        self.top_scores.extend(scores)
        self.columns.num_listed.append(len(listed_ranks))
        self.listed_ranks.extend(listed_ranks)
        self.listed_scores.extend(listed_scores)

    def packed(self) -> ScoreColumns:
        return replace(
            self.columns,
            top_ids=self.top_ids.tobytes(),
            top_scores=self.top_scores.tobytes(),
            listed_ranks=self.listed_ranks.tobytes(),
            listed_scores=self.listed_scores.tobytes(),
        )


class Made:
    """A step's output as it is made."""

    def __init__(self, errors: list[tuple[int, Failure]]) -> None:
        self.num_sampled: list[int] = []
        self.tokens: list[int] = []
        self.records = _Scored()
        self.prompt_records = _Scored()
        self.errors = errors

    def output(self, step: int) -> StepOutput:
        scores, prompt_scores = self.records.packed(), self.prompt_records.packed()
        return StepOutput(step, self.num_sampled, self.tokens, scores, prompt_scores, self.errors)


class FakeTicket:
    """A step of the fake device; waiting for it executes all up to it."""

    def __init__(self, device: FakeDevice, plan: StepPlan) -> None:
        self.plan = plan
        self.output: StepOutput | None = None
        self._device = device

    def wait(self) -> StepOutput:
        self._device.run_until(self)
        assert self.output is not None
        return self.output
