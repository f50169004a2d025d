"""`Scheduler`: applies commands, plans steps, commits what came of them.

- Residents (with slot and pages) and waiting requests are two lists, each in order (priority, arrival).
- A step first continues residents that decode, then those in prefill, then admits: first come, first served, nobody
  overtakes. All of it under one token budget.
- Pages for a prefill are taken whole at admission, so a prefill never stalls; a decoding row takes one at a time.
- Orders that change the engine's state are `control`'s; what they do to requests is done here.
- A request's end is decided here and once: by stop or length in `commit`, by abort in `apply`, by error in `commit`.
- Work in `plan` and `commit` is O(rows), never O(context).
"""

from __future__ import annotations

from bisect import insort

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.config import CoreConfig
from perdure.api.directive import Directive, Outcome
from perdure.api.errors import InvalidValue, PerdureError, QueueFull, StateError, StepFailed
from perdure.api.event import Event, Failure, FinishReason, StopMatch
from perdure.api.moment import MomentKind
from perdure.api.output import Stats
from perdure.api.plan import DeviceRow, StepOutput, StepPlan
from perdure.api.request import Request, RequestId
from perdure.core import budget, checkpoint, preempt
from perdure.core.admission import admit
from perdure.core.control import Control
from perdure.core.draft import PlanDraft, row_settings
from perdure.core.lifecycle import EngineState, Status
from perdure.core.pages import PagePool
from perdure.core.prefix import PrefixIndex
from perdure.core.queue import Queue, replay_order
from perdure.core.scores import append_scores, rows_with_scores
from perdure.core.slots import Slots
from perdure.core.state import RequestState
from perdure.core.stopping import CursorFactory


class Counters:
    """Totals since start, for `Stats`."""

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_pauses = 0
        self.num_evictions = 0
        self.num_steps = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.num_generated_tokens = 0


