"""A real fleet on one machine: a coordinator in a thread, replicas of the tiny model as processes, real clients.

Replicas are forked from a server process that has imported everything, so that one starts, dies and starts again in a
moment; each is a process of its own all the same, killed and stopped by signals. The coordinator is in this process, so
that a test can see what it keeps. No process outlives this one, however it ends.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from perdure import AsyncLLM, Client
from perdure.api import command as cmd
from perdure.api.config import EngineConfig
from perdure.api.output import Stats
from perdure.coordinator.router import Routing
from perdure.coordinator.service import Service

PATIENCE_S = 240.0
"""On a machine that others use too."""
QUIET = Routing("load_balanced", replica_wait_s=PATIENCE_S, silence_s=60.0)
"""Where nobody hangs: however busy the machine is, only an end of a process is a loss."""
PR_SET_PDEATHSIG = 1

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.coordinator.preloaded"])


def process(work: Callable[..., None], *arguments: Any) -> BaseProcess:
    """Does this in a process of its own."""
    started = _context.Process(target=_work, args=(work, arguments), daemon=True)
    started.start()
    return started


def _work(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """It is killed when the process it was forked from is gone, even if it is stopped."""
    import torch

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    torch.set_num_threads(1)
    work(*arguments)


def _serve(config: EngineConfig, endpoint: str) -> None:
    from perdure.engine.replica import Replica

    Replica(config, endpoint).run()


class Fleet:
    """settings: of the engines. Ends with everything at rest, and nothing left behind."""

    def __init__(self, model: Path, num_replicas: int = 2, routing: Routing = QUIET, **settings: Any) -> None:
        self.routing = routing
        self._folder = tempfile.TemporaryDirectory(prefix="fleet-")
        self.endpoint = f"ipc://{self._folder.name}/c"
        self.processes: dict[int, BaseProcess] = {}
        self._settings = {"model": str(model), "page_size": 16, "num_pages": 128, "check_integrity": True, **settings}
        self._clients: list[Client | AsyncLLM] = []
        self.service: Service
        self.begin(routing)
        try:
            for index in range(num_replicas):
                self.start(index)
            self.wait_until_all_serve()
        except BaseException:
            self.abandon()
            raise

    def begin(self, routing: Routing) -> None:
        """A new coordinator at the same place."""
        self.routing = routing
        self.service = Service(self.endpoint, routing)
        self._thread = threading.Thread(target=self.service.run, name="coordinator")
        self._thread.start()

    def end_coordinator(self) -> None:
        """It is gone, with all it knew."""
        self.service.stop()
        self._thread.join()

    def start(self, index: int) -> None:
        config = EngineConfig.of(**self._settings, replica=index)
        self.processes[index] = process(_serve, config, self.endpoint)

    def kill(self, index: int) -> None:
        killed = self.processes.pop(index)
        killed.kill()
        killed.join()

    def freeze(self, index: int) -> None:
        os.kill(self.processes[index].pid or 0, signal.SIGSTOP)

    def thaw(self, index: int) -> None:
        os.kill(self.processes[index].pid or 0, signal.SIGCONT)

    def client(self) -> Client:
        client = Client(self.endpoint)
        self._clients.append(client)
        return client

    def connect(self) -> AsyncLLM:
        client = AsyncLLM.connect(self.endpoint)
        self._clients.append(client)
        return client

    # What the coordinator knows. Read from another thread: right where nothing moves, a hint elsewhere.

    @property
    def router(self) -> Any:
        return self.service.coordinator.router

    @property
    def num_serving(self) -> int:
        return len(self.router.members.serving)

    def owners(self) -> dict[int, int]:
        """How many requests each replica has, by its index."""
        return {one.index: self.router.entries.load(one.session) for one in self.router.members.serving}

    def wait_until(self, holds: Callable[[], bool], what: str) -> None:
        give_up_at = time.monotonic() + PATIENCE_S
        while not holds():
            assert time.monotonic() < give_up_at, f"not within {PATIENCE_S} s: {what}"
            time.sleep(0.005)

    def wait_until_all_serve(self) -> None:
        def holds() -> bool:
            ended = {index: one.exitcode for index, one in self.processes.items() if one.exitcode is not None}
            assert not ended, f"replicas ended by themselves, with codes {ended}"
            return self.num_serving == len(self.processes)

        self.wait_until(holds, "every replica serves")

    # The end

    def check_retired(self) -> None:
        """Nothing is left of any request: not at clients, not here, not at replicas. Its clients are gone then."""
        for client in self._clients:
            engine = client._engine
            submissions = engine._submissions  # type: ignore[attr-defined]
            assert not engine._receivers and not submissions._live and not submissions._asked and not engine._names  # type: ignore[attr-defined]
        self.wait_until(lambda: not len(self.router.entries), "no entry is left")
        self.wait_until_all_serve()
        asking = self.client()
        asking.reset_prefix_cache()
        stats = asking.stats()
        self._check_rested(stats)
        orders = self.router.orders
        self.wait_until(lambda: not (orders._queue or orders._applied or orders._preparing), "no order is left")
        self.router.check_idle()
        for client in self._clients:
            client.shutdown()
        self._clients.clear()

    def _check_rested(self, stats: Stats) -> None:
        assert stats.num_free_pages == stats.num_pages and stats.state == "running"
        assert stats.num_running == stats.num_waiting == stats.num_paused == 0

    def stop(self) -> None:
        """Everybody is told to stop, and does."""
        self.wait_until_all_serve()
        last = self.client()
        last._engine.ask(cmd.Stop).result(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the coordinator goes on"
        for one in self.processes.values():
            one.join(PATIENCE_S)
            assert one.exitcode == 0, f"a replica ended with {one.exitcode}"
        last.shutdown()
        self._folder.cleanup()

    def abandon(self) -> None:
        """After a failed test: by force."""
        for one in self.processes.values():
            one.kill()
        self.service.stop()
        for client in self._clients:
            client.shutdown()
        self._folder.cleanup()
