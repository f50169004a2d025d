"""The replicas: who serves, who is on the way in, and who has stopped to move.

- A replica joins with what it is, is brought into the state that the others have agreed on, and serves from then on.
- It is lost with its session (`sessions`), or when it has work and completes no step for too long: a beat alone is no
  life.
- Its index is its place among equals: ties go to the lowest.
"""

from __future__ import annotations

from collections.abc import Callable

from perdure.api import command as cmd
from perdure.api.output import ReplicaStatus
from perdure.coordinator.messages import About, Asked, Beat

STALL_S = 30.0
"""A replica with work that completes no step for so long hangs. A large step on a slow machine is shorter."""


MOST_LOST = 64
"""So many lost ones are remembered, for who looks."""


class Replica:
    """session: by which it is named. serves: whether requests go to it. about: what it is, as last told.

    lacks_weights: the agreed ones could not be had; it waits for others. pins: those that it was told to hold.
    """

    def __init__(self, session: int, name: str, about: About, now: float) -> None:
        self.session = session
        self.name = name
        self.index = about.index
        self.about = about
        self.serves = False
        self.since = now
        """When it called."""
        self.lacks_weights = False
        self.pins: dict[int, None] = {}
        self._num_steps = -1
        self._moved_at = now

    def was_told(self, number: int, order: Asked) -> None:
        """To pin, or to let go."""
        if isinstance(order, cmd.PinPrefix):
            self.pins[number] = None
        elif isinstance(order, cmd.UnpinPrefix):
            self.pins.pop(order.pin, None)

    def beat(self, beat: Beat, now: float) -> None:
        if beat.num_steps != self._num_steps or not beat.has_work:
            self._num_steps = beat.num_steps
            self._moved_at = now

    def is_stalled(self, now: float, stall_s: float) -> bool:
        return now - self._moved_at > stall_s


class Members:
    """All replicas with an open session."""

    def __init__(self, stall_s: float = STALL_S) -> None:
        self._stall_s = stall_s
        self._by_session: dict[int, Replica] = {}
        self._serving: list[Replica] | None = None
        self.lost: dict[int, float] = {}
        """When the last replica of an index was lost, until there is another."""

    def join(self, replica: Replica) -> None:
        self._by_session[replica.session] = replica
        self._serving = None
        self.lost.pop(replica.index, None)

    def leave(self, session: int) -> Replica | None:
        self._serving = None
        return self._by_session.pop(session, None)

    def lose(self, replica: Replica, now: float) -> None:
        """It left without a word."""
        if all(other.index != replica.index for other in self.all):
            self.lost[replica.index] = now
        while len(self.lost) > MOST_LOST:
            del self.lost[next(iter(self.lost))]

    def serve(self, session: int, serves: bool) -> None:
        self._by_session[session].serves = serves
        self._serving = None

    def get(self, session: int) -> Replica | None:
        return self._by_session.get(session)

    def named(self, name: str) -> Replica | None:
        return next((replica for replica in self._by_session.values() if replica.name == name), None)

    @property
    def all(self) -> list[Replica]:
        return list(self._by_session.values())

    @property
    def serving(self) -> list[Replica]:
        """By index, then as they came."""
        if self._serving is None:
            self._serving = sorted((r for r in self._by_session.values() if r.serves), key=lambda r: r.index)
        return self._serving

    def stalled(self, now: float) -> list[int]:
        return [session for session, replica in self._by_session.items() if replica.is_stalled(now, self._stall_s)]

    def status(self, load: Callable[[int], int], now: float) -> list[ReplicaStatus]:
        """By index. load: how many requests a session has."""
        found = [
            ReplicaStatus(one.index, "serving" if one.serves else "joining", load(one.session), now - one.since)
            for one in self.all
        ]
        found += [ReplicaStatus(index, "lost", 0, now - at) for index, at in self.lost.items()]
        return sorted(found, key=lambda one: one.index)

    @property
    def kind(self) -> str | None:
        """What those that are here have in common."""
        return next((replica.about.kind for replica in self._by_session.values()), None)
