"""Many streaming clients against `perdure serve`, some of whom go, send rubbish, too much of it, or read slowly, while
replicas are killed: every answer that is whole must be the direct engine's, to the last bit.

    python -m tests.server.load --seconds 60 --json report.json        the default model, two replicas, 200 clients

The clients are in a process of their own, so that the server's memory can be measured. What they ask is drawn from a
seed; when is not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from perdure import LLM, SamplingParams

MAX_BODY_BYTES = 50_000
MALFORMED = (
    b"",
    b"{",
    b"[]",
    b'{"prompt": "a", "top_p": 7}',
    b'{"prompt": [1, "a"]}',
    b'{"prompt": "a", "what": 1}',
    b"\xff\xfe",
    b'{"prompt": []}',
)
BEHAVIOURS = {"whole": 77, "leaves": 10, "slow": 6, "malformed": 4, "oversized": 3}
"""Of 100 requests."""


@dataclass(frozen=True)
class Asked:
    """One of the few requests that are sent again and again, and its answer."""

    body: dict[str, Any]
    text: str
    token_ids: list[int]
    logprobs: list[float] | None
    finish_reason: str


@dataclass
class Report:
    """What the clients saw. wrong: answers that differ, and what was answered in another way than it should be."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_events: int = 0
    num_tokens: int = 0
    first_token_s: list[float] = field(default_factory=list)
    num_kills: int = 0
    elapsed_s: float = 0.0
    """Until the last answer: requests that have begun are waited for."""
    rss_bytes: list[tuple[float, int]] = field(default_factory=list)
    """Seconds since the load began, and the memory of the server and its children."""

    def figures(self) -> dict[str, Any]:
        times = sorted(self.first_token_s) or [0.0]
        return {
            "until_the_last_answer_s": round(self.elapsed_s, 1),
            "requests": dict(sorted(self.counts.items())),
            "wrong": self.wrong[:20],
            "num_wrong": len(self.wrong),
            "replicas_killed": self.num_kills,
            "events": self.num_events,
            "output_tokens": self.num_tokens,
            "output_tokens_per_s": round(self.num_tokens / max(self.elapsed_s, 1e-9), 1),
            "time_to_first_token_s": {
                "median": round(statistics.median(times), 3),
                "p99": round(times[len(times) * 99 // 100], 3),
            },
            "rss_mb_of_each_minute": [round(value / 1e6, 1) for value in self.rss_of_minutes()],
        }

    def rss_of_minutes(self) -> list[float]:
        """The median of each: a replica that has just been killed counts little."""
        minutes: dict[int, list[int]] = {}
        for at, value in self.rss_bytes:
            minutes.setdefault(int(at // 60), []).append(value)
        return [statistics.median(values) for _, values in sorted(minutes.items())]


def what_is_asked(model: str | None, count: int, max_tokens: int, seed: int = 7) -> list[Asked]:
    """With the answers of an engine that is driven directly, one request at a time, without a prefix cache."""
    draw = random.Random(seed)
    found = []
    with LLM(model, enable_prefix_caching=False) as llm:
        width = min(llm.vocab_size, 20_000)
        common = [draw.randrange(width) for _ in range(24)]
        for at in range(count):
            own = [draw.randrange(width) for _ in range(draw.randrange(4, 40))]
            prompt = common + own if at % 2 else own
            settings: dict[str, Any] = {
                "max_tokens": draw.randrange(max_tokens // 2, max_tokens + 1),
                "temperature": (0.0, 0.8, 1.0)[at % 3],
                "seed": at,
                "ignore_eos": at % 4 != 0,
                "logprobs": 1 if at % 3 == 0 else None,
            }
            [result] = llm.generate([prompt], SamplingParams(**settings))
            output = result.outputs[0]
            body = {**settings, "prompt": prompt, "return_token_ids": True}
            found.append(
                Asked(
                    body,
                    output.text,
                    output.token_ids,
                    None if settings["logprobs"] is None else output.selected_logprobs,
                    str(output.finish_reason),
                )
            )
    return found


class Clients:
    """So many at once, each with one request after another until the time is over."""

    def __init__(self, url: str, asked: list[Asked], report: Report, seed: int) -> None:
        self._http = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=None))
        self._asked = asked
        self._report = report
        self._draw = random.Random(seed)

    async def run(self, count: int, seconds: float) -> None:
        until = time.monotonic() + seconds
        async with self._http:
            await asyncio.gather(*(self._client(until) for _ in range(count)))

    async def _client(self, until: float) -> None:
        while time.monotonic() < until:
            [behaviour] = self._draw.choices(list(BEHAVIOURS), list(BEHAVIOURS.values()))
            try:
                await getattr(self, f"_{behaviour}")()
            except Exception as error:
                self._report.wrong.append(f"{behaviour}: {type(error).__name__}: {error}")
            self._report.counts[behaviour] += 1

    async def _whole(self, pause_s: float = 0.0) -> None:
        asked = self._draw.choice(self._asked)
        if self._draw.random() < 0.2 and not pause_s:
            answer = await self._http.post("/v1/completions", json=asked.body)
            self._compare(asked, answer.status_code, answer.json()["choices"])
            return
        choices: list[dict[str, Any]] = []
        begun = time.monotonic()
        body = {**asked.body, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    if not choices:
                        self._report.first_token_s.append(time.monotonic() - begun)
                    choices += json.loads(line.removeprefix("data: "))["choices"]
                    self._report.num_events += 1
                    await asyncio.sleep(pause_s)
        assert line == "" or line == "data: [DONE]", line
        self._compare(asked, answer.status_code, choices)

    async def _slow(self) -> None:
        await self._whole(self._draw.uniform(0.02, 0.2))

    async def _leaves(self) -> None:
        wanted = self._draw.randrange(1, 12)
        body = {**self._draw.choice(self._asked).body, "stream": True}
        async with self._http.stream("POST", "/v1/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                wanted -= line.startswith("data: ")
                if wanted <= 0:
                    break

    async def _malformed(self) -> None:
        answer = await self._http.post("/v1/completions", content=self._draw.choice(MALFORMED))
        self._expect(answer, 400)

    async def _oversized(self) -> None:
        answer = await self._http.post("/v1/completions", json={"prompt": "a" * 2 * MAX_BODY_BYTES})
        self._expect(answer, 413)

    def _expect(self, answer: httpx.Response, status: int) -> None:
        if answer.status_code != status or set(answer.json()) != {"error"}:
            self._report.wrong.append(f"status {answer.status_code} for {status}: {answer.text[:200]}")

    def _compare(self, asked: Asked, status: int, choices: list[dict[str, Any]]) -> None:
        token_ids = [token_id for choice in choices for token_id in choice.get("token_ids", ())]
        self._report.num_tokens += len(token_ids)
        scores: list[float] | None = None
        for choice in choices:
            if choice.get("logprobs") is not None:
                scores = (scores or []) + choice["logprobs"]["token_logprobs"]
        found = Asked(
            asked.body,
            "".join(choice.get("text", "") for choice in choices),
            token_ids,
            scores,
            str(choices[-1].get("finish_reason")) if choices else "none",
        )
        if status != 200 or found != asked:
            self._report.wrong.append(f"status {status}: {found} instead of {asked}"[:1000])


@contextmanager
def served(model: str | None, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """`perdure serve` as a process, and where."""
    command = [sys.executable, "-m", "perdure", "serve", "--port", "0", "--open-control", *options]
    command += [] if model is None else ["--model", model]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile() as log, subprocess.Popen(command, stderr=log, env=env) as server:

        def told() -> str:
            return os.pread(log.fileno(), 2**20, 0).decode()

        try:
            while (found := re.search(r" at (http://\S+)\n", told())) is None:
                assert server.poll() is None, told()
                time.sleep(0.05)
            yield server, found[1]
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0, told()
        finally:
            server.kill()


def children(pid: int) -> dict[int, str]:
    """Processes that this one started, and theirs, with their commands."""
    found: dict[int, str] = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError, ValueError):
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == pid or parent in found:
                found[int(path.name)] = (path / "cmdline").read_text().replace("\0", " ")
    return found


def rss_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    return 0


async def watch(pid: int, report: Report, kills_at: list[float], draw: random.Random) -> None:
    """Measures memory, and kills a replica at each of these times. Ends when it is cancelled."""
    begun = time.monotonic()
    while True:
        await asyncio.sleep(0.5)
        at, found = time.monotonic() - begun, children(pid)
        report.rss_bytes.append((at, rss_bytes(pid) + sum(map(rss_bytes, found))))
        replicas = [child for child, command in found.items() if "perdure.engine.replica" in command]
        if kills_at and at >= kills_at[0] and len(replicas) > 1:
            del kills_at[0]
            with contextlib.suppress(ProcessLookupError):
                os.kill(draw.choice(replicas), signal.SIGKILL)
                report.num_kills += 1


def settled(url: str, timeout_s: float = 240.0) -> dict[str, Any]:
    """The counts when nothing is inside any more and both replicas serve."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        state = httpx.get(f"{url}/state", timeout=60).json()["stats"]
        inside = state["num_running"] + state["num_waiting"] + state["num_paused"]
        both = httpx.get(f"{url}/get_world_size", timeout=60).json()["world_size"] == 2
        if inside == 0 and both and state["num_free_pages"] == state["num_pages"]:
            return dict(state)
        assert time.monotonic() < give_up_at, state
        time.sleep(0.1)


def load(
    model: str | None, seconds: float, count: int, max_tokens: int, seed: int = 0, *options: str
) -> tuple[Report, dict[str, Any]]:
    """The report, and the server's counts at rest. A replica is killed in the middle of each minute, or of the time."""
    asked, report, draw = what_is_asked(model, 16, max_tokens), Report(), random.Random(seed)
    step = min(60.0, seconds)
    kills_at = [step / 2 + step * at for at in range(round(seconds / step))]
    options = ("--data-parallel-size", "2", "--max-body-bytes", str(MAX_BODY_BYTES), *options)
    with served(model, *options) as (server, url):

        async def run() -> None:
            watching = asyncio.create_task(watch(server.pid, report, kills_at, draw))
            begun = time.monotonic()
            await Clients(url, asked, report, seed).run(count, seconds)
            report.elapsed_s = time.monotonic() - begun
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching

        asyncio.run(run())
        assert httpx.get(f"{url}/health", timeout=60).status_code == 200
        return report, settled(url)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="without it, the default model")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--max-tokens", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    begun = time.monotonic()
    report, state = load(given.model, given.seconds, given.clients, given.max_tokens, given.seed)
    lines = {
        "seconds": given.seconds,
        "model": given.model or "SmolLM2-135M-Instruct",
        "clients": given.clients,
        "cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        "with_start_s": round(time.monotonic() - begun, 1),
        **report.figures(),
        "leaked_pages": state["num_pages"] - state["num_free_pages"],
    }
    print(json.dumps(lines, indent=1))
    if given.json is not None:
        given.json.write_text(json.dumps(lines, indent=1) + "\n")
    sys.exit(bool(report.wrong))


if __name__ == "__main__":
    main()
