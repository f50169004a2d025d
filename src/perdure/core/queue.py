"""Requests without slot and pages, in the order they are taken in.

- First those whose KV was dropped with the whole engine's, in the order they shall be computed again; then (priority,
  arrival). Nobody overtakes, but one that waits for something beside the loop lets the others past.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from perdure.core.lifecycle import Status
from perdure.core.state import NEVER, RequestState


class Queue:
    """The waiting requests."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, place: int) -> RequestState:
        return self._states[place]

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def add(self, state: RequestState) -> None:
        """Behind those that go before it by (priority, arrival), and behind every replay."""
        state.replay = None
        insort(self._states, state, key=_place)

    def put_back(self, state: RequestState) -> None:
        """Where it was, after it was held back; what it needs may be less now."""
        state.tried_at = NEVER
        insort(self._states, state, key=_place)

    def remove(self, state: RequestState) -> None:
        self._states.remove(state)

    def replay(self, states: Sequence[RequestState]) -> None:
        """Put these before all others, in this order; what was to be replayed already comes next."""
        self._states = [*states, *self._states]
        for number, state in enumerate(self._states):
            if number < len(states) or state.replay is not None:
                state.replay = number

    def check(self) -> None:
        places = [_place(state) for state in self._states]
        assert places == sorted(places), "the queue is out of order"


def replay_order(residents: Sequence[RequestState]) -> list[RequestState]:
    """The order in which residents, given in (priority, arrival), are computed again: those that run, then paused ones,
    the latest paused first."""
    running = [state for state in residents if state.status is Status.RUNNING]
    paused = [state for state in residents if state.status is Status.PAUSED]
    return [*running, *sorted(paused, key=lambda state: -state.paused_at)]


def _place(state: RequestState) -> tuple[int, int, int]:
    return (1, *state.order) if state.replay is None else (0, state.replay, 0)
