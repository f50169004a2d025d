"""`Bridge`: what a replica makes of the coordinator's messages, and of its engine's events. No sockets, no threads.

- A request is submitted to the engine under a ticket of the engine's own. Its events go back under the coordinator's
  number, tokens of all requests together, each with what belongs to them and was not sent yet.
- One that goes on from elsewhere is a checkpoint. Scores of what it has already are at its client's and nowhere else:
  here stand zeros in their place, and what lies before its first new position is never sent.
- When the session ends, everything of it ends here; what the engine still tells of it is nobody's. Only orders that it
  was given already take place all the same: what it is cannot be said before.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.ending import Ending, Failure
from perdure.api.errors import InvalidValue, PerdureError
from perdure.api.event import Event
from perdure.api.fingerprint import Fingerprint
from perdure.api.moment import MomentKind, RequestEvent
from perdure.api.output import Stats
from perdure.api.scores import PackedScores
from perdure.coordinator import messages as m
from perdure.coordinator.link import Frames
from perdure.coordinator.sessions import Arrived, Happening, Lost
from perdure.engine.going_on import going_on

CHANGES_OF_STATE: frozenset[MomentKind] = frozenset({"scheduled", "chunk", "paused", "resumed", "evicted", "dropped"})
_encode = msgspec.msgpack.Encoder().encode
_submit = msgspec.msgpack.Decoder(cmd.Submit).decode


class Condition(NamedTuple):
    """The engine's, at the moment it told something."""

    state: m.EngineState
    weight_epoch: int
    fingerprint: Fingerprint


class Host(Protocol):
    """The engine beneath. Events of all that is sent come back through `Bridge.told`."""

    def ticket(self) -> int: ...

    def send(self, command: cmd.Command) -> None: ...

    def prepare(self, ask: int, order: m.Asked, source: str | None) -> None:
        """Find out whether this could be done; `Bridge.prepared` is called, at once or later."""

    def apply(self, ask: int, order: m.Asked) -> None:
        """Send what was prepared, under the order's ticket. Raises what forbids it."""

    def forget(self, ask: int) -> None:
        """What was prepared will not be done."""

    def hold(self, holds: bool) -> None:
        """Whether the loop waits."""

    def take_piece(self, ask: int, first: int, total: int, data: bytes) -> None:
        """Bytes of the weights that this order brings, asked for by `Bridge.fetch`."""

    def piece(self, source: str, first: int) -> tuple[bytes, int] | None:
        """Bytes of weights for another replica, and how many there are of all; None = they are not here."""


class Here:
    """One request at this replica. number: the coordinator's. num_sent: of each sample, how many tokens the other side
    has. has_ended: whether it knows of the sample's end."""

    __slots__ = ("admitted_at", "has_ended", "has_prompt_scores", "moments", "num_sent", "number", "prompt_scores")

    def __init__(self, number: int, n: int, known: m.Known | None, has_prompt_scores: bool) -> None:
        self.number = number
        self.num_sent = [0] * n
        self.has_ended = [False] * n
        for child, sample in enumerate(known.samples if known is not None else ()):
            self.num_sent[child] = len(sample.token_ids)
            self.has_ended[child] = sample.ending is not None
        self.admitted_at: float | None = None
        self.moments: list[RequestEvent] = []
        self.prompt_scores: PackedScores | None = None
        """Waiting for the first token to travel with."""
        self.has_prompt_scores = has_prompt_scores
        """Whether the other side has them."""


class Order:
    """What was prepared, or will be. is_ready: None = not known yet."""

    def __init__(self, order: m.Asked, source: str | None) -> None:
        self.order = order
        self.source = source
        self.is_ready: bool | None = None
        self.failure: Failure | None = None
        self.is_due = False


