"""`Submissions`: a client's side of its requests, without sockets or threads. It speaks the engine's commands and
events.

- What comes of a request is collected here, tokens and scores: the coordinator keeps no scores, so that a replica that
  goes on with a request sends only what comes after, and a record is made whole at its end.
- When the session with the coordinator ends, everything unanswered is submitted again in the next one, from where it
  stands. Questions are not: whether an order took place is not known. Pins are asked for again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.ending import Ending, Failure
from perdure.api.errors import StateError
from perdure.api.event import Event
from perdure.api.moment import RequestEvent
from perdure.api.output import Replicas, Stats
from perdure.api.request import Request
from perdure.api.scores import PackedScores, TokenScores
from perdure.coordinator import messages as m
from perdure.coordinator.affinity import page_keys
from perdure.coordinator.link import Frames
from perdure.coordinator.sessions import Arrived, Happening, Lost, Opened

_encode = msgspec.msgpack.Encoder().encode
_part = msgspec.msgpack.Decoder(m.Part).decode
_rest = msgspec.msgpack.Decoder(m.Rest).decode
_checkpoint = msgspec.msgpack.Decoder(Checkpoint).decode


class Told(NamedTuple):
    """An event, and when it happened."""

    event: Event
    time: float


class LiveSample:
    """One output so far, with its scores. record: once it has ended."""

    __slots__ = ("epochs", "exact", "record", "scores", "token_ids")

    def __init__(self, request: Request) -> None:
        listed = request.params.logprob_token_ids
        self.token_ids: list[int] = []
        self.scores = TokenScores(listed_ids=listed) if request.params.asks_scores else None
        self.epochs: list[tuple[int, int]] = []
        self.exact = True
        self.record: ev.Record | None = None

    def grow(self, token_ids: list[int], epochs: Sequence[tuple[int, int]], scores: PackedScores | None) -> None:
        self.token_ids += token_ids
        for first, epoch in epochs:
            if not self.epochs or self.epochs[-1][1] != epoch:
                self.epochs.append((first, epoch))
        if scores is not None:
            assert self.scores is not None
            self.scores.extend(TokenScores.unpack(scores, token_ids, listed_ids=self.scores.listed_ids))

    def known(self) -> m.KnownSample:
        record = self.record
        ending = None if record is None else Ending(record.finish_reason, record.stop, record.failure)
        return m.KnownSample(self.token_ids, self.epochs, self.exact, ending)


class Live:
    """A request that was submitted and has not ended. past: the checkpoint that it was submitted as."""

    __slots__ = (
        "admitted",
        "begun_at",
        "frame",
        "is_aborted",
        "keys",
        "num_moves",
        "past",
        "prompt_scores",
        "request",
        "samples",
        "told_at",
    )

    def __init__(self, request: Request, frame: bytes, keys: list[bytes], past: Checkpoint | None) -> None:
        self.request = request
        self.past = past
        self.frame = frame
        self.keys = keys
        self.admitted: m.Admitted | None = None
        self.samples = [LiveSample(request) for _ in range(request.params.n)]
        self.prompt_scores: TokenScores | None = None
        self.num_moves = 0
        self.is_aborted = False
        self.begun_at = 0.0
        """When its present replica took it in, as it was heard of here; moments are told in seconds since then."""
        self.told_at = 0.0

    def admit(self, admitted: m.Admitted, now: float) -> None:
        if self.admitted is not None:
            self.num_moves += 1
            if admitted.fingerprint != self.admitted.fingerprint:
                for sample in self.samples:
                    sample.exact = sample.exact and (not sample.token_ids or sample.record is not None)
        self.admitted = admitted
        self.begun_at = now

    def known(self) -> m.Known | None:
        """For a coordinator that has never heard of it."""
        one = self.admitted
        if one is None:
            return None
        samples = [sample.known() for sample in self.samples]
        return m.Known(one.seed, one.max_output, one.logprobs_mode, samples, one.fingerprint, self.num_moves + 1)

    @property
    def num_left(self) -> int:
        """Samples that have not ended."""
        return sum(sample.record is None for sample in self.samples)

    def recall(self, child: int) -> Ending | None:
        """Let an ended sample have what its checkpoint had, if it ended before a replica told of it. Returns its end if
        it had ended already then."""
        if self.past is None:
            return None
        sample, had = self.samples[child], self.past.samples[child]
        if len(sample.token_ids) < had.num_output:
            sample.token_ids, sample.epochs, sample.exact = had.token_ids, list(had.epochs), had.exact
            if had.scores is not None:
                listed = self.request.params.logprob_token_ids
                sample.scores = TokenScores.unpack(had.scores, had.token_ids, listed_ids=listed)
        return had.ending

    def take_prompt_scores(self, scores: PackedScores | None) -> None:
        if scores is not None:
            prompt = self.request.prompt_token_ids
            self.prompt_scores = TokenScores.unpack(scores, prompt[1 : 1 + scores.num_scored], leading_none=True)

    def moments(self, happened: Sequence[RequestEvent]) -> list[Told]:
        """In the order they happened, on the clock here."""
        told = []
        for one in happened:
            self.told_at = max(self.told_at, self.begun_at + one.time)
            moment = ev.Moment(self.request.ticket, one.kind, one.num_tokens, child=one.child)
            told.append(Told(moment, self.told_at))
        return told


class Submissions:
    """outgoing: (message, frames) to send in the present session, in order. is_open: whether there is one."""

    def __init__(self, page_size: int) -> None:
        self.outgoing: list[tuple[m.Message, Frames]] = []
        self.is_open = False
        self.page_size = page_size
        self._live: dict[int, Live] = {}
        self._asked: dict[int, cmd.Command] = {}
        self._pins: dict[int, cmd.PinPrefix] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    # What is asked for

    def send(self, command: cmd.Command, source: str | None = None) -> list[Told]:
        """A caller's command. Its answer comes as events; what cannot be asked now is answered at once."""
        match command:
            case cmd.Submit(request):
                self._submit(command, request)
            case cmd.Abort(_, tickets, everything):
                for ticket in list(self._live) if everything else tickets:
                    if (live := self._live.get(ticket)) is not None:
                        live.is_aborted = True
                self._say(m.Abort(list(tickets), everything))
            case cmd.Prepared():
                raise AssertionError(f"{command} is for one engine")
            case cmd.UnpinPrefix(ticket, pin) if self._pins.pop(pin, None) is None or not self.is_open:
                return [Told(ev.Done(ticket), 0.0)]  # it went with the session
            case _ if not self.is_open:
                return [self._no_session(command.ticket)]
            case cmd.PinPrefix(ticket):
                self._asked[ticket] = self._pins[ticket] = command
                self._say(m.Ask(ticket, command))
            case cmd.GetReplicas(ticket):
                self._asked[ticket] = command
                self._say(m.Look(ticket))
            case cmd.TakeCheckpoint(ticket, _, request_ticket, end):
                assert request_ticket is not None
                self._asked[ticket] = command
                self._say(m.Take(ticket, request_ticket, end))
            case asked:
                self._asked[asked.ticket] = asked
                self._say(m.Ask(asked.ticket, asked, source))
        return []

    def _submit(self, command: cmd.Submit, request: Request) -> None:
        keys = page_keys(request.prompt_token_ids, self.page_size, request.cache_salt)
        wired = replace(request, request_id=0, ticket=0, prompt=None, stream=True, routed=True)
        live = Live(request, _encode(replace(command, request=wired)), keys, command.checkpoint)
        self._live[request.ticket] = live
        if command.checkpoint is not None and command.checkpoint.num_output:
            live.take_prompt_scores(command.checkpoint.prompt_scores)
        if self.is_open:
            self._say(m.Submit(request.ticket, keys), [live.frame])

    def _say(self, message: m.Message, frames: Frames = ()) -> None:
        if self.is_open:
            self.outgoing.append((message, frames))

    @staticmethod
    def _no_session(ticket: int) -> Told:
        failure = Failure.of(StateError("there is no coordinator now: whether an order took place is not known"))
        return Told(ev.Done(ticket, failure=failure), 0.0)

    # Sessions

    def opened(self) -> None:
        """A new session: submit again what is unanswered, and pin again what was pinned."""
        self.is_open = True
        for ticket, pin in self._pins.items():
            self._say(m.Ask(ticket, pin))
        for number, live in self._live.items():
            self._say(m.Submit(number, live.keys, live.known()), [live.frame])
            if live.is_aborted:
                self._say(m.Abort([number]))

    def lost(self) -> list[Told]:
        """The session is over."""
        self.is_open = False
        self.outgoing.clear()
        asked, self._asked = self._asked, {}
        for ticket in asked:
            self._pins.pop(ticket, None)
        return [self._no_session(ticket) for ticket in asked]

    # What comes

    def happened(self, happening: Happening, now: float) -> list[Told]:
        match happening:
            case Opened():
                self.opened()
            case Lost():
                return self.lost()
            case Arrived(_, message, frames):
                return self.take(message, frames, now)
        return []

    def take(self, message: m.Message, frames: Frames, now: float) -> list[Told]:
        match message:
            case m.Admitted(number):
                self._live[number].admit(message, now)
                return []
            case m.Parts():
                return self._parts(message, frames)
            case m.Refused(number, failure):
                request = self._live.pop(number).request
                return [Told(ev.Refused(number, request.request_id, failure), now)]
            case m.Ended(number, child):
                return self._ended(number, child, _rest(frames[0]), now)
            case m.Taken(ask, failure):
                asked = self._asked.pop(ask)
                assert isinstance(asked, cmd.TakeCheckpoint)
                return [self._taken(asked, failure, frames, now)]
            case m.Answer(ask, failure):
                return self._answered(ask, message, failure, now)
            case m.Seen(ask, replicas, owners):
                self._asked.pop(ask, None)
                owned = {self._live[number].request.request_id: at for number, at in owners if number in self._live}
                return [Told(ev.Done(ask, Replicas(replicas, owned)), now)]
        return []

    def _answered(self, ask: int, answer: m.Answer, failure: Failure | None, now: float) -> list[Told]:
        asked = self._asked.pop(ask, None)
        pin = self._pins.get(ask)
        if pin is not None and failure is not None:
            del self._pins[ask]
        if asked is None:
            return []  # pinned again
        value: object = self._named(answer.stats)
        if pin is not None:
            value = len(pin.prompt_token_ids) // self.page_size * self.page_size
        return [Told(ev.Done(ask, value, failure), now)]

    def _parts(self, parts: m.Parts, frames: Frames) -> list[Told]:
        told: list[Told] = []
        columns = zip(parts.numbers, parts.children, parts.firsts, parts.epochs, parts.token_ids, frames, strict=True)
        for number, child, first, epoch, token_ids, frame in columns:
            live = self._live[number]
            sample = live.samples[child]
            assert first == len(sample.token_ids), f"request {number}: a part from {first} on, not {sample.token_ids}"
            scores = None
            if frame:
                part = _part(frame)
                live.take_prompt_scores(part.prompt_scores)
                told += live.moments(part.moments)
                scores = part.scores
            if not token_ids:
                continue
            sample.grow(token_ids, [(first, epoch)], scores)
            if live.request.stream:
                own = None if sample.scores is None else sample.scores.cut(first, first + len(token_ids))
                told.append(Told(ev.Progress(number, first, token_ids, own, epoch, child), live.told_at))
        return told

    def _ended(self, number: int, child: int | None, rest: m.Rest, now: float) -> list[Told]:
        """One sample's end, or that of all that are left."""
        live = self._live[number]
        told = live.moments(rest.moments)
        live.take_prompt_scores(rest.prompt_scores)
        ended = [at for at, sample in enumerate(live.samples) if sample.record is None] if child is None else [child]
        for at in ended:
            sample = live.samples[at]
            sample.grow(rest.token_ids, rest.epochs, rest.scores)
            is_last = live.num_left == 1
            ending = live.recall(at) or rest.ending
            sample.record = _record(live, at, rest, ending, with_prompt=is_last)
            told.append(Told(ev.Ended(number, sample.record, live.num_left), now))
        if not live.num_left:
            del self._live[number]
        return told

    def _taken(self, asked: cmd.TakeCheckpoint, failure: Failure | None, frames: Frames, now: float) -> Told:
        assert asked.request_ticket is not None
        live = self._live.get(asked.request_ticket)
        if failure is not None or live is None:
            ended = Failure("InvalidValue", "the request is not live: it has ended, or never began")
            return Told(ev.Done(asked.ticket, failure=failure or ended), now)
        found = replace(_checkpoint(frames[0]), request_id=live.request.request_id, prompt=live.request.prompt)
        if found.num_output:  # then all scores came with the tokens
            samples = tuple(
                one
                if own.scores is None or len(own.token_ids) < one.num_output  # it is as it was submitted
                else replace(one, scores=own.scores.cut(0, one.num_output).pack())
                for one, own in zip(found.samples, live.samples, strict=True)
            )
            prompt_scores = None if live.prompt_scores is None else live.prompt_scores.pack()
            found = replace(found, samples=samples, prompt_scores=prompt_scores)
        return Told(ev.Taken(asked.ticket, asked.request_ticket, found), now)

    def _named(self, stats: Stats | None) -> Stats | None:
        """Paused requests by the names they were submitted under."""
        if stats is None:
            return None
        names = [self._live[n].request.request_id for n in stats.paused_ids if isinstance(n, int) and n in self._live]
        return replace(stats, paused_ids=names)


def _record(live: Live, child: int, rest: m.Rest, ending: Ending, with_prompt: bool) -> ev.Record:
    """All of an ended sample: what came before, and the rest."""
    request, sample = live.request, live.samples[child]
    prompt_scores = None
    if with_prompt and request.params.prompt_logprobs is not None:
        prompt_scores = live.prompt_scores or TokenScores(leading_none=True)
    return ev.Record(
        request_id=request.request_id,
        arrival=rest.arrival,
        seed=rest.seed if live.past is None else live.past.seed,  # no replica may have admitted it yet
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=sample.token_ids,
        finish_reason=ending.reason,
        stop=ending.stop,
        scores=sample.scores,
        prompt_scores=prompt_scores,
        exact=rest.exact and sample.exact,
        num_cached_tokens=rest.num_cached_tokens,
        num_pauses=rest.num_pauses,
        num_evictions=rest.num_evictions,
        num_checkpoints=rest.num_checkpoints,
        weight_epochs=sample.epochs,
        failure=ending.failure,
        child=child,
    )
