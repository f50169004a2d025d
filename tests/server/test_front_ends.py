"""Several front ends on one port: whatever a client asks, it must not matter which of them it reached."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from perdure import LLM, Checkpoint, InvalidValue, PerdureError, SamplingParams
from perdure.server import supervisor
from perdure.server.channel import Begin
from perdure.server.config import ServeConfig
from perdure.server.supervisor import Process, Supervisor
from tests.server.started import ENDLESS, PATH, ends, in_flight, process

ENDED = "vllm:e2e_request_latency_seconds_count"


class Server:
    """One with two front ends. Every answer says whose it is, so a connection to either is a matter of trying."""

    def __init__(self, pid: int, client: httpx.Client) -> None:
        self.pid = pid
        self.http = client

    def descendants(self) -> list[int]:
        """Processes that it started, by whatever they are."""
        found, left = [], [self.pid]
        while left:
            for task in Path(f"/proc/{left.pop()}/task").glob("*/children"):
                children = [int(one) for one in task.read_text().split()]
                found += children
                left += children
        return found

    def front_ends(self) -> list[int]:
        return [pid for pid in self.descendants() if "perdure.server.front_end" in _command(pid)]

    def reach(self, front_end: int) -> httpx.Client:
        """A client whose one connection is to this front end."""
        give_up_at = time.monotonic() + 120
        while True:
            client = httpx.Client(base_url=self.http.base_url, timeout=60, limits=httpx.Limits(max_connections=1))
            if client.get("/version").headers["x-front-end"] == str(front_end):
                return client
            client.close()
            assert time.monotonic() < give_up_at

    def ask(self, front_end: int, method: str, path: str, **body: Any) -> tuple[int, bytes]:
        """One request to this front end."""
        with contextlib.closing(self.reach(front_end)) as client:
            answer = client.request(method, path, json=body)
        assert answer.headers["x-front-end"] == str(front_end)
        return answer.status_code, answer.content

    def told(self, front_end: int, path: str, **body: Any) -> Any:
        status, data = self.ask(front_end, "POST", path, **body)
        assert status == 200, data
        return json.loads(data)

    def stream(self, front_end: int, **body: Any) -> list[list[dict[str, Any]]]:
        """One that has begun."""
        return in_flight(self.reach(front_end), 1, **body)

    def counts(self, front_end: int) -> dict[str, float]:
        status, data = self.ask(front_end, "GET", "/metrics")
        assert status == 200
        found = re.findall(r"^(\S+?)(?:\{[^}]*\})? (\S+)$", data.decode(), re.MULTILINE)
        return {name: float(value) for name, value in found}

    def stats(self) -> dict[str, Any]:
        return self.http.get("/state").json()["stats"]


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def wait_until(holds: Callable[[], Any], timeout_s: float = 120.0) -> None:
    give_up_at = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.02)


def test_two_front_ends_are_one_server(tiny: Path, direct: LLM) -> None:
    with process(tiny, "--num-front-ends", "2", "--num-pages", "256", "--drain-timeout", "30") as (started, client):
        server = Server(started.pid, client)
        a, b = server.front_ends()
        _answers_are_the_same(server, a, b, direct)
        _names_reach_requests_elsewhere(server, a, b, direct)
        _state_holds_for_both(server, a, b)
        _one_that_dies_is_replaced(server, a, b)
        _the_end_is_of_all(server)
        assert started.wait(60) == 0
        left = server.descendants()
        assert left == []


def _answers_are_the_same(server: Server, a: int, b: int, direct: LLM) -> None:
    [expected] = direct.generate(["abc"], SamplingParams(seed=3, max_tokens=20, ignore_eos=True))
    for front_end in (a, b):
        told = server.told(front_end, PATH, prompt="abc", seed=3, max_tokens=20, ignore_eos=True)
        assert told["choices"][0]["text"] == expected.outputs[0].text
    counts = [server.counts(front_end) for front_end in (a, b)]
    assert [one[ENDED] for one in counts] == [2, 2]
    assert counts[0]["vllm:generation_tokens_total"] == counts[1]["vllm:generation_tokens_total"] == 40


def _names_reach_requests_elsewhere(server: Server, a: int, b: int, direct: LLM) -> None:
    params = SamplingParams(seed=7, max_tokens=900, ignore_eos=True)
    body = {"prompt": "abc", "seed": 7, "request_id": "x"}
    streams = server.stream(a, **body)
    for front_end in (a, b):
        shown = json.loads(server.ask(front_end, "GET", "/state/live")[1])["requests"]
        assert [one["request_id"] for one in shown if one["state"] != "ended"] == ["x"]
    status, data = server.ask(b, "POST", PATH, **ENDLESS, **body)
    assert status == 400 and "request_id='x' is live" in data.decode()
    status, data = server.ask(b, "POST", "/checkpoint", request_id="x", end=True)
    assert status == 200, data
    streams += server.stream(b, **body)  # it is free everywhere
    server.told(a, "/abort", request_ids="x")
    assert server.told(a, PATH, prompt="abc", request_id="x", max_tokens=1)["id"] == "x"
    assert ends(streams) == ["abort", "abort"]
    [whole], [expected] = direct.generate(Checkpoint.from_bytes(data)), direct.generate(["abc"], params)
    assert whole.outputs[0].token_ids == expected.outputs[0].token_ids
    streams = [*server.stream(a), *server.stream(b)]
    server.told(a, "/abort")
    assert ends(streams) == ["abort", "abort"]
    status, data = server.ask(a, "POST", "/checkpoint", request_id="x")
    assert status == 400 and "not live" in data.decode()


def _state_holds_for_both(server: Server, a: int, b: int) -> None:
    server.told(a, "/pause")
    assert [server.ask(one, "GET", "/ready")[0] for one in (a, b)] == [503, 503]
    server.told(b, "/resume")
    assert [server.ask(one, "GET", "/ready")[0] for one in (a, b)] == [200, 200]


def _one_that_dies_is_replaced(server: Server, a: int, b: int) -> None:
    before = server.counts(b)[ENDED]
    server.stream(a)
    on_b = server.stream(b)
    os.kill(a, signal.SIGKILL)
    wait_until(lambda: set(server.front_ends()) - {a, b})
    (still_begins,) = set(server.front_ends()) - {a, b}
    os.kill(still_begins, signal.SIGKILL)
    assert server.told(b, PATH, prompt="abc", max_tokens=1)
    assert ends(on_b, timeout_s=120) == ["length"]
    wait_until(lambda: server.stats()["num_running"] == 0)
    wait_until(lambda: set(server.front_ends()) - {a, b, still_begins})
    (new,) = set(server.front_ends()) - {b}
    assert new != a and server.told(new, PATH, prompt="abc", max_tokens=1)
    assert server.counts(new)[ENDED] == before + 3  # what the dead one had counted is there


def _the_end_is_of_all(server: Server) -> None:
    """The engine is paused meanwhile: so streams are there to be waited for, however short they are."""
    streams = [stream for one in server.front_ends() for stream in server.stream(one, max_tokens=300)]
    server.http.post("/pause").raise_for_status()
    os.kill(server.pid, signal.SIGTERM)
    wait_until(lambda: server.http.get("/ready").json()["state"] == "draining")
    refused = server.http.post(PATH, json={"prompt": "a"})
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
    server.http.post("/resume").raise_for_status()
    assert ends(streams) == ["length", "length"]


def test_one_that_cannot_begin_ends_the_server() -> None:
    begin = Begin("nowhere", None, None, False, 0, ServeConfig())

    async def run(listening: socket.socket) -> None:
        await Supervisor(begin, 1, listening).run(lambda: None)

    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(InvalidValue, match="nowhere"):
        asyncio.run(run(listening))


class Lives:
    """Stands for `Process`: a front end that lives as long as it takes to say whether it takes requests."""

    def __init__(self, are_ready: list[bool]) -> None:
        self.left = are_ready

    def __call__(self, listening: socket.socket, folder: str) -> Process:
        one = Process.__new__(Process)
        one.end, theirs = socket.socketpair()
        theirs.close()
        one.is_ready, one.failure, one.channel = self.left.pop(0), None, None
        one.process = subprocess.Popen([sys.executable, "-I", "-S", "-c", ""])
        return one


@pytest.mark.parametrize("before", [[], [True, False, False, True]])
def test_one_that_served_may_fail_to_begin_again_but_not_for_ever(
    before: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    stillborn = [False] * (supervisor.MOST_STILLBORN if before else 1)
    lives = Lives([*before, *stillborn, False])
    monkeypatch.setattr(supervisor, "Process", lives)
    monkeypatch.setattr(supervisor, "AGAIN_S", 0.0)
    begin = Begin("nowhere", None, None, False, 0, ServeConfig())

    async def run(listening: socket.socket) -> None:
        await Supervisor(begin, 1, listening).run(lambda: None)

    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(PerdureError, match="the server ends"):
        asyncio.run(run(listening))
    assert lives.left == [False]
