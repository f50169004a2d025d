"""The engine's own state, and the orders that change it.

- Orders are carried out one after another, as they came. One that is illegal when its turn comes is refused, and
  nothing is changed by it.
- A pause takes hold at once for planning ("keep", "abort") or when all requests admitted so far have ended ("wait"). It
  is answered when no step is in flight. A resume before that cancels it, and answers it too.
- Every other order waits until no step is in flight; nothing is planned meanwhile. Most then need the device: its part
  is asked as a directive.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from perdure.api import command as cmd
from perdure.api.directive import Clear, Directive, LoadWeights, Outcome, Sleep, Wake
from perdure.api.errors import StateError
from perdure.api.event import Done, Event, Failure
from perdure.core.lifecycle import ENGINE_MOVES, EngineState, moved
from perdure.core.residency import Residency


class Requests(Protocol):
    """What orders ask about the requests inside, and do to them; `core.requests` is what answers."""

    @property
    def steps_in_flight(self) -> int: ...

    @property
    def num_live(self) -> int: ...

    @property
    def num_pins(self) -> int: ...

    @property
    def weights(self) -> int:
        """The epoch that the present weights were loaded as."""
        ...

    def any_before(self, arrival: int) -> bool:
        """Whether a live request arrived before this one."""
        ...

    def kept_pages(self) -> list[int]:
        """Pages whose content is wanted, ascending."""
        ...

    def drop_kv(self) -> None:
        """Every request computes anew what it has computed, and nothing is cached."""
        ...

    def take_weights(self, epoch: int, digest: str, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy) -> None:
        """Other weights compute from now on. digest: it tells them apart (`api.fingerprint`)."""
        ...

    def begin_anew(self) -> None:
        """Forget what was cached and counted."""
        ...


class Control:
    """epoch: the number that new tokens get in results."""

    def __init__(self) -> None:
        self.state = EngineState.RUNNING
        self.epoch = 0
        self._residency = Residency()
        self._barrier: int | None = None
        """While waiting: requests that arrived from here on are not begun."""
        self._unanswered: list[int] = []
        """Tickets of pauses and stops that hold, or will."""
        self._orders: deque[tuple[cmd.Order, int]] = deque()
        """Each with the arrival of the next request when it came. The first waits for what its turn needs."""
        self._serves_again: EngineState | None = None
        """The state to return to with whole weights, after an update that failed."""

    # What others may do meanwhile

    @property
    def may_plan(self) -> bool:
        return self.state is EngineState.RUNNING and (not self._orders or self._barrier is not None)

    @property
    def unanswered(self) -> list[int]:
        """Tickets of orders and stops that wait."""
        return [*self._unanswered, *(order.ticket for order, _ in self._orders)]

    def may_admit(self, arrival: int) -> bool:
        return self._barrier is None or arrival < self._barrier

    def refusal(self, again: bool = False) -> str | None:
        """Why a request submitted now is refused: the engine will not be whole after the orders before it. One that
        comes `again` waits for that."""
        if self.state is EngineState.STOPPED:
            return "the engine is stopped: it takes no more requests"
        if again:
            return None
        after = self._residency.copy()
        for order, _ in self._orders:
            if isinstance(order, cmd.Suspend) and after.is_whole:
                after.sleep(order.kv, order.weights)
            elif isinstance(order, cmd.Resume) and after.refusal(order.tags) is None:
                after.wake(*after.to_wake(order.tags))
            elif isinstance(order, cmd.UpdateWeights) and order.has_weights and after.weights is None:
                after.weights_loaded = True
        if after.is_whole:
            return None
        return f"the engine is suspended: {self._residency.remedy} before requests are submitted"

    @property
    def is_settled(self) -> bool:
        """Whether `advance` has nothing to do."""
        return not self._unanswered and not self._orders

    # Orders

    def take(self, order: cmd.Order, next_arrival: int) -> None:
        self._orders.append((order, next_arrival))

    def stop(self, ticket: int) -> list[Event]:
        """The end: orders not carried out yet never will be."""
        failure = Failure.of(StateError("the engine is stopped"))
        refused: list[Event] = [Done(order.ticket, failure=failure) for order, _ in self._orders]
        self._orders.clear()
        self._barrier = None
        self._unanswered.append(ticket)
        if self.state is not EngineState.STOPPED:
            self._move(EngineState.STOPPED)
        return refused

    def advance(self, requests: Requests) -> list[Event]:
        """Carry orders out as far as they go without the device; returns what is to be answered."""
        told = self._settle(requests)
        while self._orders:
            answers = self._take_up(*self._orders[0], requests)
            if answers is None:
                break
            self._orders.popleft()
            told += [*answers, *self._settle(requests)]
        return told

    def directive(self, requests: Requests) -> Directive | None:
        """The device's part of the first order, if its turn has come."""
        if not self._orders or requests.steps_in_flight or self._barrier is not None:
            return None
        residency = self._residency
        match self._orders[0][0]:
            case cmd.Suspend(_, kv, weights):
                return Sleep(kv, weights, requests.kept_pages() if kv == "offload" else [])
            case cmd.Resume(_, tags):
                kv_wakes, weights_wake = residency.to_wake(tags)
                is_away = kv_wakes and residency.kv == "offload"
                return Wake(kv_wakes, weights_wake, requests.kept_pages() if is_away else [])
            case cmd.Reset():
                return Clear()
            case cmd.UpdateWeights(ticket):
                return LoadWeights(ticket)
        raise AssertionError(self._orders[0])

    def done(self, directive: Directive, outcome: Outcome, requests: Requests) -> list[Event]:
        """The device has done its part of the first order, or failed."""
        order, _ = self._orders.popleft()
        if outcome.failure is not None:
            self._failed(directive, outcome.changed)
            return [Done(order.ticket, failure=outcome.failure)]
        match directive:
            case Sleep(kv, weights):
                self._serves_again = None
                self._move(EngineState.SUSPENDED)
                self._residency.sleep(kv, weights)
                if kv == "recompute":
                    requests.drop_kv()
            case Wake(kv_wakes, weights_wake):
                self._residency.wake(kv_wakes, weights_wake)
                if self._residency.is_whole:
                    self._move(EngineState.RUNNING)
            case Clear():
                requests.begin_anew()
            case LoadWeights():
                assert isinstance(order, cmd.UpdateWeights)
                self.epoch = self._epoch_of(order)
                requests.take_weights(self.epoch, outcome.weights, order.cache, order.in_flight)
                self._residency.weights_loaded = True
                self._return()
        return [Done(order.ticket)]

    # One order

    def _take_up(self, order: cmd.Order, next_arrival: int, requests: Requests) -> list[Event] | None:
        """The answers, if the order needs nothing more; None if it must wait."""
        match order:
            case cmd.Pause(ticket, mode):
                self._unanswered.append(ticket)
                if self.state is EngineState.RUNNING:
                    self._barrier = next_arrival if mode == "wait" else None
                    if self._barrier is None:
                        self._move(EngineState.PAUSED)
                return []
            case cmd.Resume(ticket, tags) if self.state is not EngineState.SUSPENDED:
                return self._resume(ticket)
            case cmd.Resume(ticket, tags):
                refusal = self._residency.refusal(tags)
                asleep = any(self._residency.to_wake(tags))
                return _refused(ticket, refusal) if refusal else None if asleep else [Done(ticket)]
            case cmd.Suspend(ticket) if self.state is EngineState.SUSPENDED:
                return [Done(ticket)]
        if refusal := self._refusal(order, requests):
            return _refused(order.ticket, refusal)
        if self._barrier is not None:
            return None
        if isinstance(order, cmd.Suspend) and self.state is EngineState.RUNNING:
            self._serves_again = self.state
            self._move(EngineState.PAUSED)
        if isinstance(order, cmd.UpdateWeights) and not order.has_weights and not requests.steps_in_flight:
            self.epoch = self._epoch_of(order)
            return [Done(order.ticket)]
        return None

    def _refusal(self, order: cmd.Order, requests: Requests) -> str | None:
        """Why a suspension, a reset or an update is illegal now."""
        if self.state is EngineState.STOPPED:
            return "the engine is stopped"
        is_suspended = self.state is EngineState.SUSPENDED
        match order:
            case cmd.Reset() if is_suspended:
                return "reset is refused while the engine is suspended: resume it first"
            case cmd.Reset() if requests.num_live:
                return f"reset needs an engine without requests: {requests.num_live} are outstanding"
            case cmd.Reset() if requests.num_pins:
                return f"reset needs an engine without pinned prefixes: {requests.num_pins} are not released"
            case cmd.UpdateWeights(has_weights=True) if is_suspended and self._residency.weights is not None:
                return "weights are updated when they are awake: resume(tags=['weights']) first"
            case cmd.UpdateWeights(has_weights=True, cache="salt") if self._epoch_of(order) == requests.weights:
                return f"cache='salt' tells weights apart by epoch: the present ones were loaded as {requests.weights}"
        return None

    def _epoch_of(self, order: cmd.UpdateWeights) -> int:
        return self.epoch + 1 if order.epoch is None else order.epoch

    def _resume(self, ticket: int) -> list[Event]:
        answered: list[Event] = []
        if self.state is not EngineState.STOPPED:
            answered = [Done(waiting) for waiting in self._unanswered]
            self._unanswered = []
        if self.state is EngineState.PAUSED:
            self._move(EngineState.RUNNING)
        self._barrier = None
        return [*answered, Done(ticket)]

    def _settle(self, requests: Requests) -> list[Event]:
        """Answer pauses and stops, once everything they wait for holds."""
        if self._barrier is not None and not requests.any_before(self._barrier):
            self._barrier = None
            self._move(EngineState.PAUSED)
        if not self._unanswered or requests.steps_in_flight or self._barrier is not None:
            return []
        answered: list[Event] = [Done(ticket) for ticket in self._unanswered]
        self._unanswered = []
        return answered

    def _failed(self, directive: Directive, changed: bool) -> None:
        """What was not changed goes on as before; weights written in part serve nobody."""
        if isinstance(directive, LoadWeights) and changed:
            self._residency.weights_loaded = False
            if self.state is not EngineState.SUSPENDED:
                self._serves_again = self.state
                if self.state is EngineState.RUNNING:
                    self._move(EngineState.PAUSED)
                self._move(EngineState.SUSPENDED)
        elif isinstance(directive, Sleep):
            self._return()

    def _return(self) -> None:
        """Back to the state before something that failed, if nothing is asleep."""
        if self._serves_again is not None and self._residency.is_whole:
            if self.state is not self._serves_again:
                self._move(self._serves_again)
            self._serves_again = None

    def _move(self, to: EngineState) -> None:
        self.state = moved(ENGINE_MOVES, self.state, to)


def _refused(ticket: int, why: str) -> list[Event]:
    return [Done(ticket, failure=Failure.of(StateError(why)))]
