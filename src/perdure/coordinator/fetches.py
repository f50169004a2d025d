"""`Fetches`: pieces of weights on their way from whoever has them to a replica that lacks them.

- Weights that a client gave as tensors lie in no file that all can reach. The client has them until its order is
  answered, and from then on every replica that took them.
- A replica asks for one piece at a time, so nobody is flooded. The coordinator passes pieces on and keeps none.
- Where the one who was asked is lost, the replica is told, and its order fails like any other that could not be.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from perdure.api.ending import Failure
from perdure.api.errors import StateError
from perdure.coordinator.link import Frames
from perdure.coordinator.messages import Fetch, Message, Piece


class _Asked(NamedTuple):
    """fetch: as the replica said it."""

    replica: int
    fetch: Fetch
    holder: int


class Fetches:
    """to_send: (session, message, frames), for the router to take."""

    def __init__(self) -> None:
        self.to_send: list[tuple[int, Message, Frames]] = []
        self._asked: dict[int, _Asked] = {}
        self._next = 1

    def __len__(self) -> int:
        return len(self._asked)

    def ask(self, replica: int, fetch: Fetch, holder: int | None) -> None:
        """holder: who has these weights, None = nobody here."""
        if holder is None:
            self._fail(replica, fetch)
            return
        self._asked[self._next] = _Asked(replica, fetch, holder)
        self.to_send.append((holder, replace(fetch, ask=self._next), ()))
        self._next += 1

    def answered(self, holder: int, piece: Piece, frames: Frames) -> None:
        asked = self._asked.get(piece.ask)
        if asked is not None and asked.holder == holder:
            del self._asked[piece.ask]
            self.to_send.append((asked.replica, replace(piece, ask=asked.fetch.ask), frames))

    def lost(self, session: int) -> None:
        """Whoever it was."""
        for number, one in list(self._asked.items()):
            if session in (one.replica, one.holder):
                del self._asked[number]
            if session == one.holder:
                self._fail(one.replica, one.fetch)

    def _fail(self, replica: int, fetch: Fetch) -> None:
        error = StateError("nobody is left who has these weights: give them again")
        self.to_send.append((replica, Piece(fetch.ask, fetch.first, failure=Failure.of(error)), ()))
