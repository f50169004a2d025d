"""`RemoteEngine`: the desk of a client. What computes behind it are replicas, and a coordinator is on the way.

- One thread speaks with the coordinator; callers hand over commands, and their receivers are called on that thread.
- Names are kept here: a name is free once its request has ended or its abort was sent, since all that is sent stays in
  order. Requests of other clients may have the same names.
- It waits for a coordinator that is away as long as it was told to; what is unanswered is submitted again to the next.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.errors import EngineDead, InvalidValue, PerdureError, described
from perdure.api.event import Failure
from perdure.api.request import Request, RequestId
from perdure.coordinator import messages as m
from perdure.coordinator.client import Submissions, Told
from perdure.coordinator.service import new_number
from perdure.coordinator.sessions import Arrived, Caller
from perdure.coordinator.wire import CallingSocket, new_name
from perdure.engine.desk import Desk, Receiver
from perdure.engine.given import GivenTensors
from perdure.engine.progress import Reporter
from perdure.engine.replica import NOBODY_THERE, Details
from perdure.engine.tokenizer import Tokenizer, load_tokenizer
from perdure.models.store import store_of_tensors
from perdure.models.weight_set import Source

log = logging.getLogger("perdure")

PATIENCE_S = 60.0
"""How long a client hears nothing before it gives up."""
FAREWELL_S = 2.0
"""How long a client that goes waits for the ends of its requests, unless it says otherwise."""
MOST_UNSENT = 64 * 2**20
"""Bytes on the way to the coordinator; who submits more waits."""


class RemoteEngine(Desk):
    """Raises `InvalidValue` if the coordinator does not want us, and `EngineDead` if nobody serves within
    `patience_s`. num_replicas: how many must serve before this is ready. tokenizer: another one than the replicas'.
    hopeless: done = they never will, for this reason, which is raised; later it is the end."""

    def __init__(
        self,
        endpoint: str,
        *,
        secret: str | None = None,
        tokenizer: str | None = None,
        return_prompt: bool = False,
        progress: bool = False,
        num_replicas: int = 1,
        patience_s: float = PATIENCE_S,
        hopeless: Future[PerdureError] | None = None,
    ) -> None:
        super().__init__()
        self.reporter = Reporter(progress)
        self.tokenizer: Tokenizer | None = None
        self.endpoint = endpoint
        self.coordinator = endpoint, secret
        self._patience_s = patience_s
        self._return_prompt = return_prompt
        self._socket = CallingSocket(endpoint, secret)
        name = new_name("client")
        self._caller = Caller(new_number, lambda: m.Hello(m.VERSION, name), time.monotonic())
        self._submissions = Submissions(page_size=1)
        self._commands: deque[tuple[cmd.Command, str | None]] = deque()
        self._sources: dict[int, str] = {}
        self._given: dict[str, GivenTensors] = {}
        """Weights of orders that are not answered, by their sources."""
        self._names: dict[RequestId, int] = {}
        self._details: Details | None = None
        self._num_serving = 0
        self._wanted = num_replicas
        self._changed = threading.Condition(self._lock)
        self._is_closing = self._is_closed = False
        self._hopeless = Future() if hopeless is None else hopeless
        self._thread = threading.Thread(target=self._run, name="perdure-client", daemon=True)
        self._thread.start()
        self._hopeless.add_done_callback(lambda told: self._socket.waker.wake())
        self._wait_until_ready(tokenizer)

    def _wait_until_ready(self, tokenizer: str | None) -> None:
        with self._changed:
            self._changed.wait_for(
                lambda: self._dead is not None or (self._details is not None and self._num_serving >= self._wanted),
                self._patience_s,
            )
            details, dead = self._details, self._dead
        refused = self._refused
        if details is None or dead is not None or self._num_serving < self._wanted:
            self.close()
            if self._hopeless.done():
                raise self._hopeless.result()
            if refused is not None:
                raise InvalidValue(f"endpoint={self.endpoint!r}: the coordinator refuses this client: {refused}")
            found = "no coordinator has answered"
            if self._caller.was_heard:
                found = f"{self._num_serving} of {self._wanted} replicas serve, says the coordinator"
            raise EngineDead(f"endpoint={self.endpoint!r}: after {self._patience_s:g} s {found}")
        path = tokenizer or details.tokenizer
        if path is not None and (tokenizer is not None or Path(path).exists()):
            self.tokenizer = load_tokenizer(path)  # that of another machine is not here: then ids only

    # What it is

    @property
    def vocab_size(self) -> int:
        return self._known.vocab_size

    @property
    def returns_prompt(self) -> bool:
        return self._return_prompt or self._known.returns_prompt

    @property
    def sampling_defaults(self) -> dict[str, Any]:
        return self._known.sampling_defaults

    def describe(self) -> dict[str, Any]:
        return {**self._known.description, "coordinator": self.endpoint, "replicas": self._num_serving}

    @property
    def _known(self) -> Details:
        assert self._details is not None
        return self._details

    # Callers' threads

    def submit(self, submissions: list[tuple[cmd.Submit, Receiver]]) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._dead is not None or self._num_unsent < MOST_UNSENT)
        super().submit(submissions)

    @property
    def _num_unsent(self) -> int:
        return 0 if self._caller.link is None else self._caller.link.num_bytes

    def update_weights(
        self, source: Source | None, epoch: int | None, cache: cmd.CachePolicy, in_flight: cmd.InFlightPolicy
    ) -> Future[object]:
        """A path is one on the replicas' machines. Tensors go there from here: they must stay as they are until the
        order is answered."""
        order = self._order_to_update(source is not None, epoch, cache, in_flight)
        if source is None:
            return self._ask(order)
        if isinstance(source, str | Path):
            self._sources[order.ticket] = str(source)
            return self._ask(order)
        given = GivenTensors(store_of_tensors(source.items() if isinstance(source, Mapping) else source))
        name = f"{m.OF_TENSORS}{new_name('set')}"
        self._sources[order.ticket], self._given[name] = name, given
        future = self._ask(order)
        future.add_done_callback(lambda answered: self._given.pop(name))
        return future

    def replicas(self) -> Future[object]:
        return self._ask(cmd.GetReplicas(self.ticket()))

    def _put(self, commands: Sequence[cmd.Command]) -> None:
        for command in commands:
            source = None if isinstance(command, cmd.Submit | cmd.Abort) else self._sources.pop(_ticket(command), None)
            self._commands.append((command, source))
        self._socket.waker.wake()

    def close(self, farewell_s: float = FAREWELL_S) -> None:
        """Requests of this client end with what they have; the replicas go on serving others. farewell_s: how long that
        may take."""
        self._is_closing = True
        if threading.current_thread() is not self._thread and self._details is not None:
            with contextlib.suppress(EngineDead):
                self.send(cmd.Abort(everything=True))
            with self._changed:
                self._changed.wait_for(lambda: self._dead is not None or not self._receivers, farewell_s)
        self._is_closed = True
        self._socket.waker.wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # The client's thread

    @property
    def _refused(self) -> str | None:
        """Why the coordinator does not want us."""
        return self._caller.refused or self._socket.refusal

    def _run(self) -> None:
        reason = "the client is closed"
        try:
            with self._socket:
                while not self._is_closed and self._refused is None:
                    if self._hopeless.done():
                        reason = str(self._hopeless.result())
                        break
                    self._turn()
                    if time.monotonic() - self._caller.heard_at > self._patience_s:
                        reason = f"no word from the coordinator at {self.endpoint} for {self._patience_s:g} s"
                        break
                self._say_farewell()
        except BaseException as error:
            reason = f"the client died of {described(error)}"
            raise
        finally:
            self._die(reason)
            with self._changed:
                self._changed.notify_all()

    def _say_farewell(self) -> None:
        """Whoever is still waiting hears of it from `_die`; the coordinator does not wait for our silence."""
        if self._caller.link is not None:
            self._caller.send(m.Abort([], everything=True))
            for packet in self._caller.packets(time.monotonic()):
                self._socket.send(packet)

    def _turn(self) -> None:
        socket, caller, submissions = self._socket, self._caller, self._submissions
        socket.wait(caller.due(time.monotonic()) - time.monotonic())
        now = time.monotonic()
        if caller.is_unheard(now):
            log.warning(NOBODY_THERE, self.endpoint)
        for frames in socket.received():
            for happening in caller.take(frames, now):
                match happening:
                    case Arrived(_, m.Welcome() as welcome, own):
                        self._welcomed(welcome, own)
                    case Arrived(_, m.Fetch() as fetch, _):
                        self._give(fetch)
                    case _:
                        self._deliver(submissions.happened(happening, now), now)
        while self._commands:
            command, source = self._commands.popleft()
            self._deliver(self._send_on(command, source), now)
        if caller.link is not None:
            for message, own in submissions.outgoing:
                caller.send(message, own)
            submissions.outgoing.clear()
        was_full = self._num_unsent >= MOST_UNSENT
        for packet in caller.packets(now):
            socket.send(packet)
        if was_full:
            with self._changed:
                self._changed.notify_all()

    def _welcomed(self, welcome: m.Welcome, frames: Sequence[bytes]) -> None:
        with self._changed:
            if self._details is None:
                self._details = msgspec.msgpack.decode(frames[0], type=Details)
                self._submissions.page_size = self._details.page_size
            self._num_serving = welcome.num_replicas
            self._changed.notify_all()

    def _give(self, fetch: m.Fetch) -> None:
        """A replica asks for weights. Those of an order that was answered need not come any more."""
        given = self._given.get(fetch.source)
        if given is None:
            gone = Failure("StateError", "the weights are not here any more: give them again")
            self._caller.send(m.Piece(fetch.ask, fetch.first, failure=gone))
        else:
            self._caller.send(m.Piece(fetch.ask, fetch.first, given.num_bytes), [given.piece(fetch.first)])

    def _send_on(self, command: cmd.Command, source: str | None) -> list[Told]:
        """Names become tickets here."""
        match command:
            case cmd.Submit(request):
                if (why := self._refusal(request)) is not None:
                    failure = Failure.of(InvalidValue(why))
                    return [Told(ev.Refused(request.ticket, request.request_id, failure), 0.0)]
                self._names[request.request_id] = request.ticket
            case cmd.Abort(names, tickets, everything):
                tickets = [*tickets, *(self._names[name] for name in names if name in self._names)]
                ended = list(self._names.items()) if everything else [i for i in self._names.items() if i[1] in tickets]
                for name, _ in ended:  # it is free: whatever is submitted from now on comes after this abort
                    del self._names[name]
                command = replace(command, request_ids=[], tickets=tickets)
            case cmd.TakeCheckpoint(ticket, name, request_ticket) if request_ticket is None:
                if name is None or name not in self._names:
                    failure = Failure.of(InvalidValue(f"request_id={name!r} is not live: it has ended, or never began"))
                    return [Told(ev.Done(ticket, failure=failure), 0.0)]
                command = replace(command, request_id=None, request_ticket=self._names[name])
        return self._submissions.send(command, source)

    def _refusal(self, request: Request) -> str | None:
        """Why it goes nowhere."""
        if request.request_id in self._names:
            return f"request_id={request.request_id!r} is live: an id is free again when its request ended"
        if not all(isinstance(name, str) for name in request.params.logits_processors):
            return "logits_processors: a function of this process reaches no replica, 'module:function' does"
        return None

    def _deliver(self, told: list[Told], now: float) -> None:
        for event, happened_at in told:
            if isinstance(event, ev.Ended):
                self._free(event.record.request_id, event.ticket)
            elif isinstance(event, ev.Refused):
                self._free(event.request_id, event.ticket)
            self._tell(event, happened_at or now)
        if self._is_closing and told:
            with self._changed:
                self._changed.notify_all()

    def _free(self, name: RequestId, ticket: int) -> None:
        if self._names.get(name) == ticket:
            del self._names[name]


def _ticket(command: cmd.Command) -> int:
    assert not isinstance(command, cmd.Submit | cmd.Abort | cmd.Prepared)
    return command.ticket
