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
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from tests.server.load_clients import MAX_BODY_BYTES, Clients, Report, what_is_asked


@contextmanager
def served(model: str | None, *options: str) -> Iterator[tuple[subprocess.Popen[bytes], str, Callable[[], str]]]:
    """`perdure serve` as a process, where, and what it says."""
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
            yield server, found[1], told
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


def _num_replicas(url: str) -> int:
    config = httpx.get(f"{url}/server_info", timeout=60).json()["vllm_config"]
    return int(config["parallel_config"]["data_parallel_size"])


def settled(url: str, timeout_s: float = 240.0) -> dict[str, Any]:
    """The counts when nothing is inside any more and both replicas serve."""
    give_up_at = time.monotonic() + timeout_s
    while True:
        state = httpx.get(f"{url}/state", timeout=60).json()["stats"]
        inside = state["num_running"] + state["num_waiting"] + state["num_paused"]
        both = _num_replicas(url) == 2
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
    with served(model, *options) as (server, url, told):

        async def run() -> None:
            watching = asyncio.create_task(watch(server.pid, report, kills_at, draw))
            begun = time.monotonic()
            await Clients(url, asked, report, seed).run(count, seconds)
            report.elapsed_s = time.monotonic() - begun
            report.said = told().splitlines()[-20:]
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
