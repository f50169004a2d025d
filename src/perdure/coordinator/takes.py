"""`Takes`: checkpoints on their way from the replicas that have the requests to the clients that asked for them.

- What was asked of a request that waits is asked of the replica that gets it (`Entry.takes`).
- Where a replica is lost before it gave one, the client is told to ask again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from perdure.api.ending import Failure
from perdure.api.errors import ReplicaLost
from perdure.coordinator import messages as m
from perdure.coordinator.entries import Entry
from perdure.coordinator.link import Frames

LOST = Failure.of(ReplicaLost("the replica was lost before it gave the checkpoint: ask again"))


class _Take(NamedTuple):
    """ask: the client's own number. owner: who is to give it."""

    client: int
    ask: int
    owner: int


class Takes:
    """send: (session, message, frames)."""

    def __init__(self, send: Callable[[int, m.Message, Frames], None]) -> None:
        self._send = send
        self._takes: dict[int, _Take] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._takes)

    def ask(self, entry: Entry, owner: int) -> None:
        """Ask for all that were asked for, also while it waited."""
        for ask, end in entry.takes:
            assert entry.client is not None
            self._takes[self._next] = _Take(entry.client, ask, owner)
            self._send(owner, m.Take(self._next, entry.serial, end), ())
            self._next += 1
        entry.takes = []

    def answered(self, answer: m.Taken, frames: Frames) -> None:
        if (take := self._takes.pop(answer.ask, None)) is not None:
            self._send(take.client, m.Taken(take.ask, answer.failure), frames)

    def forget_client(self, client: int) -> None:
        for number in [number for number, take in self._takes.items() if take.client == client]:
            del self._takes[number]

    def lost(self, owner: int) -> None:
        for number in [number for number, take in self._takes.items() if take.owner == owner]:
            take = self._takes.pop(number)
            self._send(take.client, m.Taken(take.ask, LOST), ())
