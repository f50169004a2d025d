"""What a request and a streamed token cost the coordinator with its sockets, and how much later they arrive for it.

python benchmarks/coordinator_load.py [--requests 4000] [--together 32] [--tokens 64] [--part 8] [--endpoint tcp]

A coordinator in a process of its own, and here a client and a replica, on a thread each, that answers at once. CPU time
is that of the coordinator's process, the threads of its sockets included, as the kernel counts it. Times on the clock
say something on an idle machine only.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from perdure.api.ending import Ending
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator import service
from perdure.coordinator.link import Frames
from perdure.coordinator.router import Routing
from perdure.coordinator.service import new_number
from perdure.coordinator.sessions import Arrived, Caller
from perdure.coordinator.wire import CallingSocket
from perdure.engine.launch import Child

REST = msgspec.msgpack.encode(m.Rest(Ending("length")))
KEYS = [b"12345678"] * 8
BODY = bytes(600)
"""Of a prompt of 150 tokens."""
PATIENCE_S = 120.0


class Coordinator:
    """In a process of its own."""

    def __init__(self, endpoint: str) -> None:
        env = {**os.environ, "PYTHONPATH": str(Path(service.__file__).parents[2])}
        settings = service.Settings(endpoint, Routing("longest_prefix", silence_s=PATIENCE_S, stall_s=PATIENCE_S))
        self._child = Child(service.__name__, settings, env)
        self.endpoint = self._child.ready().decode()

    @property
    def cpu_s(self) -> float:
        """Of all its threads."""
        tasks = Path(f"/proc/{self._child.process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def end(self) -> None:
        self._child.end(5.0)


class Peer:
    """A caller on its socket; `heard` is called with every message, on the thread that turns it."""

    def __init__(self, endpoint: str, name: str, about: m.About | None = None) -> None:
        self.socket = CallingSocket(endpoint, None)
        self.caller = Caller(new_number, lambda: m.Hello(m.VERSION, name, about), time.monotonic())
        self.heard: Callable[[m.Message, Frames], None] = lambda message, frames: None
        self.wake = self.socket.waker.wake

    def turn(self, at_most_s: float = 1.0) -> None:
        now = time.monotonic()
        self.socket.wait(min(at_most_s, self.caller.due(now) - now))
        now = time.monotonic()
        for frames in self.socket.received():
            for happening in self.caller.take(frames, now):
                if isinstance(happening, Arrived):
                    self.heard(happening.message, happening.frames)
        self.push()

    def push(self) -> None:
        for packet in self.caller.packets(time.monotonic()):
            self.socket.send(packet)

    def open(self) -> None:
        while self.caller.link is None:
            self.turn()
        self.turn(0.1)


class Replica:
    """Answers each request at once: its admission, then its tokens in parts, those of all requests together, then its
    end."""

    def __init__(self, endpoint: str, num_tokens: int, part: int) -> None:
        self._peer = Peer(endpoint, "replica", m.About(0, "kind", Fingerprint(), "running", 0, "model", b""))
        self._peer.heard = self._heard
        self._num_tokens = num_tokens
        self._part = part
        self._going: dict[int, int] = {}
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _heard(self, message: m.Message, frames: Frames) -> None:
        if isinstance(message, m.Submit):
            self._peer.caller.send(m.Admitted(message.number, 1, self._num_tokens, "raw"))
            self._going[message.number] = 0

    def _run(self) -> None:
        self._peer.open()
        while not self._is_over:
            self._peer.turn(0.0 if self._going else 1.0)
            self._step()
            self._peer.push()

    def _step(self) -> None:
        for number in [number for number, count in self._going.items() if count >= self._num_tokens]:
            del self._going[number]
            self._peer.caller.send(m.Ended(number), [REST])
        if self._going:
            count, numbers = len(self._going), list(self._going)
            columns = [0] * count, list(self._going.values()), [0] * count, [list(range(self._part))] * count
            self._peer.caller.send(m.Parts(numbers, *columns), [b""] * count)
            for number in numbers:
                self._going[number] += self._part

    def end(self) -> None:
        self._is_over = True
        self._peer.wake()
        self._thread.join()
        self._peer.socket.close()


class Client:
    """together: requests that are open at once, or rate: so many a second whatever comes back."""

    def __init__(self, endpoint: str) -> None:
        self._peer = Peer(endpoint, "client")
        self._peer.heard = self._heard
        self._began: dict[int, float] = {}
        self._next = 0
        self.num_tokens = 0
        self.seconds: list[float] = []
        """From each submission to its end."""
        self._peer.open()

    def _heard(self, message: m.Message, frames: Frames) -> None:
        if isinstance(message, m.Parts):
            self.num_tokens += sum(map(len, message.token_ids))
        elif isinstance(message, m.Ended):
            self.seconds.append(time.perf_counter() - self._began.pop(message.number))

    def _submit(self) -> None:
        self._began[self._next] = time.perf_counter()
        self._peer.caller.send(m.Submit(self._next, KEYS), [BODY])
        self._next += 1

    def run_together(self, num_requests: int, together: int) -> None:
        self.seconds, last = [], self._next + num_requests
        while len(self.seconds) < num_requests:
            while len(self._began) < together and self._next < last:
                self._submit()
            self._peer.push()
            self._peer.turn()

    def run_at(self, rate: float, num_requests: int) -> None:
        self.seconds, last, due = [], self._next + num_requests, time.perf_counter()
        while len(self.seconds) < num_requests:
            while self._next < last and time.perf_counter() >= due:
                self._submit()
                due += 1 / rate
            self._peer.push()
            self._peer.turn(max(0.0, due - time.perf_counter()) if self._next < last else 1.0)

    def end(self) -> None:
        self._peer.socket.close()


def measure(endpoint: str, num_requests: int, together: int, num_tokens: int, part: int) -> dict[str, Any]:
    """One load: CPU a request; then a tenth of what one core bears of it: how long a request takes through the
    coordinator, all that is not the replica."""
    coordinator = Coordinator(endpoint)
    replica = Replica(coordinator.endpoint, num_tokens, part)
    client = Client(coordinator.endpoint)
    try:
        client.run_together(num_requests // 10, together)
        before = coordinator.cpu_s
        client.run_together(num_requests, together)
        us_a_request = 1e6 * (coordinator.cpu_s - before) / num_requests
        assert client.num_tokens == (num_requests + num_requests // 10) * num_tokens
        client.run_at(0.1 * 1e6 / us_a_request, num_requests // 4)
        ordered = sorted(client.seconds)
        return {
            "us_a_request": us_a_request,
            "requests_a_second_of_a_core": 1e6 / us_a_request,
            "at_a_tenth_ms": {
                "p50": 1e3 * ordered[len(ordered) // 2],
                "p99": 1e3 * ordered[len(ordered) * 99 // 100],
                "most": 1e3 * ordered[-1],
            },
        }
    finally:
        client.end()
        replica.end()
        coordinator.end()


def compare(kind: str, num_requests: int, together: int, num_tokens: int, part: int) -> dict[str, Any]:
    """Requests without tokens and with, over ipc or tcp."""
    with tempfile.TemporaryDirectory() as folder:
        endpoint = f"ipc://{folder}/c" if kind == "ipc" else "tcp://127.0.0.1:*"
        bare = measure(endpoint, num_requests, together, 0, part)
        streamed = measure(endpoint, num_requests // 4, together, num_tokens, part)
    us_a_token = (streamed["us_a_request"] - bare["us_a_request"]) / num_tokens
    return {"endpoint": kind, "bare": bare, "streamed": streamed, "us_a_token": us_a_token}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("requests", 4000), ("together", 32), ("tokens", 64), ("part", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--endpoint", choices=("ipc", "tcp"), default="tcp")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = compare(args.endpoint, args.requests, args.together, args.tokens, args.part)
    bare, streamed = found["bare"], found["streamed"]
    print(
        f"{bare['us_a_request']:.0f} us of CPU a request, {found['us_a_token']:.2f} us a token in parts of {args.part}"
    )
    for name, one in (("no tokens", bare), (f"{args.tokens} tokens", streamed)):
        late = one["at_a_tenth_ms"]
        print(
            f"{name}: a core bears {one['requests_a_second_of_a_core']:.0f} requests a second; at a tenth of that a "
            f"request takes {late['p50']:.2f} ms, p99 {late['p99']:.2f}, most {late['most']:.2f}"
        )
    if args.json is not None:
        workload = {name: getattr(args, name) for name in ("requests", "together", "tokens", "part")}
        args.json.write_text(json.dumps({"workload": workload, "cores": os.cpu_count(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
