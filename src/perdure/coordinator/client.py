"""`Submissions`: a client's side of its requests, without sockets or threads. It speaks the engine's commands and
events.

- What comes of a request is collected here, tokens and scores: the coordinator keeps no scores, so that a replica that
  goes on with a request sends only what comes after, and a record is made whole at its end.
- When the session with the coordinator ends, everything unanswered is submitted again in the next one, from where it
  stands. Questions are not: whether an order took place is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Checkpoint
from perdure.api.errors import StateError
from perdure.api.event import Event, Failure
from perdure.api.moment import RequestEvent
from perdure.api.output import Stats
from perdure.api.request import Request
from perdure.api.scores import PackedScores, TokenScores
from perdure.coordinator import messages as m
from perdure.coordinator.affinity import page_keys
from perdure.coordinator.link import Frames
from perdure.coordinator.sessions import Arrived, Happening, Lost, Opened

_encode = msgspec.msgpack.Encoder().encode
_part = msgspec.msgpack.Decoder(m.Part).decode
_ending = msgspec.msgpack.Decoder(m.Ending).decode
_checkpoint = msgspec.msgpack.Decoder(Checkpoint).decode


class Told(NamedTuple):
    """An event, and when it happened."""

    event: Event
    time: float


class Live:
    """A request that was submitted and has not ended. number: the ticket of its submission."""

    __slots__ = (
        "admitted",
        "begun_at",
        "epochs",
        "exact",
        "frame",
        "is_aborted",
        "keys",
        "num_moves",
        "prompt_scores",
        "request",
        "scores",
        "token_ids",
        "told_at",
    )

    def __init__(self, request: Request, frame: bytes, keys: list[bytes]) -> None:
        self.request = request
        self.frame = frame
        self.keys = keys
        self.admitted: m.Admitted | None = None
        self.token_ids: list[int] = []
        self.scores = TokenScores(listed_ids=request.params.logprob_token_ids) if request.params.asks_scores else None
        self.prompt_scores: TokenScores | None = None
        self.epochs: list[tuple[int, int]] = []
        self.exact = True
        self.num_moves = 0
        self.is_aborted = False
        self.begun_at = 0.0
        """When its present replica took it in, as it was heard of here; moments are told in seconds since then."""
        self.told_at = 0.0

    def admit(self, admitted: m.Admitted, now: float) -> None:
        if self.admitted is not None:
            self.num_moves += 1
            if self.token_ids and admitted.fingerprint != self.admitted.fingerprint:
                self.exact = False
        self.admitted = admitted
        self.begun_at = now

    def known(self) -> m.Known | None:
        """For a coordinator that has never heard of it."""
        one = self.admitted
        if one is None:
            return None
        return m.Known(
            one.seed,
            one.max_output,
            one.logprobs_mode,
            self.token_ids,
            self.epochs,
            one.fingerprint,
            self.exact,
            self.num_moves + 1,
        )

    def grow(self, token_ids: list[int], epochs: Sequence[tuple[int, int]], scores: PackedScores | None) -> None:
        self.token_ids += token_ids
        for first, epoch in epochs:
            if not self.epochs or self.epochs[-1][1] != epoch:
                self.epochs.append((first, epoch))
        if scores is not None:
            assert self.scores is not None
            self.scores.extend(self.unpacked(scores, token_ids))

    def unpacked(self, scores: PackedScores, token_ids: Sequence[int]) -> TokenScores:
        return TokenScores.unpack(scores, token_ids, listed_ids=self.request.params.logprob_token_ids)

    def take_prompt_scores(self, scores: PackedScores | None) -> None:
        if scores is not None:
            prompt = self.request.prompt_token_ids
            self.prompt_scores = TokenScores.unpack(scores, prompt[1 : 1 + scores.num_scored], leading_none=True)

    def moments(self, happened: Sequence[RequestEvent]) -> list[Told]:
        """In the order they happened, on the clock here."""
        told = []
        for one in happened:
            self.told_at = max(self.told_at, self.begun_at + one.time)
            told.append(Told(ev.Moment(self.request.ticket, one.kind, one.num_tokens), self.told_at))
        return told


class Submissions:
    """outgoing: (message, frames) to send in the present session, in order. is_open: whether there is one."""

    def __init__(self, page_size: int) -> None:
        self.outgoing: list[tuple[m.Message, Frames]] = []
        self.is_open = False
        self.page_size = page_size
        self._live: dict[int, Live] = {}
        self._asked: dict[int, cmd.Command] = {}

    @property
    def num_live(self) -> int:
        return len(self._live)

    @property
    def num_unanswered(self) -> int:
        return len(self._live) + len(self._asked)

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
            case cmd.Prepared() | cmd.PinPrefix() | cmd.UnpinPrefix():
                raise AssertionError(f"{command} is for one engine")
            case _ if not self.is_open:
                return [self._no_session(command.ticket)]
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
        live = Live(request, _encode(replace(command, request=wired)), keys)
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
        """A new session: submit again what is unanswered."""
        self.is_open = True
        for number, live in self._live.items():
            self._say(m.Submit(number, live.keys, live.known()), [live.frame])
            if live.is_aborted:
                self._say(m.Abort([number]))

    def lost(self) -> list[Told]:
        """The session is over."""
        self.is_open = False
        self.outgoing.clear()
        asked, self._asked = self._asked, {}
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
            case m.Ended(number):
                return self._ended(number, _ending(frames[0]), now)
            case m.Taken(ask, failure):
                asked = self._asked.pop(ask)
                assert isinstance(asked, cmd.TakeCheckpoint)
                return [self._taken(asked, failure, frames, now)]
            case m.Answer(ask, failure, stats):
                del self._asked[ask]
                return [Told(ev.Done(ask, self._named(stats), failure), now)]
        return []

    def _parts(self, parts: m.Parts, frames: Frames) -> list[Told]:
        told: list[Told] = []
        columns = zip(parts.numbers, parts.firsts, parts.epochs, parts.token_ids, frames, strict=True)
        for number, first, epoch, token_ids, frame in columns:
            live = self._live[number]
            assert first == len(live.token_ids), f"request {number}: part {first} after {len(live.token_ids)} tokens"
            scores = None
            if frame:
                part = _part(frame)
                live.take_prompt_scores(part.prompt_scores)
                told += live.moments(part.moments)
                scores = part.scores
            live.grow(token_ids, [(first, epoch)], scores)
            if live.request.stream:
                own = None if live.scores is None else live.scores.cut(first, first + len(token_ids))
                told.append(Told(ev.Progress(number, first, token_ids, own, epoch), live.told_at))
        return told

    def _ended(self, number: int, ending: m.Ending, now: float) -> list[Told]:
        live = self._live.pop(number)
        told = live.moments(ending.moments)
        live.grow(ending.token_ids, ending.epochs, ending.scores)
        live.take_prompt_scores(ending.prompt_scores)
        return [*told, Told(ev.Ended(number, _record(live, ending)), now)]

    def _taken(self, asked: cmd.TakeCheckpoint, failure: Failure | None, frames: Frames, now: float) -> Told:
        assert asked.request_ticket is not None
        live = self._live.get(asked.request_ticket)
        if failure is not None or live is None:
            ended = Failure("InvalidValue", "the request is not live: it has ended, or never began")
            return Told(ev.Done(asked.ticket, failure=failure or ended), now)
        found = replace(_checkpoint(frames[0]), request_id=live.request.request_id, prompt=live.request.prompt)
        if found.num_output:  # then all of its scores came with its tokens
            scores = None if live.scores is None else live.scores.cut(0, found.num_output).pack()
            prompt_scores = None if live.prompt_scores is None else live.prompt_scores.pack()
            found = replace(found, scores=scores, prompt_scores=prompt_scores)
        return Told(ev.Taken(asked.ticket, asked.request_ticket, found), now)

    def _named(self, stats: Stats | None) -> Stats | None:
        """Paused requests by the names they were submitted under."""
        if stats is None:
            return None
        names = [self._live[n].request.request_id for n in stats.paused_ids if isinstance(n, int) and n in self._live]
        return replace(stats, paused_ids=names)


def _record(live: Live, ending: m.Ending) -> ev.Record:
    """All of an ended request: what came before, and its ending."""
    request = live.request
    prompt_scores = live.prompt_scores
    if prompt_scores is None and request.params.prompt_logprobs is not None:
        prompt_scores = TokenScores(leading_none=True)
    return ev.Record(
        request_id=request.request_id,
        arrival=ending.arrival,
        seed=ending.seed,
        prompt_token_ids=list(request.prompt_token_ids),
        token_ids=live.token_ids,
        finish_reason=ending.finish_reason,
        stop=ending.stop,
        scores=live.scores,
        prompt_scores=prompt_scores,
        exact=ending.exact and live.exact,
        num_cached_tokens=ending.num_cached_tokens,
        num_pauses=ending.num_pauses,
        num_evictions=ending.num_evictions,
        num_checkpoints=ending.num_checkpoints,
        weight_epochs=live.epochs,
        failure=ending.failure,
    )
