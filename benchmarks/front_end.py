"""What a streamed chunk costs a front end: CPU time of its process, all threads included, as the kernel counts it.

python benchmarks/front_end.py [--streams 32] [--tokens 64] [--requests 128] [--interval-ms 20]

The engine is elsewhere and costs nothing: a coordinator in a process of its own, and so a replica that gives every
request a token each interval (0 = at once). `perdure serve --connect` is the front end. Its clients are here: each
reads one stream after another from a connection of its own.

A microsecond is worth more on one machine than on another, and on a shared one from minute to minute. So a server that
streams and does nothing else is measured just before it, whose chunks are what uvicorn and starlette take.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from benchmarks.coordinator_load import CONTEXT, Coordinator, Replica, cpu_s_of

from perdure.api.fingerprint import Fingerprint
from perdure.coordinator import messages as m
from perdure.engine.replica import Details
from perdure.models.tiny import make_tiny_llama

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
ROOT = Path(__file__).parents[1]
LETTERS = [70, 75, 68, 77, 80, 83, 79, 69]
"""Ids of the tiny model's letters, so that each token is text."""


class Speaker(Replica):
    """A replica that says a letter a request each interval. model: whose tokenizer it has."""

    def __init__(self, endpoint: str, model: str, num_tokens: int, interval_s: float) -> None:
        details = Details(512, 16, model, {}, {"model": model, "max_model_len": 4096}, False)
        about = m.About(0, "kind", Fingerprint(), "running", 0, model, msgspec.msgpack.encode(details))
        self._interval_s = interval_s
        self._due = 0.0
        super().__init__(endpoint, num_tokens, 1, about)

    def _wait_s(self) -> float:
        return max(0.0, self._due - time.monotonic()) if self._going else 1.0

    def _tokens(self, number: int) -> list[int]:
        return [LETTERS[(number + self._going[number]) % len(LETTERS)]]

    def _step(self) -> None:
        if time.monotonic() >= self._due:
            self._due = time.monotonic() + self._interval_s
            super()._step()


def _speak(endpoint: str, model: str, num_tokens: int, interval_s: float) -> None:
    Speaker(endpoint, model, num_tokens, interval_s).run()


class Server:
    """A process that says on its standard error at which port it serves."""

    def __init__(self, *command: str) -> None:
        paths = [str(ROOT / "src"), str(ROOT)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen([sys.executable, "-m", *command], env=env, stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert " at http://" in line, line + self.process.stderr.read()
        self.port = int(line.rsplit(":", 1)[1])

    @property
    def cpu_s(self) -> float:
        return cpu_s_of(self.process.pid)

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


@contextmanager
def plain_server(num_tokens: int, interval_s: float) -> Iterator[Server]:
    """What streams as many chunks, and does nothing else."""
    told = ("--tokens", str(num_tokens), "--interval-ms", str(1e3 * interval_s))
    server = Server("benchmarks.peers.plain_stream", *told)
    try:
        yield server
    finally:
        server.end()


class Reader(threading.Thread):
    """Reads streams one after another. num_chunks: events that it got, the last line of each not counted."""

    def __init__(self, port: int, path: str, body: bytes, num_requests: int) -> None:
        super().__init__(daemon=True)
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        self._request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        self._port = port
        self._num_requests = num_requests
        self.num_chunks = 0

    def run(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port)) as connection:
            for _ in range(self._num_requests):
                connection.sendall(self._request)
                end = b""
                while not end.endswith(b"0\r\n\r\n"):
                    data = connection.recv(65536)
                    assert data, end
                    self.num_chunks += data.count(b"data: {")
                    end = (end + data)[-200:]
                assert b"[DONE]" in end, end


@contextmanager
def front_end(num_tokens: int, interval_s: float, model: str | None = None) -> Iterator[Server]:
    """A server whose engine gives every request so many tokens. model: whose tokenizer it has; None = a tiny one."""
    with tempfile.TemporaryDirectory() as folder:
        model = model or str(make_tiny_llama(Path(folder) / "model", seed=0))
        coordinator = Coordinator(f"ipc://{folder}/c")
        replica = CONTEXT.Process(
            target=_speak, args=(coordinator.endpoint, model, num_tokens, interval_s), daemon=True
        )
        replica.start()
        server = Server("perdure", "serve", "--connect", coordinator.endpoint, "--port", "0")
        try:
            yield server
        finally:
            server.end()
            replica.kill()
            replica.join()
            coordinator.end()


def measure(server: Server, path: str, streams: int, num_requests: int) -> dict[str, Any]:
    """CPU of the front end for so many requests, divided by the chunks that its clients got."""
    _read(server.port, path, streams, streams)
    before = server.cpu_s
    num_chunks = _read(server.port, path, streams, num_requests)
    cpu_s = server.cpu_s - before
    assert num_chunks >= num_requests, num_chunks
    return {"us_a_chunk": 1e6 * cpu_s / num_chunks, "chunks": num_chunks, "cpu_s": cpu_s}


def measure_beside(server: Server, plain: Server, streams: int, num_requests: int) -> dict[str, dict[str, Any]]:
    """The same by path, with what the plain server's cost just before; times_plain: divided by that."""
    plain_us = measure(plain, COMPLETIONS, streams, num_requests)["us_a_chunk"]
    found = {path: measure(server, path, streams, num_requests) for path in (COMPLETIONS, CHAT)}
    return {
        path: {**one, "plain_us_a_chunk": plain_us, "times_plain": one["us_a_chunk"] / plain_us}
        for path, one in found.items()
    }


def _read(port: int, path: str, streams: int, num_requests: int) -> int:
    """How many chunks came."""
    asked = {"messages": [{"role": "user", "content": "abc"}]} if path == CHAT else {"prompt": "abc"}
    body = {**asked, "stream": True, "max_tokens": 1024}
    readers = [Reader(port, path, json.dumps(body).encode(), num_requests // streams) for _ in range(streams)]
    for reader in readers:
        reader.start()
    for reader in readers:
        reader.join()
    return sum(reader.num_chunks for reader in readers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("streams", 32), ("tokens", 64), ("requests", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--interval-ms", type=float, default=20.0)
    parser.add_argument("--model", help="a directory whose tokenizer and template are taken")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    interval_s = args.interval_ms / 1e3
    with front_end(args.tokens, interval_s, args.model) as server, plain_server(args.tokens, interval_s) as plain:
        found = measure_beside(server, plain, args.streams, args.requests)
    for path, one in found.items():
        print(
            f"{path}, {args.streams} streams: {one['us_a_chunk']:.0f} us of CPU a chunk, of {one['chunks']}; "
            f"{one['times_plain']:.2f} times one of a server that only streams ({one['plain_us_a_chunk']:.0f} us)"
        )
    if args.json is not None:
        workload = {name: getattr(args, name) for name in ("streams", "requests", "tokens", "interval_ms")}
        args.json.write_text(json.dumps({"workload": workload, "cores": os.cpu_count(), **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
