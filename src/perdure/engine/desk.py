"""`Desk`: where callers hand in commands and are told events, whatever computes behind it.

- Each ticket has one receiver, nobody else hears of it.
- What is dead is sticky: every waiter and every later call gets `EngineDead` with the first cause.
- Receivers are called on the thread of whatever is behind and must only hand over.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any, Protocol, get_args

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.errors import EngineDead, InvalidValue, PerdureError, shown
from perdure.api.event import Event
from perdure.api.request import RequestId, checked_id
from perdure.engine.handle import Arrivals
from perdure.engine.progress import Reporter
from perdure.engine.prompts import Prompt, PromptOrError, ids_to_abort, name_of, salt_of, token_ids_of
from perdure.engine.tokenizer import Tokenizer
from perdure.models.weight_set import Source

log = logging.getLogger("perdure")

MADE_UP = re.compile(r"request-(\d{1,18})")


class Receiver(Protocol):
    """Gets the events of one ticket, on the loop's thread."""

    def deliver(self, event: Event, time: float) -> None: ...

    def fail(self, error: PerdureError) -> None:
        """No event will come any more."""


Question = (
    cmd.TakeCheckpoint
    | cmd.Order
    | cmd.ResetPrefixCache
    | cmd.PinPrefix
    | cmd.UnpinPrefix
    | cmd.GetStats
    | cmd.GetReplicas
    | cmd.Stop
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


class Desk(ABC):
    """reporter: what is said of the work. tokenizer: None = ids only. coordinator: the endpoint and the secret of the
    one that is asked; None = nobody else is."""

    reporter: Reporter
    tokenizer: Tokenizer | None
    coordinator: tuple[str, str | None] | None = None

    def __init__(self) -> None:
        self._tickets = itertools.count(1)
        self._next_name = 0
        self._receivers: dict[int, Receiver] = {}
        self._lock = threading.Lock()
        self._dead: EngineDead | None = None

    # What it is

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """The width of the logits."""

    @property
    @abstractmethod
    def returns_prompt(self) -> bool:
        """Whether results show their prompts though nobody asked."""

    @property
    @abstractmethod
    def sampling_defaults(self) -> dict[str, Any]:
        """What the model's generation config suggests."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """The configuration as resolved, for people."""

    # Behind it

    @abstractmethod
    def _put(self, commands: Sequence[cmd.Command]) -> None:
        """Hand these over with nothing in between. Called under the desk's lock."""

    @abstractmethod
    def update_weights(
        self, source: Source | None, epoch: int | None, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy
    ) -> Future[object]:
        """Check what can be checked, then send the order. Raises what is wrong with it."""

    @abstractmethod
    def replicas(self) -> Future[object]:
        """Who computes, as `Replicas`. It does not wait for a step. Raises `EngineDead`."""

    @abstractmethod
    def close(self) -> None:
        """End every request with what it has, and give back what is held. Harmless when done twice."""

    # Callers' threads

    def ticket(self) -> int:
        return next(self._tickets)

    def names_for(self, prompts: Sequence[PromptOrError], given: Sequence[RequestId | None]) -> list[RequestId]:
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
        receivers = {one.request.ticket: receiver for one, receiver in submissions}
        self._send(receivers, [one for one, _ in submissions])

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
            raise InvalidValue(f"end={shown(end)} is not a bool")
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
            raise InvalidValue(f"tags={shown(tags)} is no list of names; the names are: {', '.join(get_args(cmd.Tag))}")
        for tag in tags or ():
            _check_choice("tags", tag, cmd.Tag)
        return self._ask(cmd.Resume(self.ticket(), None if tags is None else list(tags)))

    def _order_to_update(
        self, has_weights: bool, epoch: int | None, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy
    ) -> cmd.UpdateWeights:
        """Raises `InvalidValue`."""
        _check_choice("cache", cache, cmd.CachePolicy)
        _check_choice("in_flight", in_flight, cmd.InFlightPolicy)
        if epoch is not None and (isinstance(epoch, bool) or not isinstance(epoch, int) or not 0 <= epoch < 2**63):
            raise InvalidValue(f"epoch={shown(epoch)} is no integer from 0 to {2**63 - 1}")
        if not has_weights and epoch is None:
            raise InvalidValue("weights=None moves the epoch alone: give epoch=")
        return cmd.UpdateWeights(self.ticket(), epoch, has_weights, cache, in_flight)

    def inquire(self, question: Question, receiver: Receiver) -> None:
        """Send a control command; the receiver gets its answer. Raises `EngineDead`."""
        self._send({question.ticket: receiver}, [question])

    def _ask(self, command: Question) -> Future[object]:
        reply = Reply()
        self._send({command.ticket: reply}, [command])
        return reply.future

    def _send(self, receivers: dict[int, Receiver], commands: Sequence[cmd.Command]) -> None:
        with self._lock:
            if self._dead is not None:
                raise EngineDead(str(self._dead))
            self._receivers.update(receivers)
            self._put(commands)

    # The thread behind it

    def _tell(self, event: Event, time: float) -> None:
        """To whoever's ticket it is."""
        if isinstance(event, ev.Taken):
            event = self._timed(event, time)
        waiting = self._receivers
        receiver = waiting.pop(event.ticket) if is_last(event) else waiting[event.ticket]
        with _logging_faults():
            receiver.deliver(event, time)

    def _timed(self, taken: ev.Taken, time: float) -> ev.Taken:
        """The core has no clock: a request's times are known here."""
        receiver = self._receivers[taken.request_ticket]
        if not isinstance(receiver, Arrivals):
            return taken  # it goes to somebody who knows them
        return replace(taken, checkpoint=replace(taken.checkpoint, timing=receiver.timing(time)))

    def _die(self, reason: str) -> None:
        """Nothing comes any more, for anybody."""
        with self._lock:
            self._dead = EngineDead(reason)
            left = list(self._receivers.values())
            self._receivers.clear()
        for receiver in left:
            with _logging_faults():
                receiver.fail(EngineDead(reason))


def is_last(event: Event) -> bool:
    """Whether nothing more comes under its ticket."""
    if isinstance(event, ev.Ended):
        return event.num_left == 0
    return isinstance(event, ev.Refused | ev.Taken | ev.Done)


def _check_choice(name: str, value: object, allowed: object) -> None:
    if value not in get_args(allowed):
        raise InvalidValue(f"{name}={shown(value)} is none of {', '.join(get_args(allowed))}")


@contextlib.contextmanager
def _logging_faults() -> Iterator[None]:
    """What goes wrong at one receiver is nobody else's business, and not the loop's."""
    try:
        yield
    except Exception:
        log.exception("an event could not be delivered")
