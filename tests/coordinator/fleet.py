"""A real fleet on one machine: a coordinator in a thread, replicas of the tiny model as processes, real clients.

Replicas are forked from a server process that has imported everything, so that one starts, dies and starts again in a
moment; each is a process of its own all the same, killed and stopped by signals. The coordinator is in this process, so
that a test can see what it keeps.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
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

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["perdure.engine.replica"])


def _serve(config: EngineConfig, endpoint: str) -> None:
    """A replica's process."""
    import torch

    from perdure.engine.replica import Replica

    torch.set_num_threads(1)
    Replica(config, endpoint).run()


class Fleet:
    """settings: of the engines. Ends with everything at rest, and nothing left behind."""

    def __init__(self, folder: Path, model: Path, num_replicas: int, routing: Routing, **settings: Any) -> None:
        self.routing = routing
        self.endpoint = f"ipc://{folder}/coordinator"
        self.processes: dict[int, BaseProcess] = {}
        self._settings = {"model": str(model), "page_size": 16, "num_pages": 128, "check_integrity": True, **settings}
        self._clients: list[Client | AsyncLLM] = []
        self.service: Service
        self.begin()
        for index in range(num_replicas):
            self.start(index)
        self.wait_until(lambda: self.num_serving == num_replicas, "every replica serves")

    def begin(self) -> None:
        """A new coordinator at the same place."""
        self.service = Service(self.endpoint, self.routing)
        self._thread = threading.Thread(target=self.service.run, name="coordinator")
        self._thread.start()

    def end_coordinator(self) -> None:
        """It is gone, with all it knew."""
        self.service.stop()
        self._thread.join()

    def start(self, index: int) -> None:
        config = EngineConfig.of(**self._settings, replica=index)
        process = _context.Process(target=_serve, args=(config, self.endpoint), daemon=True)
        process.start()
        self.processes[index] = process

    def kill(self, index: int) -> None:
        process = self.processes[index]
        assert process.pid is not None
        os.kill(process.pid, signal.SIGKILL)
        process.join()

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
            time.sleep(0.01)

    # The end

    def check_retired(self) -> Stats:
        """Nothing is left of any request: not at clients, not here, not at replicas. Returns the replicas' stats."""
        for client in self._clients:
            engine = client._engine
            submissions = engine._submissions  # type: ignore[attr-defined]
            assert not engine._receivers and not submissions._live and not submissions._asked and not engine._names  # type: ignore[attr-defined]
        self.wait_until(lambda: not len(self.router.entries), "no entry is left")
        asking = self.client()
        stats = asking.stats()
        orders = self.router.orders
        self.wait_until(lambda: not (orders._queue or orders._applied or orders._preparing), "no order is left")
        self.router.check_idle()
        assert stats.num_free_pages == stats.num_pages and stats.state == "running"
        assert stats.num_running == stats.num_waiting == stats.num_paused == 0
        return stats

    def stop(self) -> None:
        """Everybody is told to stop, and does."""
        last = self.client()
        began = time.monotonic()
        last._engine.ask(cmd.Stop).result(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the coordinator goes on"
        for process in self.processes.values():
            process.join(PATIENCE_S)
            assert process.exitcode is not None, "a replica goes on"
        self.seconds_to_stop = time.monotonic() - began
        for client in self._clients:
            client.shutdown()

    def abandon(self) -> None:
        """After a failed test: by force."""
        for process in self.processes.values():
            process.kill()
        self.service.stop()
        for client in self._clients:
            client.shutdown()
