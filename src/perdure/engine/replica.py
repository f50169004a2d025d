"""`Replica`: an engine that serves a coordinator. The thread that runs it speaks with the coordinator, no other does.

- The engine's threads leave their events in a queue; all that has gathered goes out together, so a step's tokens are
  one message.
- It calls until the coordinator answers, and again when the session is over; its engine lives on meanwhile.
- It goes when the coordinator says so, when its engine is dead, or when it is told to `leave`: its requests then go on
  at other replicas.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.config import EngineConfig
from perdure.api.errors import EngineDead, InvalidValue, PerdureError, described
from perdure.api.event import Event, Failure
from perdure.coordinator import messages as m
from perdure.coordinator.parent import end_with_input, first_line, say
from perdure.coordinator.service import new_number
from perdure.coordinator.sessions import Caller, Opened
from perdure.coordinator.wire import CallingSocket, new_name, read_secret
from perdure.core.prefix_report import PrefixReport
from perdure.engine.bridge import Bridge, Condition
from perdure.engine.engine import Engine
from perdure.engine.given import TakenTensors, Taking
from perdure.engine.holdings import Holdings
from perdure.engine.scratch import remove_if_left
from perdure.models.store import Store

log = logging.getLogger("perdure")

NOBODY_THERE = "no coordinator has answered at %s so far: calling on"
FAREWELL_S = 2.0
"""How long a replica that goes waits for its last words to arrive."""


class Details(msgspec.Struct, frozen=True):
    """What clients know of the model. tokenizer: where it lies, on the replicas' machines; None = there is none."""

    vocab_size: int
    page_size: int
    tokenizer: str | None
    sampling_defaults: dict[str, Any]
    description: dict[str, Any]
    returns_prompt: bool


