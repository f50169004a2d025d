"""`Engine`: a scheduler, a device and the loop's thread, and the post between them and the callers.

- Callers put commands into the inbox and get events by ticket: each ticket has one receiver, nobody else hears of it.
- A dead engine is sticky: every waiter and every later call gets `EngineDead` with the first cause.
- Receivers are called on the loop's thread and must only hand over.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Protocol, get_args

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.config import EngineConfig
from perdure.api.errors import EngineDead, InvalidValue, PerdureError
from perdure.api.event import Event, Failure
from perdure.api.request import Request, RequestId, checked_id
from perdure.core.journal import Journal
from perdure.core.scheduler import Scheduler
from perdure.core.stopping import TextCursor
from perdure.engine.handle import Arrivals
from perdure.engine.loop import Inbox, Loop
from perdure.engine.progress import Reporter
from perdure.engine.prompts import Prompt, ids_to_abort, name_of, salt_of, token_ids_of
from perdure.engine.resolve import Resolved, resolve
from perdure.engine.spelling import text_cursor
from perdure.models.weight_set import Source

log = logging.getLogger("perdure")

MADE_UP = re.compile(r"request-(\d{1,18})")


class Receiver(Protocol):
    """Gets the events of one ticket, on the loop's thread."""

    def deliver(self, event: Event, time: float) -> None: ...

    def fail(self, error: PerdureError) -> None:
        """No event will come any more."""


Question = (
    cmd.TakeCheckpoint | cmd.Order | cmd.ResetPrefixCache | cmd.PinPrefix | cmd.UnpinPrefix | cmd.GetStats | cmd.Stop
)
"""Commands that have an answer."""


class Reply:
    """Receiver of one control command's answer."""

    def __init__(self) -> None:
        self.future: Future[object] = Future()
        # From here on it cannot be cancelled: whoever waits may go away, the answer comes all the same.
        self.future.set_running_or_notify_cancel()

    def deliver(self, event: Event, time: float) -> None:
        match event:
            case ev.Taken(_, _, checkpoint):
                self.future.set_result(checkpoint)
            case ev.Done(_, _, failure) if failure is not None:
                self.future.set_exception(failure.to_exception())
            case ev.Done(_, value):
                self.future.set_result(value)
            case _:
                raise AssertionError(event)

    def fail(self, error: PerdureError) -> None:
        self.future.set_exception(error)


