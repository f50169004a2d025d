"""`Requests`: every request inside, with the pages, slots and cached prefixes it holds; and what becomes of them.

- Residents (with slot and pages) and waiting requests are two lists, each in order (priority, arrival). Each child of a
  request with n > 1 is one of them; those that wait for their prompt are held back by their `group`.
- A request is begun, put aside and ended here and nowhere else, so each of these is one function.
- Who is begun or put aside, and when, others decide: `planning`, `committing`, `scheduler`.
"""

from __future__ import annotations

from bisect import insort

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.config import CoreConfig
from perdure.api.ending import Ending, Failure, FinishReason
from perdure.api.event import Event
from perdure.api.moment import MomentKind
from perdure.api.plan import DeviceRow
from perdure.api.request import RequestId
from perdure.core.draft import row_settings
from perdure.core.group import Group
from perdure.core.lifecycle import Status
from perdure.core.prefix_cache import PrefixCache
from perdure.core.queue import Queue, replay_order
from perdure.core.slots import Slots
from perdure.core.state import RequestState


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


class Requests:
    """`events` is what is to be told next, in order."""

    def __init__(self, config: CoreConfig) -> None:
        self.config = config
        self.fingerprint = config.fingerprint
        """What the bits of results depend on, with the weights of now."""
        self.cache = PrefixCache(config)
        self.pool = self.cache.pool
        self.slots = Slots(config.max_num_seqs)
        self.states: dict[int, RequestState] = {}
        """By arrival: all that are live, and final ones with steps in flight."""
        self.live: dict[RequestId, Group] = {}
        self.num_left = 0
        """Live requests, every child counted."""
        self.num_open = 0
        """Live requests, not their children, whose tokens somebody may want before the end."""
        self.residents: list[RequestState] = []
        self.waiting = Queue()
        self.counters = Counters()
        self.steps_in_flight = 0
        self.events: list[Event] = []

    def add(self, group: Group) -> None:
        """A new request: it waits, for its first child to begin with the prompt."""
        self.live[group.request.request_id] = group
        self.num_left += group.num_left
        self.num_open += not group.request.is_closed
        self.counters.num_requests += group.num_left
        for state in group.children:
            self.states[state.arrival] = state
            group.held[state.child] = state
            self.note(state, "queued", detail=group.request.request_id)
        self._let_in(group)

    def begin(self, state: RequestState) -> None:
        """Give a waiting request a slot; pages are the plan's to give."""
        self.waiting.remove(state)
        state.move(Status.RUNNING)
        insort(self.residents, state, key=order_of)
        state.group.residents.append(state)
        state.slot = self.slots.take()

    def hold(self, state: RequestState) -> None:
        """A waiting child leaves its prompt to a sibling."""
        self.waiting.remove(state)
        state.group.held[state.child] = state

    def prompt_may_be_there(self, state: RequestState) -> None:
        """After a commit: siblings may begin with what this one has computed."""
        if state.group.held:
            self._let_in(state.group)

    def _let_in(self, group: Group) -> None:
        for state in group.let_go():
            self.waiting.put_back(state)

    def let_wait(self, state: RequestState) -> None:
        """For pages that somebody else computes."""
        if not state.awaits:
            state.awaits = True
            self.note(state, "awaits")

    def pause(self, state: RequestState) -> None:
        if state.status is Status.RUNNING:
            state.move(Status.PAUSED)
            state.num_pauses += 1
            self.note(state, "paused")
            self.counters.num_pauses += 1
            state.paused_at = self.counters.num_pauses

    def evict(self, state: RequestState) -> None:
        """Take slot and pages away. What is in flight still counts: its tokens are valid wherever they come from."""
        state.move(Status.WAITING)
        state.num_evictions += 1
        self.note(state, "evicted")
        self.counters.num_evictions += 1
        self._leave(state)
        self.waiting.add(state)

    def end(self, state: RequestState, ending: Ending) -> None:
        """The one end of a request that was let in, or of a child, from whatever status."""
        group = state.group
        self._close(state, STATUS_OF[ending.reason])
        state.ending = ending
        self.events.append(ev.Ended(group.request.ticket, state.record(), group.num_left))
        self.forget_if_done(state)
        self._let_in(group)

    def refuse(self, group: Group, failure: Failure) -> None:
        """What it waited for cannot be made: it is refused, and has held nothing."""
        assert group.waits_for and not group.num_residencies
        for state in group.children:
            self._close(state, Status.FAILED)
            self.forget_if_done(state)
        self.events.append(ev.Refused(group.request.ticket, group.request.request_id, failure))

    def _close(self, state: RequestState, status: Status) -> None:
        group = state.group
        if state.status is Status.WAITING and group.held.pop(state.child, None) is None:
            self.waiting.remove(state)
        state.move(status)
        if state.is_resident:
            self._leave(state)
        self.num_left -= 1
        group.num_left -= 1
        if not group.num_left:
            del self.live[group.request.request_id]
            self.num_open -= not group.request.is_closed

    def _leave(self, state: RequestState) -> None:
        """Give slot and pages back. Steps in flight may still write to them: whoever gets them next writes later."""
        self.residents.remove(state)
        state.group.residents.remove(state)
        self.slots.release(state.slot)
        self.cache.leave(state)
        state.leave_device()

    def forget_if_done(self, state: RequestState) -> None:
        if state.is_final and state.in_flight == 0:
            del self.states[state.arrival]

    def note(self, state: RequestState, kind: MomentKind, num_tokens: int = 0, detail: RequestId = "") -> None:
        """Something happened to the request: whoever submitted it, and a trace, will see it."""
        self.events.append(ev.Moment(state.request.ticket, kind, num_tokens, detail, state.child))

    def told(self) -> list[Event]:
        """What is to be told by now."""
        told, self.events = self.events, []
        return told

    # What orders do to all of them (`control.Requests`)

    @property
    def num_live(self) -> int:
        return len(self.live)

    @property
    def num_waiting(self) -> int:
        return self.num_left - len(self.residents)

    @property
    def num_pins(self) -> int:
        return len(self.cache.pins)

    @property
    def weights(self) -> int:
        return self.cache.index.weights

    def any_before(self, arrival: int) -> bool:
        return any(group.children[0].arrival < arrival for group in self.live.values())

    def kept_pages(self) -> list[int]:
        return self.pool.kept()

    def drop_kv(self) -> None:
        self._replay_residents()
        self.cache.clear(self.residents)

    def take_weights(self, epoch: int, digest: str, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy) -> None:
        self.fingerprint = replace(self.fingerprint, weights=digest)
        if in_flight == "recompute":
            self._replay_residents()
        if cache == "invalidate":
            self.cache.clear(self.residents)
        self.cache.take_weights(self._living(), epoch, keep=cache == "keep")
        for group in self.live.values():
            group.take_weights()
        for state in self.residents:  # their KV is of the weights before
            state.exact = False

    def begin_anew(self) -> None:
        self.cache.clear(self.residents)
        self.pool.begin_anew()
        self.counters = Counters()

    def _replay_residents(self) -> None:
        """Take slots and pages away from all; they come again before everybody else."""
        replayed = replay_order(self.residents)
        for state in replayed:
            state.move(Status.WAITING)
            self.note(state, "dropped")
            self._leave(state)
        self.waiting.replay(replayed)

    def _living(self) -> list[RequestState]:
        return [state for group in self.live.values() for state in group.children if not state.is_final]

    # Seeing

    def device_rows(self) -> list[DeviceRow]:
        """What the device must hold of every resident request, when no step is in flight."""
        assert not self.steps_in_flight
        rows = []
        for state in self.residents:
            decodes = state.num_computed >= state.prefill_end
            last_token = state.tokens[state.num_computed] if decodes else None
            settings = row_settings(state, self.config.vocab_size)
            rows.append(DeviceRow(settings, state.num_computed, last_token, list(state.pages)))
        return rows

    def check_idle(self) -> None:
        """With nobody live and nothing in flight nothing is held. Costs nothing; raises AssertionError."""
        if self.live or self.steps_in_flight:
            return
        lost = self.pool.num_pages - self.pool.num_free - self.cache.pins.num_pages
        assert not lost, f"{lost} of {self.pool.num_pages} pages are held by nobody"
        assert self.slots.num_free == self.slots.num_slots, "a device row is held by nobody"
        kept = len(self.states) + len(self.residents) + len(self.waiting)
        assert not kept, f"{kept} entries are kept of requests that have ended"

    def check(self) -> None:
        """Everything is accounted for; for debugging and tests. Raises AssertionError."""
        self.check_idle()
        self.cache.check(self.residents)
        living = self._living()
        for group in self.live.values():
            group.check()
        for state in living:
            state.check()
        assert [s.order for s in self.residents] == sorted(s.order for s in self.residents)
        self.waiting.check()
        assert not any(s.group.waits_for for s in self.residents)
        assert all(s.is_resident == (s.status in (Status.RUNNING, Status.PAUSED)) for s in self.states.values())
        held = [state for group in self.live.values() for state in group.held.values()]
        found = sorted(s.arrival for s in (*self.residents, *self.waiting, *held))
        assert sorted(s.arrival for s in living) == found and len(found) == self.num_left
        assert self.num_open == sum(not group.request.is_closed for group in self.live.values())
        slots = [state.slot for state in self.residents]
        assert len({*slots}) == len(slots) == self.config.max_num_seqs - self.slots.num_free
        assert all(s.in_flight > 0 for s in self.states.values() if s.is_final)
        if not self.steps_in_flight:
            assert all(s.in_flight == 0 for s in self.states.values())


STATUS_OF: dict[FinishReason, Status] = {
    "stop": Status.FINISHED,
    "length": Status.FINISHED,
    "abort": Status.ABORTED,
    "error": Status.FAILED,
}


def order_of(state: RequestState) -> tuple[int, int]:
    return state.order
