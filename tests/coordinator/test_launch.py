"""`data_parallel_size`: processes that start together, are started again when they die, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest

from perdure import LLM
from perdure.coordinator import service
from perdure.coordinator.router import Routing
from perdure.engine.launch import LEAST_LIFE_S, FleetEngine, Processes
from perdure.engine.share import with_package
from tests.coordinator.fleet import PATIENCE_S
from tests.engine.helpers import check_equal, in_thread, prompt, settings, until
from tests.witness import witness

MOST_SHUTDOWN_S = 3.0
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD, signal.SIGPIPE)


def is_there(pid: int) -> bool:
    """And no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def started(tiny: Path) -> tuple[LLM, FleetEngine, Processes]:
    llm = LLM(str(tiny), data_parallel_size=2, page_size=16, num_pages=128)
    engine = llm._engine
    assert isinstance(engine, FleetEngine) and isinstance(engine.fleet, Processes)
    return llm, engine, engine.fleet


@pytest.mark.alone
def test_children_that_are_killed_are_started_again_and_none_is_left(tiny: Path, direct: LLM) -> None:
    """A replica, then the coordinator, each in mid-stream: no result is another. No signal's handler is ours. At the
    end there are requests inside, and one of the replicas hangs."""
    handlers = [signal.getsignal(one) for one in HANDLED]
    threads = set(threading.enumerate())
    llm, engine, processes = started(tiny)
    ids, params = [prompt(9, seed=seed) for seed in range(8)], settings(max_tokens=240)
    alone = direct.generate(ids, params)
    children = processes.children
    pids = [child.process.pid for child in children]

    def lose(index: int) -> None:
        until(lambda: time.monotonic() - children[index].started_at > LEAST_LIFE_S, PATIENCE_S)
        call = in_thread(lambda: llm.generate(ids, params))
        until(lambda: bool(engine._submissions._live), PATIENCE_S)
        until(lambda: any(live.admitted for live in list(engine._submissions._live.values())), PATIENCE_S)
        os.kill(children[index].process.pid, signal.SIGKILL)
        for result, truth in zip(call(), alone, strict=True):
            check_equal(result, truth)
        until(lambda: children[index].process.pid != pids[index], PATIENCE_S)
        pids.append(children[index].process.pid)
        until(lambda: llm.stats().num_pages == 2 * 128, PATIENCE_S)

    lose(1)
    lose(0)
    assert [signal.getsignal(one) for one in HANDLED] == handlers
    folder = processes.scratch.path
    assert folder.exists()
    call = in_thread(lambda: llm.generate(ids, params))
    until(lambda: len(engine._submissions._live) == len(ids), PATIENCE_S)
    os.kill(children[2].process.pid, signal.SIGSTOP)
    began = time.monotonic()
    llm.shutdown()
    seconds = time.monotonic() - began
    assert seconds < MOST_SHUTDOWN_S
    assert not [pid for pid in pids if is_there(pid)] and not folder.exists()
    assert {one.outputs[0].finish_reason for one in call()} <= {"abort", "length"}
    until(lambda: not {one.name for one in set(threading.enumerate()) - threads}, PATIENCE_S)
    witness("children-started-again", processes=len(pids), shutdown_ms=round(1000 * seconds))


PARENT = """
import sys, time
from perdure.api.config import EngineConfig
from perdure.engine.launch import Processes
fleet = Processes(EngineConfig(model=sys.argv[1], num_pages=128))
print(fleet.scratch.path, *(child.process.pid for child in fleet.children), flush=True)
time.sleep(1000)
"""


def test_no_process_outlives_the_one_that_started_it(tiny: Path) -> None:
    """However that ends."""
    with subprocess.Popen([sys.executable, "-c", PARENT, str(tiny)], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        folder, *words = parent.stdout.readline().split()
        pids = [int(word) for word in words]
        assert len(pids) == 2 and all(map(is_there, pids)) and Path(folder).exists()
        parent.kill()
    until(lambda: not any(map(is_there, pids)), PATIENCE_S)
    assert not Path(folder).exists()
    witness("parent-killed", processes=len(pids))


def test_one_whose_parent_is_gone_before_it_is_ready_goes_without_a_word(tmp_path: Path) -> None:
    settings = msgspec.json.encode(service.Settings(f"ipc://{tmp_path}/c", Routing()))
    command = [sys.executable, "-m", service.__name__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, env=with_package(os.environ), **pipes) as child:  # type: ignore[call-overload]
        child.stdout.close()
        child.stdin.write(settings + b"\n")
        child.stdin.close()
        assert child.wait(PATIENCE_S) == 0 and not child.stderr.read()
