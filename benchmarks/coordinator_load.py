"""What a request and a streamed token cost the coordinator with its sockets, and how much later they arrive for it.

python benchmarks/coordinator_load.py [--requests 4000] [--together 32] [--tokens 64] [--part 8] [--endpoint tcp]

A coordinator and a replica that answers at once, in processes of their own, and a client here. CPU time is that of the
coordinator's process, the threads of its sockets included, as the kernel counts it. Times on the clock say something on
an idle machine only. What the coordinator itself adds to a request's way is counted anywhere: how often it wakes, and
how much CPU each turn takes, from its waking until all that came is sent on.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import msgspec

from perdure.api.ending import Ending
from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.coordinator.link import Frames
from perdure.coordinator.router import Routing
from perdure.coordinator.service import Service, new_number
from perdure.coordinator.sessions import Arrived, Caller
from perdure.coordinator.wire import CallingSocket

REST = msgspec.msgpack.encode(m.Rest(Ending("length")))
KEYS = [b"12345678"] * 8
BODY = bytes(600)
"""Of a prompt of 150 tokens."""
PATIENCE_S = 120.0
ABOUT = m.About(0, "kind", Fingerprint(), "running", 0, "model", b"")


def cpu_s_of(pid: int) -> float:
    """CPU time of a process, of all its threads that are there."""
    return sum(int(task.read_text().split()[0]) for task in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


CONTEXT = multiprocessing.get_context("spawn")


class Timed(Service):
    """Notes the CPU time of each turn, in seconds."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint, Routing("longest_prefix", silence_s=PATIENCE_S, stall_s=PATIENCE_S))
        self.turns: list[float] = []
        self._wait, self._woke_at = self._socket.wait, time.thread_time()
        self._socket.wait = self._timed_wait  # type: ignore[method-assign]

    def _timed_wait(self, timeout_s: float) -> None:
        self.turns.append(time.thread_time() - self._woke_at)
        self._wait(timeout_s)
        self._woke_at = time.thread_time()


def _coordinate(endpoint: str, pipe: Connection) -> None:
    """Says where it is, and its turns whenever it is asked; ends with the pipe."""
    timed = Timed(endpoint)
    pipe.send(timed.endpoint)

    def answer() -> None:
        with contextlib.suppress(EOFError):
            while True:
                pipe.recv()
                turns, timed.turns = timed.turns, []
                pipe.send(turns)
        timed.stop()

    threading.Thread(target=answer, daemon=True).start()
    timed.run()


class Coordinator:
    """In a process of its own."""

    def __init__(self, endpoint: str) -> None:
        self._pipe, theirs = CONTEXT.Pipe()
        self._process = CONTEXT.Process(target=_coordinate, args=(endpoint, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self.endpoint: str = self._pipe.recv()

    @property
    def cpu_s(self) -> float:
        return cpu_s_of(self._process.pid or 0)

    def turns(self) -> list[float]:
        """The CPU time of each since the last call, in seconds."""
        self._pipe.send(None)
        return list(self._pipe.recv())

    def end(self) -> None:
        self._pipe.close()
        self._process.join(5.0)
        self._process.kill()


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

    def __init__(self, endpoint: str, num_tokens: int, part: int, about: m.About = ABOUT) -> None:
        self._peer = Peer(endpoint, "replica", about)
        self._peer.heard = self._heard
        self._num_tokens = num_tokens
        self._part = part
        self._going: dict[int, int] = {}

    def _heard(self, message: m.Message, frames: Frames) -> None:
        if isinstance(message, m.Submit):
            self._peer.caller.send(m.Admitted(message.number, 1, self._num_tokens, "raw"))
            self._going[message.number] = 0

    def run(self) -> None:
        self._peer.open()
        while True:
            self._peer.turn(self._wait_s())
            self._step()
            self._peer.push()

    def _wait_s(self) -> float:
        return 0.0 if self._going else 1.0

    def _tokens(self, number: int) -> list[int]:
        return list(range(self._part))

    def _step(self) -> None:
        for number in [number for number, count in self._going.items() if count >= self._num_tokens]:
            del self._going[number]
            self._peer.caller.send(m.Ended(number), [REST])
        if self._going:
            count, numbers = len(self._going), list(self._going)
            token_ids = [self._tokens(number) for number in numbers]
            columns = [0] * count, list(self._going.values()), [0] * count, token_ids
            self._peer.caller.send(m.Parts(numbers, *columns), [b""] * count)
            for number in numbers:
                self._going[number] += self._part


def _answer(endpoint: str, num_tokens: int, part: int) -> None:
    Replica(endpoint, num_tokens, part).run()


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
    replica = CONTEXT.Process(target=_answer, args=(coordinator.endpoint, num_tokens, part), daemon=True)
    replica.start()
    client = Client(coordinator.endpoint)
    try:
        client.run_together(num_requests // 10, together)
        before = coordinator.cpu_s
        client.run_together(num_requests, together)
        us_a_request = 1e6 * (coordinator.cpu_s - before) / num_requests
        assert client.num_tokens == (num_requests + num_requests // 10) * num_tokens
        coordinator.turns()
        before, num_slow = coordinator.cpu_s, num_requests // 4
        client.run_at(0.1 * 1e6 / us_a_request, num_slow)
        cpu_s, turns, ordered = coordinator.cpu_s - before, sorted(coordinator.turns()), sorted(client.seconds)
        return {
            "us_a_request": us_a_request,
            "requests_a_second_of_a_core": 1e6 / us_a_request,
            "at_a_tenth_ms": {
                "p50": 1e3 * ordered[len(ordered) // 2],
                "p99": 1e3 * ordered[len(ordered) * 99 // 100],
                "most": 1e3 * ordered[-1],
            },
            "own_at_a_tenth": {
                "us_a_request": 1e6 * cpu_s / num_slow,
                "turns_a_request": len(turns) / num_slow,
                "turn_us_p50": 1e6 * turns[len(turns) // 2],
                "turn_us_p99": 1e6 * turns[len(turns) * 99 // 100],
            },
        }
    finally:
        client.end()
        replica.kill()
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
        late, own = one["at_a_tenth_ms"], one["own_at_a_tenth"]
        turns = f"{own['turns_a_request']:.1f} turns, of {own['turn_us_p50']:.0f} us, p99 {own['turn_us_p99']:.0f}"
        print(
            f"{name}: a core bears {one['requests_a_second_of_a_core']:.0f} requests a second; at a tenth of that a "
            f"request takes {late['p50']:.2f} ms, p99 {late['p99']:.2f}, most {late['most']:.2f}; "
            f"of the coordinator's own, {own['us_a_request']:.0f} us of CPU in {turns}"
        )
    if args.json is not None:
        workload = {name: getattr(args, name) for name in ("requests", "together", "tokens", "part")}
        args.json.write_text(json.dumps({"workload": workload, "cores": os.cpu_count(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
