"""`Engine`: a scheduler, a device and the loop's thread behind the desk where callers stand."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api.config import EngineConfig
from perdure.api.errors import EngineDead, InvalidValue, PerdureError, described
from perdure.api.event import Event, Failure
from perdure.api.fingerprint import Fingerprint
from perdure.api.output import Replicas, ReplicaStatus
from perdure.api.request import Request
from perdure.core.journal import Journal
from perdure.core.prefix_report import PrefixReport
from perdure.core.scheduler import Scheduler
from perdure.core.stopping import TextCursor
from perdure.engine.desk import Desk, Receiver, Reply, is_last
from perdure.engine.handle import Arrivals
from perdure.engine.loop import Inbox, Loop
from perdure.engine.pace import Pace
from perdure.engine.progress import Reporter
from perdure.engine.resolve import Resolved, resolve
from perdure.engine.spelling import text_cursor
from perdure.models.store import Store
from perdure.models.weight_set import Source

log = logging.getLogger("perdure")

MADE_UP = re.compile(r"request-(\d{1,18})")


class Engine(Desk):
    """Starts its thread when built, and runs until `close`. report: filled with what its prefix cache comes to hold."""

    def __init__(self, config: EngineConfig, report: PrefixReport | None = None) -> None:
        super().__init__()
        self.reporter = Reporter(config.progress)
        self.resolved: Resolved = resolve(config)
        self.tokenizer = self.resolved.tokenizer
        core = self.resolved.core
        if core.max_num_tokens < core.max_model_len:
            log.warning(
                "the KV pool holds %d tokens, fewer than max_model_len=%d: longer requests are clipped or refused",
                core.max_num_tokens,
                core.max_model_len,
            )
        journal = _open_journal(config, self.resolved)
        self._inbox = Inbox()
        device = self.resolved.device()
        scheduler = Scheduler(core, self._cursor)
        scheduler.requests.cache.index.report = report
        self._loop = Loop(
            scheduler,
            device,
            self._inbox,
            self._publish,
            steps_in_flight=config.steps_in_flight,
            journal=journal,
            check=config.check_integrity,
            audit=self._audit,
            pace=Pace(self.resolved.config.max_burst_ms or 0),
        )
        self._began_at = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="perdure-loop", daemon=True)
        self._threads = (self._thread, *device.threads)
        self._thread.start()

    def _cursor(self, request: Request) -> TextCursor:
        """Text for stop strings."""
        if self.tokenizer is None:
            raise InvalidValue(f"stop={list(request.params.stop)!r} needs text, but the model came without a tokenizer")
        return text_cursor(self.tokenizer, request.params.skip_special_tokens)

    # What it is

    @property
    def vocab_size(self) -> int:
        return self.resolved.core.vocab_size

    @property
    def returns_prompt(self) -> bool:
        return self.resolved.config.return_prompt

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return dict(self.resolved.loaded.sampling_defaults)

    def describe(self) -> dict[str, Any]:
        return self.resolved.describe()

    # Callers' threads

    def submit(self, submissions: list[tuple[cmd.Submit, Receiver]]) -> None:
        """Submit all of these with nothing in between. Raises `EngineDead`."""
        named = [(replace(one, request=self._named(one.request)), receiver) for one, receiver in submissions]
        grammars = {
            one.request.ticket: self.resolved.runner.grammars.hold(one.request.ticket, asked)
            for one, _ in submissions
            if (asked := one.request.params.structured_outputs) is not None
        }
        super().submit(named)
        for ticket, grammar in grammars.items():
            grammar.add_done_callback(partial(self._prepared, ticket))

    def _prepared(self, ticket: int, grammar: Future[Any]) -> None:
        """On whichever thread: the request's grammar is there, or cannot be."""
        if grammar.cancelled():
            return  # the engine is closed
        error = grammar.exception()
        if error is not None and not isinstance(error, PerdureError):
            error = InvalidValue(f"structured_outputs: {described(error)}")
        with contextlib.suppress(EngineDead):
            self.send(cmd.Prepared(ticket, None if error is None else Failure.of(error)))

    def _named(self, request: Request) -> Request:
        """Functions cross by name; each is held until its request ends."""
        given = request.params.logits_processors
        if all(isinstance(one, str) for one in given):
            return request
        names = self.resolved.runner.functions.hold(request.ticket, given)
        return replace(request, params=replace(request.params, logits_processors=names))

    def update_weights(
        self, source: Source | None, epoch: int | None, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy
    ) -> Future[object]:
        """Check the source whole, then send the order. Raises what is wrong with it."""
        order = self._order_to_update(source is not None, epoch, cache, in_flight)
        if source is None:
            return self._ask(order)
        reply = Reply()
        self.load(order, self.resolved.loaded.weights.open(source), reply)
        return reply.future

    def load(self, order: cmd.UpdateWeights, weights: Store, receiver: Receiver) -> None:
        """Send an order whose weights were opened, and so checked. Raises `EngineDead`."""
        staged = self.resolved.runner.staged
        staged[order.ticket] = weights
        try:
            self._send({order.ticket: receiver}, [order])
        except EngineDead:
            del staged[order.ticket]
            raise

    def replicas(self) -> Future[object]:
        now, index = time.monotonic(), self.resolved.config.replica
        with self._lock:
            if self._dead is not None:
                raise EngineDead(str(self._dead))
            count = sum(isinstance(receiver, Arrivals) for receiver in self._receivers.copy().values())
        answer: Future[object] = Future()
        answer.set_result(Replicas([ReplicaStatus(index, "serving", count, now - self._began_at)], {}))
        return answer

    def _put(self, commands: Sequence[cmd.Command]) -> None:
        self._inbox.put(*commands)

    def close(self) -> None:
        """End every request with what it has, and the threads, and give memory back. Harmless when done twice.

        On a thread of the engine's own it only asks for the end: a collector runs on any thread and may drop an engine
        there, which must not wait for itself.
        """
        self._inbox.hold(False)  # whoever held it may be gone
        with contextlib.suppress(EngineDead):
            self.ask(cmd.Stop)
        if threading.current_thread() not in self._threads:
            self._thread.join()

    # For a replica

    @property
    def num_steps(self) -> int:
        """Planned so far; from any thread."""
        loop = getattr(self, "_loop", None)  # it goes when the engine ends
        return 0 if loop is None else loop.scheduler.requests.counters.num_steps

    @property
    def is_waiting(self) -> bool:
        """Whether the loop has nothing to do, or is held; from any thread."""
        return self._inbox.is_waited_on

    def condition(self) -> tuple[str, int, Fingerprint]:
        """State, epoch of the weights and fingerprint, as of now. On the loop's thread, or before anything was sent."""
        scheduler = self._loop.scheduler
        stats = scheduler.stats()
        return stats.state, stats.weight_epoch, scheduler.requests.fingerprint

    def hold(self, holds: bool) -> None:
        """Whether the loop waits, whatever there is to do."""
        self._inbox.hold(holds)

    # The loop's thread

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            self._loop.run()
        except BaseException as error:
            log.error("the engine died", exc_info=True)
            cause = error
        reason = "the engine is closed" if cause is None else f"the engine died of {type(cause).__name__}: {cause}"
        self._die(reason)
        self._loop.close()
        # The pool goes now, the weights with the last reference to this engine: nothing refers to it in a circle.
        self.resolved.runner.release()
        del self._loop

    def _audit(self) -> None:
        """Whoever waits waits for something: a live request, a question not answered yet, or what lies in the inbox."""
        scheduler = self._loop.scheduler
        with self._lock:
            waiters = sorted(self._receivers)
            coming = [ticket for command in self._inbox.waiting for ticket in _tickets_of(command)]
        expected = sorted({*scheduler.live_tickets, *scheduler.unanswered, *coming})
        assert waiters == expected, f"tickets {waiters} wait, {expected} will be answered"

    def _publish(self, events: list[Event], time: float) -> None:
        for event in events:
            if is_last(event):
                self.resolved.runner.functions.release(event.ticket)
                self.resolved.runner.grammars.release(event.ticket)
                self.resolved.runner.staged.pop(event.ticket, None)  # of an order that was refused
            self._tell(event, time)


def _tickets_of(command: cmd.Command) -> list[int]:
    """Of whoever gets an answer to it."""
    if isinstance(command, cmd.Submit):
        return [command.request.ticket]
    return [] if isinstance(command, cmd.Abort | cmd.Prepared) else [command.ticket]


def _open_journal(config: EngineConfig, resolved: Resolved) -> Journal | None:
    if config.journal is None:
        return None
    try:
        return Journal(Path(config.journal).open("wb"), resolved.core)
    except OSError as error:
        raise InvalidValue(f"journal={config.journal!r} cannot be written: {error.strerror}") from None
