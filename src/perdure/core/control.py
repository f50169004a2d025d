"""The engine's own state: running, pausing, paused, stopped, and who waits to hear of it.

A pause takes hold at once for planning ("keep", "abort") or when all requests admitted so far have ended ("wait"). It
is answered when no step is in flight. A resume before that cancels it, and answers it too.
"""

from __future__ import annotations

from perdure.api.event import Done, Event
from perdure.core.lifecycle import ENGINE_MOVES, EngineState, moved


class Control:
    """State and the tickets of unanswered pauses and stops."""

    def __init__(self) -> None:
        self.state = EngineState.RUNNING
        self._barrier: int | None = None
        """While waiting: requests that arrived from here on are not begun."""
        self._unanswered: list[int] = []

    @property
    def may_plan(self) -> bool:
        return self.state is EngineState.RUNNING

    @property
    def is_waiting(self) -> bool:
        """Whether somebody waits for `settle`."""
        return bool(self._unanswered)

    @property
    def unanswered(self) -> list[int]:
        """Tickets of pauses and stops that wait."""
        return list(self._unanswered)

    def may_admit(self, arrival: int) -> bool:
        return self._barrier is None or arrival < self._barrier

    def holds_back(self, arrival: int) -> bool:
        """Whether a live request keeps a pause from taking hold."""
        return self._barrier is not None and arrival < self._barrier

    def pause(self, ticket: int, barrier: int | None) -> None:
        """barrier: the arrival before which requests end first; None = at once."""
        self._unanswered.append(ticket)
        if self.state is EngineState.RUNNING:
            self._barrier = barrier
            if barrier is None:
                self.state = moved(ENGINE_MOVES, self.state, EngineState.PAUSED)

    def resume(self, ticket: int) -> list[Event]:
        answered = [Done(t) for t in self._unanswered] if self.state is not EngineState.STOPPED else []
        if self.state is EngineState.PAUSED:
            self.state = moved(ENGINE_MOVES, self.state, EngineState.RUNNING)
        if answered:
            self._unanswered = []
        self._barrier = None
        return [*answered, Done(ticket)]

    def stop(self, ticket: int) -> None:
        self._unanswered.append(ticket)
        if self.state is not EngineState.STOPPED:
            self.state = moved(ENGINE_MOVES, self.state, EngineState.STOPPED)

    def settle(self, steps_in_flight: int, older_live: bool) -> list[Event]:
        """Answer those who wait, once everything they wait for holds."""
        if self._barrier is not None and not older_live and self.state is EngineState.RUNNING:
            self._barrier = None
            self.state = moved(ENGINE_MOVES, self.state, EngineState.PAUSED)
        if steps_in_flight or self._barrier is not None:
            return []
        answered: list[Event] = [Done(ticket) for ticket in self._unanswered]
        self._unanswered = []
        return answered
