"""`Coordinator`: the router and the sessions it speaks in, as one pure object: packets and the time in, packets out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from perdure.coordinator.link import BEAT_S
from perdure.coordinator.router import Router, Routing
from perdure.coordinator.sessions import Answerer, Happening, Lost


class Coordinator:
    """new_number gives numbers that no session before had, not even of a coordinator before this one."""

    def __init__(self, routing: Routing, new_number: Callable[[], int], now: float) -> None:
        self.router = Router(routing)
        self.sessions = Answerer(new_number, self.router.refusal, routing.silence_s)
        self._tick_at = now + BEAT_S

    def take(self, address: bytes, frames: list[bytes], now: float) -> None:
        """A packet came from this address."""
        self._follow(self.sessions.take(address, frames, now), now)

    def cut(self, address: bytes, now: float) -> None:
        """Nobody is at this address any more."""
        self.sessions.cut(address, now)

    def expel(self, address: bytes, now: float) -> None:
        """Whoever speaks from there says what nobody can follow; nobody else is to suffer from it."""
        self._follow([Lost(session) for session in self.sessions.close_address(address)], now)

    def _follow(self, happened: list[Happening], now: float) -> None:
        router = self.router
        for happening in happened:
            router.take(happening, now)
        if router.closed:
            self._send()
            for session in router.closed:
                self.sessions.close(session)
            router.closed.clear()

    def _send(self) -> None:
        """Together, what came of all that arrived since."""
        for session, message, frames in self.router.take_outgoing():
            self.sessions.send(session, message, frames)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if now < self._tick_at:
            return
        late = now - self._tick_at
        if late > BEAT_S:  # it was we who were not there: nobody is blamed for what could not be heard
            self.sessions.excuse(late, now)
        self._tick_at = now + BEAT_S
        lost = self.sessions.tick(now)
        self.router.tick(now)
        self._follow(lost, now)

    def drain(self, until: float) -> None:
        """Take no new request, and stop everybody when none is left, or then. What was said first holds."""
        self.router.drain(until)

    def packets(self, now: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """What is to go onto the wire, each with its address."""
        self._send()
        return self.sessions.packets(now)

    def due(self, now: float) -> float:
        """When `tick` and `packets` have something next."""
        return min(self._tick_at, self.sessions.due(now))

    @property
    def is_done(self) -> bool:
        """Whether everybody was told to stop, has stopped, and knows what there was to know."""
        return self.router.is_stopped and self.sessions.is_flushed

    def check_idle(self) -> None:
        """Nothing is left of any request or question. Raises AssertionError."""
        self.router.check_idle()
