"""`FleetEngine`: a coordinator and replicas that were started for it, and a client of theirs, as one engine.

- As processes of this machine they start together and are ready when every replica serves. One that dies is started
  again; its requests go on elsewhere meanwhile.
- They end with this process, however it ends: each watches an input whose other end is here.
- Threads and GPUs of the machine are divided among the replicas (`share`).
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Protocol

import msgspec
import torch
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api.config import EngineConfig
from perdure.api.errors import EngineDead, PerdureError
from perdure.api.event import Failure
from perdure.coordinator import service
from perdure.coordinator.router import Routing
from perdure.engine import replica
from perdure.engine.remote import RemoteEngine
from perdure.engine.scratch import Scratch
from perdure.engine.share import environments

log = logging.getLogger("perdure")

START_S = 600.0
"""A large model may take so long to load."""
STOP_S = 2.0
"""How long all of them may take to end by themselves once they were told to; then they are killed."""
LEAST_LIFE_S = 5.0
"""One that lives less than this is not started again at once."""


class Child:
    """A process started from here. It says a line when it is ready, empty unless there is something to tell."""

    def __init__(self, module: str, settings: msgspec.Struct, env: dict[str, str]) -> None:
        self._module = module
        self._env = env
        self.become(settings)
        self.start()

    def start(self) -> None:
        self.started_at = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._env,
            start_new_session=True,  # Ctrl-C is for the process that is asked, and it tells us
        )
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(self._settings)
            self.process.stdin.flush()
        except BrokenPipeError:
            log.error("%s ended before it was told what to be", self._module)

    def ready(self) -> bytes:
        """What it says when it is. Raises the error that ended it."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise EngineDead(f"{self._module} ended with code {self.process.wait()} before it was ready")
        if line.strip() and line.startswith(b"{"):
            raise msgspec.json.decode(line, type=Failure).to_exception()
        return line.strip()

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def end(self, timeout_s: float) -> None:
        """Close its input, and kill it if it takes too long."""
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(max(0.0, timeout_s))
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def start_again(self) -> None:
        """It has ended by itself."""
        self.end(0.0)
        self.start()

    def become(self, settings: msgspec.Struct) -> None:
        """What it is told when it is started again."""
        self._settings = msgspec.json.encode(settings) + b"\n"


class Children:
    """Processes that are watched by a thread, which starts dead ones again."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self._ending = threading.Event()
        self._watcher: threading.Thread | None = None

    def watch(self) -> None:
        """From now on. All are ready."""
        self._watcher = threading.Thread(target=self._watch, name="perdure-processes", daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while not self._ending.wait(0.1):
            for child in self.children:
                if not child.is_alive and time.monotonic() - child.started_at > LEAST_LIFE_S:
                    log.warning(
                        "process %d ended with code %d: started again", child.process.pid, child.process.returncode
                    )
                    child.start_again()

    def leave(self) -> None:
        """Start nothing again: from now on they are meant to end."""
        self._ending.set()
        if self._watcher is not None:
            self._watcher.join()

    def end(self, timeout_s: float = STOP_S) -> None:
        """Leave no process behind."""
        self.leave()
        give_up_at = time.monotonic() + timeout_s
        for child in self.children:
            if child.process.stdin is not None:
                child.process.stdin.close()
        for child in self.children:
            child.end(give_up_at - time.monotonic())


class Fleet(Protocol):
    """A coordinator and `data_parallel_size` replicas, which are started from here. hopeless: done = no replica will
    ever serve, for this reason."""

    endpoint: str
    secret: str | None
    hopeless: Future[PerdureError]

    def leave(self) -> None:
        """From now on all are meant to end."""

    def end(self, timeout_s: float = STOP_S) -> None:
        """Leave nothing behind."""


class Processes(Children):
    """A fleet on this machine."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__()
        env, of_replicas = environments(config, os.environ, len(os.sched_getaffinity(0)), torch.cuda.device_count())
        self.secret: str | None = None
        self.hopeless: Future[PerdureError] = Future()
        self.scratch = Scratch()
        folder = str(self.scratch.path)
        self.endpoint = f"ipc://{folder}/coordinator"
        try:
            where = service.Settings(self.endpoint, Routing.of(config))
            self.children.append(Child(service.__name__, where, env))
            for index in range(config.data_parallel_size):
                settings = replica.Settings(of_replica(config, index), self.endpoint, folder=folder)
                self.children.append(Child(replica.__name__, settings, of_replicas[index]))
            for child in self.children:
                child.ready()
        except BaseException:
            self.end()
            raise
        self.watch()

    def end(self, timeout_s: float = STOP_S) -> None:
        super().end(timeout_s)
        self.scratch.remove()


class FleetEngine(RemoteEngine):
    """A fleet as one engine, which ends it. Raises what its start raises."""

    def __init__(self, config: EngineConfig, fleet: Fleet) -> None:
        self.fleet = fleet
        try:
            super().__init__(
                fleet.endpoint,
                secret=fleet.secret,
                tokenizer=config.tokenizer,
                return_prompt=config.return_prompt,
                progress=config.progress,
                num_replicas=config.data_parallel_size,
                patience_s=START_S,
                hopeless=fleet.hopeless,
            )
        except BaseException:
            fleet.end()
            raise

    def close(self, farewell_s: float = STOP_S) -> None:
        """Every request ends with what it has, then the replicas and the coordinator."""
        give_up_at = time.monotonic() + farewell_s
        self.fleet.leave()
        if self._dead is None:
            try:
                self.ask(cmd.Stop).result(farewell_s)
            except (PerdureError, FutureTimeout) as error:
                log.warning("replicas did not stop by themselves: %s", error)
        super().close(give_up_at - time.monotonic())
        self.fleet.end(give_up_at - time.monotonic())


def of_replica(config: EngineConfig, index: int) -> EngineConfig:
    """What one of several is told to be."""
    journal = None if config.journal is None else f"{config.journal}.{index}"
    alone = replace(config, data_parallel_size=1, own_process=False, launcher="local")
    return replace(alone, replica=config.replica + index, journal=journal, progress=False)