class Bridge:
    """One for all sessions of a replica, one after another."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self.is_stopped = False
        """Told to stop, and done."""
        self._late: dict[int, cmd.Command] = {}
        """Orders of sessions that are over, by the engine's ticket, which the engine still carries out."""
        self._begin()

    def _begin(self) -> None:
        self._here: dict[int, Here] = {}
        """By the engine's ticket."""
        self._tickets: dict[int, int] = {}
        """By the coordinator's number."""
        self._asks: dict[int, tuple[int, cmd.Command]] = {}
        """Questions by the engine's ticket, under the coordinator's number."""
        self._orders: dict[int, Order] = {}
        """As they came: one is sent to the engine when all before it were."""
        self._pins: dict[int, int] = {}
        """The engine's tickets, by the coordinator's numbers."""
        self._firsts: list[tuple[m.Message, Frames]] = []
        self._eventful: dict[int, None] = {}
        """Tickets of requests to which something happened that was not told; in order."""
        self._parts = m.Parts([], [], [], [], [])
        self._part_frames: list[bytes] = []
        self._lasts: list[tuple[m.Message, Frames]] = []

    @property
    def has_work(self) -> bool:
        """Whether somebody waits for steps. Orders may take long without one."""
        return bool(self._here) and not self._asks and not self._orders

    # From the coordinator

    def happened(self, happening: Happening) -> None:
        match happening:
            case Lost():
                self.lost()
            case Arrived(_, message, frames):
                self.take(message, frames)

    def take(self, message: m.Message, frames: Frames) -> None:
        match message:
            case m.Submit(number, _, known, again):
                self._submit(number, known, again, frames)
            case m.Abort(numbers):
                tickets = [self._tickets[number] for number in numbers if number in self._tickets]
                self._host.send(cmd.Abort(tickets=tickets))
            case m.Take(ask, number, end):
                self._take_checkpoint(ask, number, end)
            case m.Prepare(ask, order, source, blocking):
                self._orders[ask] = Order(order, source)
                if blocking:
                    self._host.hold(True)
                self._host.prepare(ask, order, source)
            case m.Apply(ask):
                self._host.hold(False)
                self._orders[ask].is_due = True
                self._apply_due()
            case m.Cancel(ask):
                self._host.hold(False)
                del self._orders[ask]
                self._host.forget(ask)
            case m.Piece(ask, first, total, failure):
                self._take_piece(ask, first, total, failure, frames)
            case m.Fetch(ask, source, first):
                self._give_piece(ask, source, first)

    def fetch(self, ask: int, source: str, first: int) -> None:
        """The host lacks weights that this order brings."""
        self._lasts.append((m.Fetch(ask, source, first), ()))

    def _take_piece(self, ask: int, first: int, total: int, failure: Failure | None, frames: Frames) -> None:
        if ask not in self._orders:
            return
        if failure is not None:
            self._host.forget(ask)
            self.prepared(ask, failure)
        else:
            self._host.take_piece(ask, first, total, frames[0])

    def _give_piece(self, ask: int, source: str, first: int) -> None:
        found = self._host.piece(source, first)
        if found is None:
            lost = Failure("StateError", "the weights are not here any more: give them again")
            self._lasts.append((m.Piece(ask, first, failure=lost), ()))
        else:
            self._lasts.append((m.Piece(ask, first, found[1]), [found[0]]))

    def _submit(self, number: int, known: m.Known | None, again: bool, frames: Frames) -> None:
        ticket = self._host.ticket()
        try:
            wanted = _submit(frames[0])
            request = replace(wanted.request, request_id=number, ticket=ticket)
            past = wanted.checkpoint
            if known is not None:
                past = going_on(request, known, past)
            has_prompt_scores = past is not None and past.num_output > 0
            here = Here(number, request.params.n, known, has_prompt_scores)
        except (IndexError, msgspec.MsgspecError, InvalidValue) as error:  # one client's nonsense ends no replica
            failure = Failure.of(InvalidValue(f"what was submitted cannot be read: {error}"))
            self._lasts.append((m.Refused(number, failure), ()))
            return
        self._here[ticket] = here
        self._tickets[number] = ticket
        self._host.send(cmd.Submit(request, past, again))

    def _take_checkpoint(self, ask: int, number: int, end: bool) -> None:
        if number not in self._tickets:
            failure = Failure("InvalidValue", "the request is not live: it has ended, or never began")
            self._lasts.append((m.Taken(ask, failure), ()))
            return
        question = cmd.TakeCheckpoint(self._host.ticket(), None, self._tickets[number], end)
        self._asks[question.ticket] = (ask, question)
        self._host.send(question)

    def prepared(self, ask: int, failure: Failure | None) -> None:
        """The host knows whether what was asked could be done."""
        order = self._orders.get(ask)
        if order is None:
            return
        order.is_ready, order.failure = failure is None, failure
        self._lasts.append((m.Prepared(ask, failure), ()))
        self._apply_due()

    def _apply_due(self) -> None:
        for ask, one in list(self._orders.items()):
            if not one.is_due or one.is_ready is None:
                return
            del self._orders[ask]
            if one.failure is not None:
                self._lasts.append((m.Answer(ask, one.failure), ()))
                continue
            question = self._named(ask, replace(one.order, ticket=self._host.ticket()))
            self._asks[question.ticket] = (ask, question)
            try:
                self._host.apply(ask, question)
            except PerdureError as error:
                del self._asks[question.ticket]
                self._lasts.append((m.Answer(ask, Failure.of(error)), ()))

    def _named(self, ask: int, question: m.Asked) -> m.Asked:
        """Pins by the engine's names."""
        if isinstance(question, cmd.PinPrefix):
            self._pins[ask] = question.ticket
        elif isinstance(question, cmd.UnpinPrefix):
            return cmd.UnpinPrefix(question.ticket, self._pins.pop(question.pin, 0))
        return question

    def lost(self) -> None:
        """The session is over: nothing of it goes on here."""
        self._host.hold(False)
        for pin in self._pins.values():
            self._host.send(cmd.UnpinPrefix(self._host.ticket(), pin))
        if self._here:
            self._host.send(cmd.Abort(tickets=list(self._here)))
        for ask in self._orders:
            self._host.forget(ask)
        self._late |= {ticket: order for ticket, (_, order) in self._asks.items() if not _is_harmless(order)}
        self._begin()

    @property
    def is_settled(self) -> bool:
        """Whether what the engine is like stays so, while there is no session."""
        return not self._late

    # From the engine

    def told(self, event: Event, time: float, condition: Condition | None = None) -> None:
        """condition: with answers to orders."""
        ticket = event.ticket
        if ticket in self._late:
            self.is_stopped = self.is_stopped or isinstance(self._late.pop(ticket), cmd.Stop)
        elif ticket in self._asks:
            self._answered(*self._asks.pop(ticket), event, condition)
        elif (here := self._here.get(ticket)) is not None:
            self._happened(here, ticket, event, time)

    def _happened(self, here: Here, ticket: int, event: Event, time: float) -> None:
        match event:
            case ev.Progress(_, first, token_ids, _, epoch, child):
                fresh = max(0, here.num_sent[child] - first)
                if fresh < len(token_ids):
                    scores = None if event.scores is None else event.scores.cut(fresh, len(token_ids)).pack()
                    self._part(here, child, first + fresh, token_ids[fresh:], scores, epoch)
            case ev.Moment(_, kind, num_tokens, _, child):
                if here.admitted_at is None:
                    here.admitted_at = time
                if not here.has_ended[child]:
                    here.moments.append(RequestEvent(kind, time - here.admitted_at, num_tokens, child))
                    if kind in CHANGES_OF_STATE:
                        self._eventful[ticket] = None
            case ev.Admitted(_, seed, max_output, logprobs_mode):
                self._firsts.append((m.Admitted(here.number, seed, max_output, logprobs_mode), ()))
            case ev.PromptScored(_, prompt_scores):
                if not here.has_prompt_scores:
                    here.prompt_scores = prompt_scores.pack()
            case ev.Refused(_, _, failure):
                self._forget(ticket)
                self._lasts.append((m.Refused(here.number, failure), ()))
            case ev.Ended(_, record, num_left) if num_left:
                if not here.has_ended[record.child]:
                    self._sample_ended(here, record, num_left)
            case ev.Ended(_, record):
                self._forget(ticket)
                self._lasts.append((m.Ended(here.number, record.child), [_encode(_rest(here, record))]))

    def _sample_ended(self, here: Here, record: ev.Record, num_left: int) -> None:
        """Others are left: so the coordinator must know all of it, in case that they go on elsewhere. Its last tokens
        go with its ending: one that had them without it would draw more."""
        child = record.child
        here.has_ended[child] = True
        spans = [
            m.Span(first, record.token_ids[first:end], epoch)
            for first, end, epoch in _spans(record, here.num_sent[child])
        ]
        ending = Ending(record.finish_reason, record.stop, record.failure)
        self._lasts.append((m.Ended(here.number, child, num_left, ending, spans), [_encode(_rest(here, record))]))
        here.num_sent[child] = len(record.token_ids)

    def _tell_moments(self) -> None:
        """What no token takes along: who looks at a request sees what it does while its prompt is computed, too."""
        for ticket in self._eventful:
            here = self._here.get(ticket)
            if here is not None and here.moments:
                child = here.has_ended.index(False)
                self._add_part(here, child, here.num_sent[child], [], 0, _encode(m.Part(None, None, here.moments)))
                here.moments = []
        self._eventful.clear()

    def _part(
        self, here: Here, child: int, first: int, token_ids: list[int], scores: PackedScores | None, epoch: int
    ) -> None:
        frame = b""
        if scores is not None or here.moments or here.prompt_scores is not None:
            frame = _encode(m.Part(scores, here.prompt_scores, here.moments))
            here.has_prompt_scores = here.has_prompt_scores or here.prompt_scores is not None
            here.moments, here.prompt_scores = [], None
        self._add_part(here, child, first, token_ids, epoch, frame)
        here.num_sent[child] = first + len(token_ids)

    def _add_part(self, here: Here, child: int, first: int, token_ids: list[int], epoch: int, frame: bytes) -> None:
        parts = self._parts
        parts.numbers.append(here.number)
        parts.children.append(child)
        parts.firsts.append(first)
        parts.epochs.append(epoch)
        parts.token_ids.append(token_ids)
        self._part_frames.append(frame)

    def _forget(self, ticket: int) -> None:
        del self._tickets[self._here.pop(ticket).number]

    def _answered(self, ask: int, question: cmd.Command, event: Event, condition: Condition | None) -> None:
        match event:
            case ev.Taken(_, _, checkpoint):
                self._lasts.append((m.Taken(ask), [_encode(checkpoint)]))
            case ev.Done(_, _, failure) if isinstance(question, cmd.TakeCheckpoint):
                self._lasts.append((m.Taken(ask, failure), ()))
            case ev.Done(_, value, failure):
                assert condition is not None
                stats = value if isinstance(value, Stats) else None  # requests are named by numbers here
                state, epoch, fingerprint = condition
                self._lasts.append((m.Answer(ask, failure, stats, fingerprint, state, epoch), ()))
                self.is_stopped = self.is_stopped or isinstance(question, cmd.Stop)

    def flush(self) -> list[tuple[m.Message, Frames]]:
        """All there is to send. What came in is told before its tokens, and tokens before ends and answers."""
        self._tell_moments()
        out = self._firsts
        if self._part_frames:
            out.append((self._parts, self._part_frames))
            self._parts, self._part_frames = m.Parts([], [], [], [], []), []
        out += self._lasts
        self._firsts, self._lasts = [], []
        return out

    def check_idle(self) -> None:
        """Nothing is left of anything. Raises AssertionError."""
        assert not (self._here or self._tickets or self._asks or self._orders or self._late or self._pins)


