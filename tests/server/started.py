"""`perdure serve` as a user starts it, a process of its own, and streams of it that go on meanwhile."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PATH = "/v1/completions"
ENDLESS = {"max_tokens": 900, "ignore_eos": True, "return_token_ids": True}


@contextmanager
def process(model: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """`perdure serve`, as a user starts it."""
    command = [sys.executable, "-m", "perdure", "serve", str(model), "--port", "0", "--open-control", *options]
    env = {**os.environ, "PYTHONPATH": "src", "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert started.stderr is not None
        line = started.stderr.readline()
        assert " at http://" in line, line + started.stderr.read()
        with httpx.Client(base_url=line.split()[-1], timeout=60) as client:
            yield started, client
    finally:
        started.kill()
        started.wait()


def in_flight(client: httpx.Client, count: int, **others: Any) -> list[list[dict[str, Any]]]:
    """So many streams that have begun, on threads; each list fills up as events come."""
    found: list[list[dict[str, Any]]] = [[] for _ in range(count)]
    refusals: list[str] = []

    def read(number: int) -> None:
        body = {**ENDLESS, "prompt": [256, number], **others, "stream": True}
        with contextlib.suppress(httpx.TransportError), client.stream("POST", PATH, json=body) as answer:
            if answer.status_code != 200:
                refusals.append(answer.read().decode())
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    found[number].append(json.loads(line.removeprefix("data: "))["choices"][0])

    threads = [threading.Thread(target=read, args=[number], daemon=True) for number in range(count)]
    for thread in threads:
        thread.start()
    while not all(found):
        assert any(thread.is_alive() for thread in threads), refusals or "a stream broke before it began"
        assert not refusals, refusals
        time.sleep(0.01)
    return found


def ends(found: list[list[dict[str, Any]]], timeout_s: float = 30) -> list[str]:
    give_up_at = time.monotonic() + timeout_s
    while any(events[-1]["finish_reason"] is None for events in found):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return [events[-1]["finish_reason"] for events in found]