class Engine:
    """Starts its thread when built, and runs until `close`."""

    def __init__(self, config: EngineConfig) -> None:
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
        self._tickets = itertools.count(1)
        self._next_name = 0
        self._receivers: dict[int, Receiver] = {}
        self._lock = threading.Lock()
        self._dead: EngineDead | None = None
        self._inbox = Inbox()
        device = self.resolved.device()
        self._loop = Loop(
            Scheduler(core, self._cursor),
            device,
            self._inbox,
            self._publish,
            steps_in_flight=config.steps_in_flight,
            journal=journal,
            check=config.check_integrity,
            audit=self._audit,
        )
        self._thread = threading.Thread(target=self._run, name="perdure-loop", daemon=True)
        self._threads = (self._thread, *device.threads)
        self._thread.start()

    def _cursor(self, request: Request) -> TextCursor:
        """Text for stop strings."""
        if self.tokenizer is None:
            raise InvalidValue(f"stop={list(request.params.stop)!r} needs text, but the model came without a tokenizer")
        return text_cursor(self.tokenizer, request.params.skip_special_tokens)

    # Callers' threads

    def ticket(self) -> int:
        return next(self._tickets)

    def names_for(self, prompts: Sequence[Prompt], given: Sequence[RequestId | None]) -> list[RequestId]:
        """An id for each: the one given, else a checkpoint's own, else a new one, "request-" and a number above all
        that were seen: a checkpoint may bring a name that another engine made up. Raises `InvalidValue`."""
        names = [name_of(prompt, one) for prompt, one in zip(prompts, given, strict=True)]
        with self._lock:
            for name in names:
                if isinstance(name, str) and (made_up := MADE_UP.fullmatch(name)):
                    self._next_name = max(self._next_name, int(made_up[1]) + 1)
            first = self._next_name
            self._next_name += names.count(None)
        numbers = itertools.count(first)
        return [f"request-{next(numbers)}" if name is None else name for name in names]

    def submit(self, submissions: list[tuple[cmd.Submit, Receiver]]) -> None:
        """Submit all of these with nothing in between. Raises `EngineDead`."""
        named: list[cmd.Command] = [replace(one, request=self._named(one.request)) for one, _ in submissions]
        grammars = {
            one.request.ticket: self.resolved.runner.grammars.hold(one.request.ticket, asked)
            for one, _ in submissions
            if (asked := one.request.params.structured_outputs) is not None
        }
        self._send({one.request.ticket: receiver for one, receiver in submissions}, named)
        for ticket, grammar in grammars.items():
            grammar.add_done_callback(partial(self._prepared, ticket))

    def _prepared(self, ticket: int, grammar: Future[Any]) -> None:
        """On whichever thread: the request's grammar is there, or cannot be."""
        if grammar.cancelled():
            return  # the engine is closed
        error = grammar.exception()
        if error is not None and not isinstance(error, PerdureError):
            error = InvalidValue(f"structured_outputs: {type(error).__name__}: {error}")
        with contextlib.suppress(EngineDead):
            self.send(cmd.Prepared(ticket, None if error is None else Failure.of(error)))

    def _named(self, request: Request) -> Request:
        """Functions cross by name; each is held until its request ends."""
        given = request.params.logits_processors
        if all(isinstance(one, str) for one in given):
            return request
        names = self.resolved.runner.functions.hold(request.ticket, given)
        return replace(request, params=replace(request.params, logits_processors=names))

    def send(self, command: cmd.Command) -> None:
        """A command that has no answer."""
        self._send({}, [command])

    def ask(self, make: type[cmd.Reset | cmd.ResetPrefixCache | cmd.GetStats | cmd.Stop]) -> Future[object]:
        """Send a control command; the future gets its answer."""
        return self._ask(make(self.ticket()))

    def abort(self, request_ids: RequestId | Sequence[RequestId] | None) -> None:
        """End these live requests with what they have; None = all. Raises `InvalidValue` for what can be no id."""
        everything = request_ids is None
        self.send(cmd.Abort([] if request_ids is None else ids_to_abort(request_ids), everything=everything))

    def checkpoint(self, request_id: RequestId | None, end: bool, request_ticket: int | None = None) -> Future[object]:
        """A checkpoint of a live request, by its id or else by its ticket."""
        if request_ticket is None:
            checked_id(request_id)
        if not isinstance(end, bool):
            raise InvalidValue(f"end={end!r} is not a bool")
        return self._ask(cmd.TakeCheckpoint(self.ticket(), request_id, request_ticket, end))

    def pin(self, prompt: Prompt) -> tuple[int, Future[object]]:
        """Pin a prompt's full pages: the pin's name, and how many tokens it will hold. Raises `InvalidValue`."""
        token_ids, _ = token_ids_of(prompt, self.tokenizer)
        order = cmd.PinPrefix(self.ticket(), token_ids, salt_of(prompt))
        return order.ticket, self._ask(order)

    def unpin(self, pin: int) -> Future[object]:
        return self._ask(cmd.UnpinPrefix(self.ticket(), pin))

    def pause(self, mode: cmd.PauseMode) -> Future[object]:
        _check_choice("mode", mode, cmd.PauseMode)
        return self._ask(cmd.Pause(self.ticket(), mode))

    def suspend(self, kv: cmd.KVMode, weights: cmd.WeightsMode) -> Future[object]:
        _check_choice("kv", kv, cmd.KVMode)
        _check_choice("weights", weights, cmd.WeightsMode)
        return self._ask(cmd.Suspend(self.ticket(), kv, weights))

    def resume(self, tags: Sequence[cmd.Tag] | None) -> Future[object]:
        if tags is not None and (isinstance(tags, str) or not isinstance(tags, Sequence)):
            raise InvalidValue(f"tags={tags!r} is no list of names; the names are: {', '.join(get_args(cmd.Tag))}")
        for tag in tags or ():
            _check_choice("tags", tag, cmd.Tag)
        return self._ask(cmd.Resume(self.ticket(), None if tags is None else list(tags)))

    def update_weights(
        self, source: Source | None, epoch: int | None, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy
    ) -> Future[object]:
        """Check the source whole, then send the order. Raises what is wrong with it."""
        _check_choice("cache", cache, cmd.CachePolicy)
        _check_choice("in_flight", in_flight, cmd.InFlightPolicy)
        if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 2**63):
            raise InvalidValue(f"epoch={epoch!r} is no integer from 0 to {2**63 - 1}")
        order = cmd.UpdateWeights(self.ticket(), epoch, source is not None, cache, in_flight)
        if source is None:
            if epoch is None:
                raise InvalidValue("weights=None moves the epoch alone: give epoch=")
            return self._ask(order)
        staged = self.resolved.runner.staged
        staged[order.ticket] = self.resolved.loaded.weights.open(source)
        try:
            answer = self._ask(order)
        except EngineDead:
            del staged[order.ticket]
            raise
        answer.add_done_callback(lambda _: staged.pop(order.ticket, None))  # of an order that was refused
        return answer

    def _ask(self, command: Question) -> Future[object]:
        reply = Reply()
        self._send({command.ticket: reply}, [command])
        return reply.future

    def _send(self, receivers: dict[int, Receiver], commands: list[cmd.Command]) -> None:
        with self._lock:
            if self._dead is not None:
                raise EngineDead(str(self._dead))
            self._receivers.update(receivers)
            self._inbox.put(*commands)

    def close(self) -> None:
        """End every request with what it has, and the threads, and give memory back. Harmless when done twice.

        On a thread of the engine's own it only asks for the end: a collector runs on any thread and may drop an engine
        there, which must not wait for itself.
        """
        with contextlib.suppress(EngineDead):
            self.ask(cmd.Stop)
        if threading.current_thread() not in self._threads:
            self._thread.join()

    # The loop's thread

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            self._loop.run()
        except BaseException as error:
            log.error("the engine died", exc_info=True)
            cause = error
        reason = "the engine is closed" if cause is None else f"the engine died of {type(cause).__name__}: {cause}"
        with self._lock:
            self._dead = EngineDead(reason)
            left = list(self._receivers.values())
            self._receivers.clear()
        for receiver in left:
            with _logging_faults():
                receiver.fail(EngineDead(reason))
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

    def _timed(self, taken: ev.Taken, time: float) -> ev.Taken:
        """The core has no clock: a request's times are known here."""
        receiver = self._receivers[taken.request_ticket]
        assert isinstance(receiver, Arrivals)
        return replace(taken, checkpoint=replace(taken.checkpoint, timing=receiver.timing(time)))

    def _publish(self, events: list[Event], time: float) -> None:
        for event in events:
            if isinstance(event, ev.Taken):
                event = self._timed(event, time)
            last = not isinstance(event, (ev.Progress, ev.Moment))
            if isinstance(event, ev.Ended):
                last = event.num_left == 0
            receiver = self._receivers.pop(event.ticket) if last else self._receivers[event.ticket]
            if last:
                self.resolved.runner.functions.release(event.ticket)
                self.resolved.runner.grammars.release(event.ticket)
            with _logging_faults():
                receiver.deliver(event, time)


def _tickets_of(command: cmd.Command) -> list[int]:
    """Of whoever gets an answer to it."""
    if isinstance(command, cmd.Submit):
        return [command.request.ticket]
    return [] if isinstance(command, cmd.Abort | cmd.Prepared) else [command.ticket]


def _check_choice(name: str, value: object, allowed: object) -> None:
    if value not in get_args(allowed):
        raise InvalidValue(f"{name}={value!r} is none of {', '.join(get_args(allowed))}")


@contextlib.contextmanager
def _logging_faults() -> Iterator[None]:
    """What goes wrong at one receiver is nobody else's business, and not the loop's."""
    try:
        yield
    except Exception:
        log.exception("an event could not be delivered")


def _open_journal(config: EngineConfig, resolved: Resolved) -> Journal | None:
    if config.journal is None:
        return None
    try:
        return Journal(Path(config.journal).open("wb"), resolved.core)
    except OSError as error:
        raise InvalidValue(f"journal={config.journal!r} cannot be written: {error.strerror}") from None