class EngineHost:
    """The engine as a bridge sees it, and the receiver of all its events. `events` is filled on the engine's thread."""

    def __init__(self, engine: Engine, wake: Any, folder: str | None) -> None:
        self.engine = engine
        self.wanted: deque[tuple[int, str, int]] = deque()
        """Weights to fetch: order, source, from which byte on."""
        self.events: deque[tuple[Event, float, Condition | None]] = deque()
        self.prepared: deque[tuple[int, Failure | None]] = deque()
        self.condition = Condition(*cast("tuple[m.EngineState, int, Any]", engine.condition()))
        self.source = str(engine.resolved.model_path)
        self.is_dead = False
        """Nothing more comes of the engine."""
        self._wake = wake
        self._tensors = TakenTensors(folder)
        self._taking: dict[int, Taking] = {}
        self._opened: dict[int, tuple[str, Store]] = {}
        self._sources: dict[int, str] = {}
        self._opener = ThreadPoolExecutor(1, "perdure-weights")
        """Files of weights are read here: it may take long, and the coordinator wants to hear our pulse."""

    # Receiver

    def deliver(self, event: Event, time: float) -> None:
        condition = None
        if isinstance(event, ev.Done):
            condition = self.condition = Condition(*cast("tuple[m.EngineState, int, Any]", self.engine.condition()))
            source = self._sources.pop(event.ticket, None)
            if source is not None and event.failure is None:
                before, self.source = self.source, source
                if before != source:
                    self._tensors.drop(before)
        self.events.append((event, time, condition))
        if len(self.events) == 1:
            self._wake()

    def fail(self, error: PerdureError) -> None:
        self.is_dead = True
        self._wake()

    # Host

    def ticket(self) -> int:
        return self.engine.ticket()

    def send(self, command: cmd.Command) -> None:
        try:
            if isinstance(command, cmd.Submit):
                self.engine.submit([(command, self)])
            elif isinstance(command, cmd.Abort):
                self.engine.send(command)
            else:
                assert isinstance(command, cmd.TakeCheckpoint | cmd.UnpinPrefix)
                self.engine.inquire(command, self)
        except EngineDead:
            self.is_dead = True
        except PerdureError as error:
            assert isinstance(command, cmd.Submit)
            request = command.request
            self.events.append((ev.Refused(request.ticket, request.request_id, Failure.of(error)), 0.0, None))

    def prepare(self, ask: int, order: m.Asked, source: str | None) -> None:
        if not (isinstance(order, cmd.UpdateWeights) and order.has_weights):
            self.prepared.append((ask, None))
        elif source is None or not source.startswith(m.OF_TENSORS):
            self._opener.submit(self._open, ask, source, source)
        elif (directory := self._tensors.find(source)) is not None:
            self._opener.submit(self._open, ask, source, directory)
        else:
            self._taking[ask] = self._tensors.begin(source)
            self.wanted.append((ask, source, 0))

    def take_piece(self, ask: int, first: int, total: int, data: bytes) -> None:
        taking = self._taking[ask]
        assert first == taking.num_bytes
        taking.take(data)
        if taking.num_bytes < total and data:
            self.wanted.append((ask, taking.source, taking.num_bytes))
        else:
            self._opener.submit(self._open, ask, taking.source, self._taking.pop(ask).finish())

    def piece(self, source: str, first: int) -> tuple[bytes, int] | None:
        return self._tensors.given(source, first)

    def _open(self, ask: int, source: str | None, path: str | Path | None) -> None:
        failure = None
        try:
            if source is None or path is None:
                raise InvalidValue("weights=None: replicas load weights from a directory or a GGUF file")
            self._opened[ask] = source, self.engine.resolved.loaded.weights.open(path)
        except PerdureError as error:
            failure = Failure.of(error)
        except Exception as error:
            failure = Failure.of(InvalidValue(f"weights={source!r}: {described(error)}"))
        self.prepared.append((ask, failure))
        self._wake()

    def apply(self, ask: int, order: m.Asked) -> None:
        if isinstance(order, cmd.UpdateWeights) and order.has_weights:
            source, weights = self._opened.pop(ask)
            self._sources[order.ticket] = source
            self.engine.load(order, weights, self)
        else:
            self.engine.inquire(order, self)

    def forget(self, ask: int) -> None:
        opened = self._opened.pop(ask, None)
        if opened is not None and opened[0] != self.source:
            self._tensors.drop(opened[0])
        if (taking := self._taking.pop(ask, None)) is not None:
            taking.drop()

    def hold(self, holds: bool) -> None:
        self.engine.hold(holds)

    def close(self) -> None:
        self._opener.shutdown(cancel_futures=True)
        self._tensors.close()


