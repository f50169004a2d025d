"""What a request and a streamed token cost the coordinator, in its own CPU time: packets in, packets out, no sockets.

python benchmarks/coordinator_cost.py [--requests 2000] [--together 32] [--tokens 64] [--part 8]

The replica and the client answer at once and are not counted. ZeroMQ's own work, about 5 us a packet, comes on top.
"""

from __future__ import annotations

import argparse
import itertools
import time

import msgspec

from perdure.api.ending import Ending
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator.coordinator import Coordinator
from perdure.coordinator.router import Routing
from perdure.coordinator.sessions import Arrived, Caller

REST = msgspec.msgpack.encode(m.Rest(Ending("length")))


class Bench:
    """One client, one replica, and the time that the coordinator took between them."""

    def __init__(self) -> None:
        self.spent_s = 0.0
        numbers = itertools.count(1)
        self._now = 0.0
        self._coordinator = Coordinator(Routing("longest_prefix"), lambda: next(numbers), 0.0)
        about = m.About(0, "kind", Fingerprint(), "running", 0, "model", b"")
        self.peers = {
            b"client": Caller(lambda: next(numbers), lambda: m.Hello(m.VERSION, "client"), 0.0),
            b"replica": Caller(lambda: next(numbers), lambda: m.Hello(m.VERSION, "replica", about), 0.0),
        }
        for _ in range(10):
            self.turn()

    def turn(self) -> list[m.Message]:
        """Everything that lies on the way arrives; returns what the replica got."""
        self._now += 0.002
        packets = [(name, packet) for name, peer in self.peers.items() for packet in peer.packets(self._now)]
        began = time.process_time()
        for name, packet in packets:
            self._coordinator.take(name, packet, self._now)
        self._coordinator.tick(self._now)
        out = list(self._coordinator.packets(self._now))
        self.spent_s += time.process_time() - began
        got: list[m.Message] = []
        for address, packet in out:
            for happening in self.peers[address].take(packet, self._now):
                if isinstance(happening, Arrived) and address == b"replica":
                    got.append(happening.message)
        return got

    def run(self, num_requests: int, together: int, num_tokens: int, part: int) -> None:
        client, replica = self.peers[b"client"], self.peers[b"replica"]
        for first in range(0, num_requests, together):
            for number in range(first, first + together):
                client.send(m.Submit(number, [b"12345678"] * 8), [bytes(600)])
            serials = [one.number for one in [*self.turn(), *self.turn()] if isinstance(one, m.Submit)]
            assert len(serials) == together
            for serial in serials:
                replica.send(m.Admitted(serial, 1, num_tokens, "raw"))
            for at in range(0, num_tokens - 1, part):
                count = len(serials)
                columns = [0] * count, [at] * count, [0] * count, [list(range(part))] * count
                replica.send(m.Parts(serials, *columns), [b""] * count)
                self.turn()
            for serial in serials:
                replica.send(m.Ended(serial), [REST])
            self.turn()
        for _ in range(5):
            self.turn()
        self._coordinator.check_idle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("requests", 2000), ("together", 32), ("tokens", 64), ("part", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    without, streamed = Bench(), Bench()
    without.run(args.requests, args.together, 0, args.part)
    streamed.run(args.requests, args.together, args.tokens, args.part)
    a_request = 1e6 * without.spent_s / args.requests
    a_token = 1e6 * (streamed.spent_s - without.spent_s) / (args.requests * args.tokens)
    print(f"{a_request:.0f} us a request, {a_token:.2f} us a streamed token in parts of {args.part}")


if __name__ == "__main__":
    main()
