"""What many replicas cost one coordinator: messages, bytes and its share of a core, from a simulation of them all.

python benchmarks/thousand_replicas.py [--replicas 1 10 100 1000] [--together 32] [--step-ms 50] [--tokens 256]
    [--clients 8] [--seconds 2] [--json FILE]

The coordinator is the real one, without its sockets; replicas and clients speak the real protocol in virtual time. Each
replica has `together` requests and completes a step every `step-ms`, which gives each of them a token; a request has
`tokens`, and then another comes. They are of `clients` clients by turns. CPU time is the coordinator's alone; what its
sockets add is that of `coordinator_load.py`, see docs/replicas.md.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from perdure.api.ending import Ending
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator.coordinator import Coordinator
from perdure.coordinator.router import Routing
from perdure.coordinator.sessions import Arrived, Caller

REST = msgspec.msgpack.encode(m.Rest(Ending("length")))
NUM_KEYS = 32
BODY = bytes(2100)
"""Of a prompt of 512 tokens."""
TICK_S = 0.005
WARM_UP_S = 2.0


class Load(NamedTuple):
    """What each replica does. together=0: nothing, all are idle."""

    together: int
    step_s: float
    tokens: int


class SimReplica:
    """Steps of all are spread over time, and so are the ends of a replica's requests."""

    def __init__(self, index: int, numbers: Iterator[int], load: Load) -> None:
        about = m.About(index, "kind", Fingerprint(), "running", 0, "model", b"")
        self.caller = Caller(lambda: next(numbers), lambda: m.Hello(m.VERSION, f"replica-{index}", about), 0.0)
        self._load = load
        self._step_at = load.step_s * (index % 97) / 97
        self._num_steps = 0
        self._firsts: dict[int, int] = {}
        self._counts: dict[int, int] = {}
        shorter = range(0, load.tokens, max(1, load.tokens // max(1, load.together)))
        self._shorter = itertools.chain(shorter, itertools.repeat(0))
        """By how much its first requests are."""

    def take(self, message: m.Message) -> None:
        if isinstance(message, m.Submit):
            self.caller.send(m.Admitted(message.number, 1, self._load.tokens, "raw"))
            self._firsts[message.number] = 0
            self._counts[message.number] = max(1, self._load.tokens - next(self._shorter))

    def step(self, now: float) -> None:
        if self.caller.link is not None:
            self.caller.link.pulse = m.Beat(self._num_steps, bool(self._firsts))
        if now < self._step_at or not self._firsts:
            return
        self._step_at = max(now, self._step_at + self._load.step_s)
        self._num_steps += 1
        numbers, count = list(self._firsts), len(self._firsts)
        parts = m.Parts(numbers, [0] * count, list(self._firsts.values()), [0] * count, [[7]] * count)
        self.caller.send(parts, [b""] * count)
        for number in numbers:
            self._firsts[number] += 1
            if self._firsts[number] >= self._counts[number]:
                del self._firsts[number], self._counts[number]
                self.caller.send(m.Ended(number), [REST])


class SimClient:
    """Has so many requests open at once."""

    def __init__(self, index: int, numbers: Iterator[int], num_open: int) -> None:
        self.caller = Caller(lambda: next(numbers), lambda: m.Hello(m.VERSION, f"client-{index}"), 0.0)
        self._num_open = num_open
        self._index = index
        self._next = 0
        self.num_ended = 0
        self.num_tokens = 0

    def take(self, message: m.Message) -> None:
        if isinstance(message, m.Ended):
            self.num_ended += 1
        elif isinstance(message, m.Parts):
            self.num_tokens += sum(map(len, message.token_ids))

    def step(self, now: float) -> None:
        while self.caller.link is not None and self._next - self.num_ended < self._num_open:
            name = self._index.to_bytes(2, "big") + self._next.to_bytes(4, "big")
            keys = [name + page.to_bytes(2, "big") for page in range(NUM_KEYS)]
            self.caller.send(m.Submit(self._next, keys), [BODY])
            self._next += 1


class Count:
    """Of packets, bytes of their frames, and the coordinator's CPU time."""

    def __init__(self) -> None:
        self.packets = {"in": 0, "out": 0}
        self.bytes = {"in": 0, "out": 0}
        self.cpu_s = 0.0

    def note(self, way: str, packets: list[tuple[bytes, list[bytes]]]) -> None:
        self.packets[way] += len(packets)
        self.bytes[way] += sum(len(frame) for _, frames in packets for frame in frames)


class World:
    """A coordinator and its peers, whose packets arrive at the next tick."""

    def __init__(self, num_replicas: int, num_clients: int, load: Load) -> None:
        numbers = itertools.count(1)
        self.now = 0.0
        self.coordinator = Coordinator(Routing("longest_prefix"), lambda: next(numbers), 0.0)
        self.replicas = [SimReplica(index, numbers, load) for index in range(num_replicas)]
        num_open = num_replicas * load.together // num_clients
        self.clients = [SimClient(index, numbers, num_open) for index in range(num_clients)]
        self.peers: dict[bytes, SimReplica | SimClient] = {
            str(at).encode(): peer for at, peer in enumerate([*self.replicas, *self.clients])
        }

    def run(self, seconds: float) -> Count:
        count = Count()
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            self._tick(count)
        return count

    def _tick(self, count: Count) -> None:
        now = self.now
        for peer in self.peers.values():
            peer.step(now)
        came = [(name, packet) for name, peer in self.peers.items() for packet in peer.caller.packets(now)]
        began = time.process_time()
        for name, packet in came:
            self.coordinator.take(name, packet, now)
        self.coordinator.tick(now)
        out = list(self.coordinator.packets(now))
        count.cpu_s += time.process_time() - began
        count.note("in", came)
        count.note("out", out)
        for name, packet in out:
            peer = self.peers[name]
            for happening in peer.caller.take(packet, now):
                if isinstance(happening, Arrived):
                    peer.take(happening.message)


def measure(num_replicas: int, num_clients: int, load: Load, seconds: float) -> dict[str, Any]:
    """A second of it, in the mean."""
    world = World(num_replicas, num_clients, load)
    world.run(WARM_UP_S)
    assert len(world.coordinator.router.members.serving) == num_replicas
    gc.collect()
    gc.freeze()  # whoever simulates all peers in one process shall not have the collector look at them all again
    tokens, ended = (sum(getattr(one, name) for one in world.clients) for name in ("num_tokens", "num_ended"))
    count = world.run(seconds)
    return {
        "replicas": num_replicas,
        "requests_open": len(world.coordinator.router.entries),
        "requests": (sum(one.num_ended for one in world.clients) - ended) / seconds,
        "tokens": (sum(one.num_tokens for one in world.clients) - tokens) / seconds,
        "packets_in": count.packets["in"] / seconds,
        "packets_out": count.packets["out"] / seconds,
        "bytes_in": count.bytes["in"] / seconds,
        "bytes_out": count.bytes["out"] / seconds,
        "core_share": count.cpu_s / seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 10, 100, 1000])
    parser.add_argument("--step-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=2.0)
    for name, value in (("together", 32), ("tokens", 256), ("clients", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    busy = Load(args.together, args.step_ms / 1000, args.tokens)
    rows = []
    print("a second: replicas  requests   tokens  packets in      out     MB in      out  of a core")
    for load, count in itertools.product((busy._replace(together=0), busy), args.replicas):
        rows.append(row := measure(count, args.clients, load, args.seconds))
        print(
            f"{row['replicas']:18} {row['requests']:9.0f} {row['tokens']:8.0f} {row['packets_in']:11.0f} "
            f"{row['packets_out']:8.0f} {row['bytes_in'] / 1e6:9.2f} {row['bytes_out'] / 1e6:8.2f} "
            f"{row['core_share']:9.1%}",
            flush=True,
        )
    if args.json is not None:
        workload = {name: getattr(args, name) for name in ("together", "step_ms", "tokens", "clients", "seconds")}
        args.json.write_text(json.dumps({"workload": workload, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