class Replica:
    """endpoint: the coordinator's. Loads the model at once; `run` serves until it is told to go. folder: for weights
    that come as tensors, None = one of its own."""

    def __init__(
        self, config: EngineConfig, endpoint: str, secret: str | None = None, folder: str | None = None
    ) -> None:
        self._endpoint = endpoint
        self._socket = CallingSocket(endpoint, secret)
        self._config = config
        report = PrefixReport()
        try:
            self.engine = Engine(replace(config, data_parallel_size=1), report)
        except BaseException:
            self._socket.close()
            raise
        self._holdings = Holdings(report.changes)
        self._host = EngineHost(self.engine, self._socket.waker.wake, folder)
        self._bridge = Bridge(self._host)
        self._name = new_name("replica")
        self._caller = Caller(new_number, self._hello, time.monotonic())
        self._is_leaving = False

    def _hello(self) -> m.Hello | None:
        if not self._bridge.is_settled:
            return None
        state, epoch, fingerprint = self._host.condition
        resolved = self.engine.resolved
        core = resolved.core
        kind = (
            f"{resolved.loaded.config.architecture}, {core.vocab_size} ids, max_model_len={core.max_model_len}, "
            f"page_size={core.page_size}, pool of {core.max_num_tokens} tokens a request"
        )
        tokenizer = (
            None if self.engine.tokenizer is None else (self._config.tokenizer or str(resolved.loaded.tokenizer_source))
        )
        details = Details(
            core.vocab_size,
            core.page_size,
            tokenizer,
            self.engine.sampling_defaults,
            self.engine.describe(),
            self.engine.returns_prompt,
        )
        about = m.About(
            self._config.replica, kind, fingerprint, state, epoch, self._host.source, msgspec.msgpack.encode(details)
        )
        return m.Hello(m.VERSION, self._name, about)

    def leave(self) -> None:
        """From any thread, or a signal's handler: go, and let what is here go on elsewhere."""
        self._is_leaving = True
        self._socket.waker.wake()

    def run(self) -> None:
        """Raises `InvalidValue` if the coordinator does not want it, and `EngineDead` once its engine is."""
        caller = self._caller
        try:
            with self._socket:
                while not (self._bridge.is_stopped or self._is_leaving or self._host.is_dead):
                    self._turn()
                    if (refused := caller.refused or self._socket.refusal) is not None:
                        raise InvalidValue(f"the coordinator refuses this replica: {refused}")
                if caller.link is not None and not self._bridge.is_stopped:
                    caller.send(m.Leave())
                give_up_at = time.monotonic() + FAREWELL_S
                while caller.link is not None and not caller.link.is_flushed and time.monotonic() < give_up_at:
                    self._turn()
        finally:
            self.engine.close()
            self._host.close()
        if self._host.is_dead and not self._bridge.is_stopped:
            raise EngineDead("the replica's engine is dead")

    def _turn(self) -> None:
        socket, caller, bridge, host = self._socket, self._caller, self._bridge, self._host
        socket.wait(caller.due(time.monotonic()) - time.monotonic())
        now = time.monotonic()
        if caller.is_unheard(now):
            log.warning(NOBODY_THERE, self._endpoint)
        for frames in socket.received():
            for happening in caller.take(frames, now):
                bridge.happened(happening)
                if isinstance(happening, Opened):
                    self._holdings.begin()
        while host.wanted:
            bridge.fetch(*host.wanted.popleft())
        while host.prepared:
            bridge.prepared(*host.prepared.popleft())
        while host.events:
            bridge.told(*host.events.popleft())
        for message, own in bridge.flush():
            if caller.link is not None:
                caller.send(message, own)
        if caller.link is not None:
            for held in self._holdings.messages(now):
                caller.send(held)
            caller.link.pulse = m.Beat(self.engine.num_steps, bridge.has_work and not self.engine.is_waiting)
        for packet in caller.packets(now):
            socket.send(packet)


def serve(endpoint: str, secret_file: str | None, config: EngineConfig, say: Callable[[str], None]) -> None:
    """A replica as a program of its own: until the coordinator stops everything, or SIGTERM: what it has then goes on
    elsewhere. say: told once the model is loaded. Raises `InvalidValue`, `ModelLoadError`, `EngineDead`."""
    replica = Replica(config, endpoint, read_secret(secret_file))
    signal.signal(signal.SIGTERM, lambda number, frame: replica.leave())
    say(f"replica {config.replica} calls {endpoint}")
    try:
        replica.run()
    except KeyboardInterrupt:
        replica.leave()
        raise


class Settings(msgspec.Struct, frozen=True):
    """What a process of its own is told. num_threads: None = as its environment says. folder: for weights that come as
    tensors."""

    config: EngineConfig
    endpoint: str
    secret: str | None = None
    num_threads: int | None = None
    folder: str | None = None


def main() -> int:
    """A replica that goes with the process that started it."""
    settings = msgspec.json.decode(first_line(), type=Settings)
    try:
        replica = Replica(settings.config, settings.endpoint, settings.secret, settings.folder)
    except PerdureError as error:
        say(msgspec.json.encode(Failure.of(error)).decode())
        return 2
    say("")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # who read that line reads no more
    end_with_input(replica.leave)
    try:
        replica.run()
    except PerdureError as error:
        log.error("replica %d: %s", settings.config.replica, error)
        return 1
    finally:
        if settings.folder is not None:
            remove_if_left(Path(settings.folder))
    return 0


if __name__ == "__main__":
    code = main()
    os._exit(code)  # nothing is left to be done, and libraries take their time to unload