class Scheduler:
    """make_cursor: text for requests with stop strings (`stopping.TextCursor`)."""

    def __init__(self, config: CoreConfig, make_cursor: CursorFactory) -> None:
        self.config = config
        self.fingerprint = config.fingerprint
        """What the bits of results depend on, with the weights of now."""
        self._make_cursor = make_cursor
        self._control = Control()
        self._prefix = PrefixIndex(config.page_size)
        self._pool = PagePool(config.num_pages, self._prefix.forget)
        self._slots = Slots(config.max_num_seqs)
        self._states: dict[int, RequestState] = {}
        """By arrival: all that are live, and final ones with steps in flight."""
        self._live: dict[RequestId, RequestState] = {}
        self._residents: list[RequestState] = []
        self._waiting = Queue()
        self._counters = Counters()
        self.steps_in_flight = 0
        self._events: list[Event] = []

    # Commands

    def apply(self, command: cmd.Command) -> list[Event]:
        """Carry out one command; returns what is to be told."""
        match command:
            case cmd.Submit(request, given):
                self._submit(request, given)
            case cmd.Abort(request_ids, tickets, everything):
                self._abort(request_ids, tickets, everything)
            case cmd.TakeCheckpoint():
                self._take_checkpoint(command)
            case cmd.ResetPrefixCache(ticket):
                self._clear_cache()
                self._events.append(ev.Done(ticket))
            case cmd.GetStats(ticket):
                self._events.append(ev.Done(ticket, self.stats()))
            case cmd.Stop(ticket):
                self._abort([], [], everything=True)
                self._events += self._control.stop(ticket)
            case order:
                self._control.take(order, self._counters.num_requests)
                if isinstance(order, cmd.Pause) and order.mode == "abort":
                    self._abort([], [], everything=True)
        return self._told()

    def _submit(self, request: Request, given: Checkpoint | None) -> None:
        arrival = self._counters.num_requests
        try:
            self._check_may_submit(request)
            if given is None:
                state = admit(request, arrival, self.config, self._make_cursor)
            else:
                state = checkpoint.readmit(request, given, arrival, self.fingerprint, self.config, self._make_cursor)
        except PerdureError as error:
            self._events.append(ev.Refused(request.ticket, request.request_id, Failure.of(error)))
            return
        self._counters.num_requests += 1
        self._states[state.arrival] = state
        self._live[request.request_id] = state
        self._waiting.add(state)
        self._note(state, "queued", detail=request.request_id)
        if state.stops.max_output == 0 and not state.num_prompt_scores_missing:
            self._end(state, Status.FINISHED, "length")
        elif request.stream:
            self._report_past(state)

    def _check_may_submit(self, request: Request) -> None:
        if refusal := self._control.refusal:
            raise StateError(refusal)
        if request.request_id in self._live:
            raise InvalidValue(f"request_id={request.request_id!r} is live: an id is free again when its request ended")
        limit = self.config.max_num_waiting
        if limit is not None and len(self._waiting) >= limit:
            raise QueueFull(f"{len(self._waiting)} requests wait already, max_num_waiting={limit}")

    def _abort(self, request_ids: list[RequestId], tickets: list[int], everything: bool) -> None:
        if everything:
            chosen = sorted(self._live.values(), key=_order)
        else:
            chosen = [self._live[name] for name in request_ids if name in self._live]
            if tickets:
                chosen += [state for state in self._live.values() if state.request.ticket in tickets]
        for state in chosen:
            if not state.is_final:
                self._end(state, Status.ABORTED, "abort")

    def _take_checkpoint(self, asked: cmd.TakeCheckpoint) -> None:
        if asked.request_id is not None:
            state = self._live.get(asked.request_id)
        else:
            state = next((s for s in self._live.values() if s.request.ticket == asked.request_ticket), None)
        if state is None:
            name = "the request" if asked.request_id is None else f"request_id={asked.request_id!r}"
            failure = Failure.of(InvalidValue(f"{name} is not live: it has ended, or never began"))
            self._events.append(ev.Done(asked.ticket, failure=failure))
            return
        try:
            taken = checkpoint.take(state, self.fingerprint)
        except Exception as error:  # want of memory, say: taking only reads, so the request is as it was
            failure = Failure(StateError.__name__, f"no checkpoint could be made: {type(error).__name__}: {error}")
            self._events.append(ev.Done(asked.ticket, failure=failure))
            return
        self._note(state, "checkpoint", state.num_output)
        self._events.append(ev.Taken(asked.ticket, state.request.ticket, taken))
        if asked.end:
            self._end(state, Status.ABORTED, "abort")

    # Planning

    @property
    def can_act(self) -> bool:
        """Whether `plan` could return a step now, as far as is known without trying."""
        return self._control.may_plan and bool(self._residents or self._admissible())

    @property
    def is_stopped(self) -> bool:
        return self._control.state is EngineState.STOPPED

    def plan(self) -> StepPlan | None:
        """The next step, or None if there is nothing to do now (paused, drained, or all that can run is in flight)."""
        if not self._control.may_plan:
            return None
        poisoned = self._pool.unowned() if self.config.poison_free_pages else []
        draft = PlanDraft(self._counters.num_steps, self.config.max_num_batched_tokens, self._pool, poisoned)
        evictions = -1
        while not draft.num_rows and evictions != self._counters.num_evictions:
            # An eviction may free what an earlier resident lacked: look again before giving up.
            evictions = self._counters.num_evictions
            self._continue_residents(draft)
            self._admit_waiting(draft)
        if not draft.num_rows:
            return None
        self._counters.num_steps += 1
        self.steps_in_flight += 1
        return draft.finish()

    def _continue_residents(self, draft: PlanDraft) -> None:
        prefills = []
        page_size = self.config.page_size
        for state in tuple(self._residents):
            if not state.is_resident:
                continue  # evicted for one before it
            planned = state.num_planned
            if planned < state.prefill_end:
                prefills.append(state)
            elif planned < state.last_position and draft.tokens_left > 0:
                if state.needs_host and state.in_flight:
                    continue  # its neighbours go on
                if planned == len(state.pages) * page_size and not self._grow(state, draft):
                    continue
                draft.decode(state)
        for state in prefills:
            if draft.tokens_left > 0 and state.is_resident:
                self._prefill(state, draft)

    def _prefill(self, state: RequestState, draft: PlanDraft) -> None:
        draft.prefill(state, min(state.prefill_end - state.num_planned, draft.tokens_left))

    def _grow(self, state: RequestState, draft: PlanDraft) -> bool:
        """One more page for a decoding row; without one, somebody is put aside."""
        while not self._pool.num_free:
            if preempt.may_pause(state, self._residents, self.config.paused_pages):
                self._pause(state)
                return False
            victim = preempt.victim(self._residents)
            self._evict(victim)
            if victim is state:
                return False
        if state.status is Status.PAUSED:
            state.move(Status.RUNNING)
            self._note(state, "resumed")
        draft.grow(state, 1)
        return True

    def _pause(self, state: RequestState) -> None:
        if state.status is Status.RUNNING:
            state.move(Status.PAUSED)
            state.num_pauses += 1
            self._note(state, "paused")
            self._counters.num_pauses += 1
            state.paused_at = self._counters.num_pauses

    def _evict(self, state: RequestState) -> None:
        """Take slot and pages away. What is in flight still counts: its tokens are valid wherever they come from."""
        state.move(Status.WAITING)
        state.num_evictions += 1
        self._note(state, "evicted")
        self._counters.num_evictions += 1
        self._leave(state)
        self._waiting.add(state)

    def _admissible(self) -> RequestState | None:
        """The first in the queue that a pause does not hold back, unless its own steps are still in flight."""
        may_admit = self._control.may_admit
        head = next((state for state in self._waiting if may_admit(state.arrival)), None)
        return None if head is None or head.in_flight else head

    def _admit_waiting(self, draft: PlanDraft) -> None:
        if not self.config.admit_beside_paused and any(s.status is Status.PAUSED for s in self._residents):
            return
        while draft.tokens_left > 0 and self._slots.num_free and (state := self._admissible()) is not None:
            if state.tried_at == self._pool.version or not self._take_in(state, draft):
                break

    def _take_in(self, state: RequestState, draft: PlanDraft) -> bool:
        """Give the request a slot, what the prefix index has of it, and pages for all its known tokens."""
        end = min(len(state.tokens), state.last_position)
        pages, nodes = self._cached_prefix(state)
        needed = budget.num_pages_for(end, self.config.page_size) - len(pages)
        paused = sum(other.status is Status.PAUSED for other in self._residents)
        num_free = self._pool.num_free - self._pool.num_idle(pages) - paused
        if not preempt.may_return(num_free, needed, len(self._residents), state.num_evictions):
            state.tried_at = self._pool.version
            return False
        self._waiting.remove(state)
        state.move(Status.RUNNING)
        insort(self._residents, state, key=_order)
        state.slot = self._slots.take()
        is_current = self._prefix.is_current(pages)
        state.exact = state.exact and is_current
        state.nodes = nodes if self.config.enable_prefix_caching and is_current else None
        state.num_planned = state.num_computed = len(pages) * self.config.page_size
        state.prefill_end = end
        draft.init_row(state, self.config.vocab_size)
        draft.share(state, pages)
        draft.grow(state, needed)
        state.num_residencies += 1
        if state.num_residencies == 1 and not state.num_output:
            state.num_cached = state.num_computed
            self._counters.num_cached_tokens += state.num_computed
            self._counters.num_prompt_tokens += state.prompt_length
        if not self.config.batch_invariant and (pages or state.has_begun):
            state.exact = False  # other forms go on with other bits than an undisturbed run
        self._note(state, "scheduled", end - state.num_planned)
        self._prefill(state, draft)
        return True

    def _cached_prefix(self, state: RequestState) -> tuple[list[int], list[int]]:
        """Published pages this request may begin with: one position is left to compute, and none whose scores are
        asked and not recorded."""
        if not self.config.enable_prefix_caching or state.request.params.skip_reading_prefix_cache:
            return [], []
        limit = min(len(state.tokens), state.last_position) - 1
        if state.num_prompt_scores_missing:
            assert state.prompt_scores is not None
            limit = min(limit, state.prompt_scores.num_scored)
        return self._prefix.match(state.tokens, limit)

    # What came of it

    def commit(self, plan: StepPlan, output: StepOutput) -> list[Event]:
        """Take over what a step gave, in the order the steps were planned."""
        assert output.step == plan.step
        self.steps_in_flight -= 1
        failed = dict(output.errors)
        records = rows_with_scores(output.records)
        prompt_records = rows_with_scores(output.prompt_records)
        at = 0
        for row, arrival in enumerate(plan.request):
            first, at = at, at + output.num_sampled[row]
            state = self._states[arrival]
            state.in_flight -= 1
            if state.is_final:
                self._forget_if_done(state)
                continue
            if row in failed:
                self._end(state, Status.FAILED, "error", failure=Failure(StepFailed.__name__, failed[row]))
                continue
            if row in prompt_records:
                assert state.prompt_scores is not None
                append_scores(state.prompt_scores, output.prompt_records, prompt_records[row], state.tokens)
            new_tokens = output.tokens[first:at]
            if new_tokens:
                state.stamp(state.num_output, self._control.epoch)
            state.tokens += new_tokens
            if row in records:
                assert state.scores is not None
                append_scores(state.scores, output.records, records[row], state.tokens)
            if state.is_resident:
                state.num_computed += plan.length[row]
                if plan.num_tokens[row]:
                    self._note(state, "chunk", plan.length[row])
                self._publish(state)
            self._after_tokens(state, len(new_tokens))
        return self._told()

    def _after_tokens(self, state: RequestState, count: int) -> None:
        """End the request if these last tokens do, else report them."""
        first = len(state.tokens) - count
        if not count:
            if state.stops.max_output == 0 and state.num_computed >= state.last_position:
                self._end(state, Status.FINISHED, "length")
            return
        if first == state.prompt_length:
            self._note(state, "first_token")
        self._cut(state, state.prompt_length + state.stops.max_output)  # before a stop that lies beyond it can count
        try:
            stop = state.stops.first_stop(state.tokens, first)
        except StepFailed as error:
            self._end(state, Status.FAILED, "error", failure=Failure.of(error))
            return
        if stop is not None:
            self._cut(state, state.prompt_length + stop.num_tokens)
        self._counters.num_generated_tokens += len(state.tokens) - first
        if stop is not None:
            self._end(state, Status.FINISHED, "stop", stop)
        elif state.num_output >= state.stops.max_output:
            self._end(state, Status.FINISHED, "length")
        elif state.request.stream:
            self._report(state, first)

    def _cut(self, state: RequestState, end: int) -> None:
        """Drop what a step gave beyond the request's end."""
        if len(state.tokens) > end:
            del state.tokens[end:]
            if state.scores is not None:
                state.scores = state.scores.cut(0, state.num_output)

    def _report(self, state: RequestState, first: int) -> None:
        self._tell(state, first - state.prompt_length, state.num_output, self._control.epoch)

    def _report_past(self, state: RequestState) -> None:
        """What a request that goes on from a checkpoint has already: a part for each span of weights."""
        ends = [*(first for first, _ in state.epochs[1:]), state.num_output]
        for (first, epoch), end in zip(state.epochs, ends, strict=False):
            self._tell(state, first, end, epoch)

    def _tell(self, state: RequestState, first: int, end: int, epoch: int) -> None:
        """Output tokens first to end - 1, with their scores."""
        scores = None if state.scores is None else state.scores.cut(first, end)
        token_ids = state.tokens[state.prompt_length + first : state.prompt_length + end]
        self._events.append(ev.Progress(state.request.ticket, first, token_ids, scores, epoch))

    def _publish(self, state: RequestState) -> None:
        """Offer full, committed pages to later prompts."""
        nodes, size = state.nodes, self.config.page_size
        if nodes is None or state.num_computed < (len(nodes) + 1) * size:
            return
        for index in range(len(nodes), state.num_computed // size):
            parent = nodes[-1] if nodes else self._prefix.root
            page = state.pages[index]
            node, is_new = self._prefix.publish(parent, state.tokens[index * size : (index + 1) * size], page)
            if is_new:
                self._pool.publish(page)
            nodes.append(node)

    # Ends

    def _end(
        self,
        state: RequestState,
        status: Status,
        reason: FinishReason,
        stop: StopMatch | None = None,
        failure: Failure | None = None,
    ) -> None:
        """The one end of a request, from whatever status."""
        if state.status is Status.WAITING:
            self._waiting.remove(state)
        state.move(status)
        del self._live[state.request.request_id]
        if state.is_resident:
            self._leave(state)
        self._events.append(ev.Ended(state.request.ticket, state.record(reason, stop, failure)))
        self._forget_if_done(state)

    def _leave(self, state: RequestState) -> None:
        """Give slot and pages back. Steps in flight may still write to them: whoever gets them next writes later."""
        self._residents.remove(state)
        self._slots.release(state.slot)
        self._pool.release(state.pages)
        state.leave_device()

    def _forget_if_done(self, state: RequestState) -> None:
        if state.is_final and state.in_flight == 0:
            del self._states[state.arrival]

    def _note(self, state: RequestState, kind: MomentKind, num_tokens: int = 0, detail: RequestId = "") -> None:
        """Something happened to the request: whoever submitted it, and a trace, will see it."""
        self._events.append(ev.Moment(state.request.ticket, kind, num_tokens, detail))

    def told(self) -> list[Event]:
        """What is to be told by now: `apply` and `commit` return it, and what `plan` has done can be had at once."""
        told, self._events = self._events, []
        return told

    def _told(self) -> list[Event]:
        """The same, once orders have gone as far as they can."""
        if not self._control.is_settled:
            self._events += self._control.advance(self)
        return self.told()

    # What orders need (`control.Requests`)

    def directive(self) -> Directive | None:
        """What the device is asked, if an order's turn has come and no step is in flight; the same until `done`."""
        return self._control.directive(self)

    def done(self, directive: Directive, outcome: Outcome) -> list[Event]:
        """Take over what came of the directive."""
        self._events += self._control.done(directive, outcome, self)
        return self._told()

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def weights(self) -> int:
        return self._prefix.weights

    def any_before(self, arrival: int) -> bool:
        return any(state.arrival < arrival for state in self._live.values())

    def kept_pages(self) -> list[int]:
        return self._pool.kept()

    def drop_kv(self) -> None:
        self._replay_residents()
        self._clear_cache()

    def take_weights(self, epoch: int, digest: str, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy) -> None:
        self.fingerprint = replace(self.fingerprint, weights=digest)
        if in_flight == "recompute":
            self._replay_residents()
        if cache == "invalidate":
            self._clear_cache()
        self._prefix.take_weights(epoch, keep=cache == "keep")
        for state in self._waiting:
            state.forget_prompt_scores()
        for state in self._residents:  # their KV is of the weights before
            state.nodes = None
            state.exact = False

    def begin_anew(self) -> None:
        self._clear_cache()
        self._pool.begin_anew()
        self._counters = Counters()

    def _replay_residents(self) -> None:
        """Take slots and pages away from all; they come again before everybody else."""
        replayed = replay_order(self._residents)
        for state in replayed:
            state.move(Status.WAITING)
            self._note(state, "dropped")
            self._leave(state)
        self._waiting.replay(replayed)

    def _clear_cache(self) -> None:
        for page in self._prefix.clear():
            self._pool.unpublish(page)
        for state in self._residents:
            state.nodes = None

    # Seeing

    def stats(self) -> Stats:
        counters = self._counters
        num_paused = sum(state.status is Status.PAUSED for state in self._residents)
        return Stats(
            state=self._control.state.value,
            weight_epoch=self._control.epoch,
            paused_ids=[state.request.request_id for state in self._residents if state.status is Status.PAUSED],
            num_pages=self._pool.num_pages,
            num_free_pages=self._pool.num_free,
            num_running=len(self._residents) - num_paused,
            num_waiting=len(self._waiting),
            num_paused=num_paused,
            num_requests=counters.num_requests,
            num_pauses=counters.num_pauses,
            num_evictions=counters.num_evictions,
            num_steps=counters.num_steps,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_cached_tokens=counters.num_cached_tokens,
            num_generated_tokens=counters.num_generated_tokens,
        )

    def device_rows(self) -> list[DeviceRow]:
        """What the device must hold of every resident request, when no step is in flight."""
        assert not self.steps_in_flight
        rows = []
        for state in self._residents:
            decodes = state.num_computed >= state.prefill_end
            last_token = state.tokens[state.num_computed] if decodes else None
            settings = row_settings(state, self.config.vocab_size)
            rows.append(DeviceRow(settings, state.num_computed, last_token, list(state.pages)))
        return rows

    @property
    def live_tickets(self) -> list[int]:
        """Whoever submitted these waits for an end."""
        return [state.request.ticket for state in self._live.values()]

    @property
    def unanswered(self) -> list[int]:
        """Control commands that will be answered later."""
        return self._control.unanswered

    def check_idle(self) -> None:
        """With nobody live and nothing in flight nothing is held. Costs nothing; raises AssertionError."""
        if self._live or self.steps_in_flight:
            return
        lost = self._pool.num_pages - self._pool.num_free
        assert not lost, f"{lost} of {self._pool.num_pages} pages are held by nobody"
        assert self._slots.num_free == self._slots.num_slots, "a device row is held by nobody"
        kept = len(self._states) + len(self._residents) + len(self._waiting)
        assert not kept, f"{kept} entries are kept of requests that have ended"

    def check(self) -> None:
        """Everything is accounted for; for debugging and tests. Raises AssertionError."""
        self.check_idle()
        self._prefix.check(self._pool.is_published)
        for state in self._live.values():
            state.check()
        self._pool.check([state.pages for state in self._residents])
        assert [s.order for s in self._residents] == sorted(s.order for s in self._residents)
        self._waiting.check()
        assert all(s.is_resident == (s.status in (Status.RUNNING, Status.PAUSED)) for s in self._states.values())
        assert {s.arrival for s in self._live.values()} == {s.arrival for s in (*self._residents, *self._waiting)}
        slots = [state.slot for state in self._residents]
        assert len({*slots}) == len(slots) == self.config.max_num_seqs - self._slots.num_free
        assert all(s.in_flight > 0 for s in self._states.values() if s.is_final)
        if not self.steps_in_flight:
            assert all(s.in_flight == 0 for s in self._states.values())


def _order(state: RequestState) -> tuple[int, int]:
    return state.order