def _is_harmless(question: cmd.Command) -> bool:
    """Whether the engine is the same after it."""
    return isinstance(question, cmd.TakeCheckpoint | cmd.GetStats | cmd.PinPrefix | cmd.UnpinPrefix)


def _spans(record: ev.Record, start: int) -> list[tuple[int, int, int]]:
    """(first, end, epoch) of the output from `start` on, by the weights it comes from."""
    if not record.weight_epochs:
        return []
    ends = [*(first for first, _ in record.weight_epochs[1:]), len(record.token_ids)]
    spans = [(max(first, start), end, epoch) for (first, epoch), end in zip(record.weight_epochs, ends, strict=True)]
    return [span for span in spans if span[0] < span[1]]


def _rest(here: Here, record: ev.Record) -> m.Rest:
    """What the other side does not have of an ended sample."""
    first, end = here.num_sent[record.child], len(record.token_ids)
    assert first <= end, f"request {here.number}: {first} tokens were sent, and {end} are its output"
    moments, here.moments = here.moments, []
    prompt_scores, here.prompt_scores = here.prompt_scores, None
    if prompt_scores is None and not here.has_prompt_scores and record.prompt_scores is not None:
        prompt_scores = record.prompt_scores.pack()
    here.has_prompt_scores = here.has_prompt_scores or prompt_scores is not None
    return m.Rest(
        ending=Ending(record.finish_reason, record.stop, record.failure),
        token_ids=record.token_ids[first:],
        scores=None if record.scores is None else record.scores.cut(first, end).pack(),
        prompt_scores=prompt_scores,
        epochs=[(begin, epoch) for begin, _, epoch in _spans(record, first)],
        moments=moments,
        arrival=record.arrival,
        seed=record.seed,
        exact=record.exact,
        num_cached_tokens=record.num_cached_tokens,
        num_pauses=record.num_pauses,
        num_evictions=record.num_evictions,
        num_checkpoints=record.num_checkpoints,
    )
