"""`Bridge` between two sessions: what its engine was given already takes place, and only then it says what it is."""

from __future__ import annotations

import itertools

import msgspec

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.event import Failure
from perdure.api.fingerprint import Fingerprint
from perdure.api.moment import MomentKind
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.coordinator import messages as m
from perdure.engine.bridge import Bridge, Condition

_part = msgspec.msgpack.Decoder(m.Part).decode


class Host:
    """Keeps what it is told. sent: to its engine."""

    def __init__(self) -> None:
        self.tickets = itertools.count(1)
        self.applied: list[m.Asked] = []
        self.sent: list[cmd.Command] = []
        self.fetching: set[int] = set()
        self.bridge = Bridge(self)

    def ticket(self) -> int:
        return next(self.tickets)

    def send(self, command: cmd.Command) -> None:
        self.sent.append(command)

    def prepare(self, ask: int, order: m.Asked, source: str | None) -> None:
        if source is None:
            self.bridge.prepared(ask, None)
        else:
            self.fetching.add(ask)
            self.bridge.fetch(ask, source, 0)

    def apply(self, ask: int, order: m.Asked) -> None:
        self.applied.append(order)

    def forget(self, ask: int) -> None:
        self.fetching.remove(ask)

    def hold(self, holds: bool) -> None:
        assert not holds

    def take_piece(self, ask: int, first: int, total: int, data: bytes) -> None:
        raise AssertionError(ask)

    def piece(self, source: str, first: int) -> tuple[bytes, int] | None:
        return None


def given(host: Host, order: m.Asked) -> int:
    """The engine's ticket of an order that it was given."""
    host.bridge.take(m.Prepare(1, order), ())
    host.bridge.take(m.Apply(1), ())
    return host.applied[-1].ticket


def test_an_order_of_a_session_that_is_over_is_waited_for() -> None:
    host = Host()
    ticket = given(host, cmd.Pause(0))
    host.bridge.flush()
    host.bridge.lost()
    assert not host.bridge.is_settled
    host.bridge.told(ev.Done(ticket), 0.0, Condition("paused", 0, Fingerprint()))
    assert host.bridge.is_settled and host.bridge.flush() == [], "nobody asked in this session"
    host.bridge.check_idle()


def test_a_question_changes_nothing_and_is_not_waited_for() -> None:
    host = Host()
    given(host, cmd.GetStats(0))
    host.bridge.lost()
    assert host.bridge.is_settled


def test_one_that_was_told_to_stop_has_stopped_whoever_hears_of_it() -> None:
    host = Host()
    ticket = given(host, cmd.Stop(0))
    host.bridge.lost()
    host.bridge.told(ev.Done(ticket), 0.0, Condition("stopped", 0, Fingerprint()))
    assert host.bridge.is_stopped


def test_weights_that_do_not_come_to_their_end_are_forgotten() -> None:
    """Met in the simulation: half of them stayed."""
    host = Host()
    host.bridge.take(m.Prepare(1, cmd.UpdateWeights(0, 7), f"{m.OF_TENSORS}a"), ())
    host.bridge.take(m.Apply(1), ())
    gone = Failure("StateError", "they are not here any more")
    host.bridge.take(m.Piece(1, 4, failure=gone), ())
    assert not host.fetching and (m.Answer(1, gone), ()) in host.bridge.flush()
    host.bridge.check_idle()


def test_what_happens_while_a_prompt_is_computed_is_told_at_once() -> None:
    """Once: the first token takes along what came after it, and a turn in which nothing changed is no message."""
    host = Host()
    bridge, request = host.bridge, Request("", 0, [1, 2, 3, 4], SamplingParams(max_tokens=3))
    bridge.take(m.Submit(7, []), [msgspec.msgpack.encode(cmd.Submit(request))])
    (submitted,) = host.sent
    assert isinstance(submitted, cmd.Submit)
    ticket = submitted.request.ticket

    def happened(*kinds: MomentKind) -> list[list[str]]:
        """Kinds of moments in each part that is sent."""
        for kind in kinds:
            bridge.told(ev.Moment(ticket, kind, 2), 0.0)
        found = [(message, frames) for message, frames in bridge.flush() if isinstance(message, m.Parts)]
        return [[one.kind for one in _part(f).moments] if f else [] for _, frames in found for f in frames]

    assert happened("queued") == [], "that is what everybody takes it for"
    assert happened("scheduled") == [["queued", "scheduled"]]
    assert happened() == []
    assert happened("chunk") == [["chunk"]]
    bridge.told(ev.Progress(ticket, 0, [5], None, 0), 0.0)
    assert happened("chunk", "first_token") == [[], ["chunk", "first_token"]]
    assert happened("paused", "resumed") == [["paused", "resumed"]]
