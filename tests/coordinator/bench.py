"""The router on a bench: sessions by hand, what it sends in a list, and a clock that only the test moves."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from perdure.api.event import Failure
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator.link import Frames
from perdure.coordinator.router import Router, Routing
from perdure.coordinator.sessions import Arrived, Lost, Opened

Sent = TypeVar("Sent")


class Bench:
    """Sessions are numbers: replicas from 1, clients from 100."""

    def __init__(self, num_replicas: int = 2, num_clients: int = 2, **routing: Any) -> None:
        self.router = Router(Routing(**{"policy": "load_balanced", **routing}))
        self.now = 0.0
        self.clients = [100 + at for at in range(num_clients)]
        for at, client in enumerate(self.clients):
            self.router.take(Opened(client, m.Hello(m.VERSION, f"client-{at}")), 0.0)
        for at in range(num_replicas):
            self.join(1 + at, at)
        self.outgoing: list[tuple[int, m.Message, Frames]] = []
        self.router.take_outgoing()

    def join(self, session: int, index: int, name: str | None = None, **about: Any) -> None:
        given = {"fingerprint": Fingerprint(), "state": "running", "weight_epoch": 0, "source": "model", **about}
        what = m.About(index=index, kind="k", details=b"d", **given)
        self.router.take(Opened(session, m.Hello(m.VERSION, name or f"replica-{index}", what)), self.now)

    def take(self, session: int, message: m.Message, frames: Frames = ()) -> None:
        self.router.take(Arrived(session, message, frames), self.now)

    def lose(self, session: int) -> None:
        self.router.take(Lost(session), self.now)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.router.tick(self.now)

    def sent(self, session: int, kind: type[Sent]) -> list[Sent]:
        """What this session was sent of one kind, and take it away."""
        self.outgoing += self.router.take_outgoing()
        found = [message for to, message, _ in self.outgoing if to == session and isinstance(message, kind)]
        self.outgoing = [one for one in self.outgoing if not (one[0] == session and isinstance(one[1], kind))]
        return found

    def submit(self, client: int, number: int, keys: list[bytes] | None = None, body: bytes = b"body") -> None:
        self.take(client, m.Submit(number, keys or []), [body])

    def admit(self, replica: int, serial: int) -> None:
        self.take(replica, m.Admitted(serial, seed=9, max_output=50, logprobs_mode="raw"))

    def part(self, replica: int, serial: int, first: int, token_ids: list[int], epoch: int = 0) -> None:
        self.take(replica, m.Parts([serial], [0], [first], [epoch], [token_ids]), [b""])

    def end(self, replica: int, serial: int) -> None:
        self.take(replica, m.Ended(serial), [b"ending"])

    def endings(self, client: int) -> list[tuple[int, str, Failure | None]]:
        """Ends that the coordinator made up itself."""
        self.outgoing += self.router.take_outgoing()
        found = []
        for to, message, frames in self.outgoing:
            if to == client and isinstance(message, m.Ended):
                ending = msgspec.msgpack.decode(frames[0], type=m.Rest).ending
                assert message.child is None, "all of its samples"
                found.append((message.number, ending.reason, ending.failure))
        return found
