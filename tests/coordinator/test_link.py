"""A session over a wire that loses, repeats and reorders: every message once, in order; nothing of another session."""

from __future__ import annotations

import itertools
import random

import pytest

from perdure.coordinator import messages as m
from perdure.coordinator.link import decode
from perdure.coordinator.sessions import UNHEARD_S, Answerer, Arrived, Caller, Lost, Opened


class Pair:
    """A caller and an answerer, and what flies between them."""

    def __init__(self, seed: int = 0, lossy: float = 0.0) -> None:
        self.rng = random.Random(seed)
        self.lossy = lossy
        self.now = 0.0
        numbers = itertools.count(1)
        refusal = lambda hello: "no" if hello.name == "unwanted" else None  # noqa: E731
        self.answerer = Answerer(lambda: next(numbers), refusal, silence_s=20.0 if lossy else 1.2)
        self.name = "me"
        self.caller = Caller(lambda: next(numbers), lambda: m.Hello(m.VERSION, self.name), 0.0)
        self.flying: list[tuple[float, bool, list[bytes]]] = []
        self.there: list[object] = []
        self.here: list[object] = []
        self.record: list[tuple[bool, list[bytes]]] = []

    def _fly(self, to_answerer: bool, frames: list[bytes]) -> None:
        self.record.append((to_answerer, frames))
        roll = self.rng.random()
        for _ in range(0 if roll < self.lossy else 2 if roll < 1.5 * self.lossy else 1):
            self.flying.append((self.now + self.rng.random() * (1.0 if self.lossy else 0.0), to_answerer, frames))

    def turn(self, seconds: float = 0.05) -> None:
        for frames in self.caller.packets(self.now):
            self._fly(True, frames)
        for address, frames in self.answerer.packets(self.now):
            assert address == b"a"
            self._fly(False, frames)
        self.now += seconds
        landed = [one for one in self.flying if one[0] <= self.now]
        self.flying = [one for one in self.flying if one[0] > self.now]
        for _, to_answerer, frames in landed:
            if to_answerer:
                self.there += self.answerer.take(b"a", frames, self.now)
            else:
                self.here += self.caller.take(frames, self.now)
        self.there += self.answerer.tick(self.now)

    def turns(self, count: int) -> None:
        for _ in range(count):
            self.turn()

    def arrived_there(self) -> list[int]:
        return [one.message.numbers[0] for one in self.there if isinstance(one, Arrived)]  # type: ignore[union-attr]


def opened(lossy: float = 0.0, seed: int = 0) -> Pair:
    pair = Pair(seed, lossy)
    while not any(isinstance(one, Opened) for one in pair.there):
        pair.turn()
    return pair


@pytest.mark.parametrize("seed", range(8))
def test_every_message_arrives_once_and_in_order(seed: int) -> None:
    pair = opened(lossy=0.3, seed=seed)
    for number in range(60):
        pair.caller.send(m.Abort([number]), [bytes([number])])
        pair.answerer.send(pair.caller.session or 0, m.Abort([number]))
        pair.turn()
    pair.turns(400)
    assert not any(isinstance(one, Lost) for one in [*pair.there, *pair.here])
    assert pair.arrived_there() == list(range(60))
    assert [one.frames for one in pair.there if isinstance(one, Arrived)] == [[bytes([i])] for i in range(60)]
    back = [one.message.numbers[0] for one in pair.here if isinstance(one, Arrived)]  # type: ignore[union-attr]
    assert back == list(range(60)) and pair.answerer.is_flushed and pair.caller.link is not None
    assert pair.caller.link.is_flushed and pair.caller.link.num_bytes == 0


def test_a_session_is_heard_of_once_the_caller_knows_both_numbers() -> None:
    pair = Pair()
    (first,) = pair.caller.packets(0.0)
    assert pair.answerer.take(b"a", first, 0.0) == []
    assert pair.answerer.take(b"a", first, 0.0) == [], "and a copy of the opening begins no second one"
    assert len(pair.answerer.sessions) == 1
    pair.turns(10)
    assert [type(one) for one in pair.there] == [Opened]


def test_a_stray_opening_of_long_ago_begins_nothing() -> None:
    pair = opened()
    pair.turns(3)
    old = next(frames for to_answerer, frames in pair.record if to_answerer)
    pair.answerer.close(pair.caller.session or 0)
    pair.there.clear()
    pair.answerer.take(b"a", old, pair.now)
    pair.turns(60)
    assert [type(one) for one in pair.there] == [Opened], "the caller's own new session, and none for the stray"


def test_what_belongs_to_a_session_that_is_over_is_taken_by_nobody() -> None:
    pair = opened()
    pair.caller.send(m.Abort([1]))
    pair.turns(3)
    late = [frames for to_answerer, frames in pair.record if to_answerer and decode(frames[0]).message is not None]
    pair.answerer.close(pair.caller.session or 0)
    pair.turns(20)
    assert any(isinstance(one, Lost) for one in pair.here), "the caller heard that it is over, and called again"
    before = pair.arrived_there()
    assert pair.answerer.take(b"a", late[0], pair.now) == [] and pair.arrived_there() == before == [1]


def test_silence_ends_a_session_and_the_answerers_own_absence_does_not() -> None:
    pair = opened()
    pair.turns(5)
    pair.now += 1.0
    pair.answerer.excuse(1.0, pair.now)
    assert pair.answerer.tick(pair.now) == []
    pair.now += 2.0
    assert [type(one) for one in pair.answerer.tick(pair.now)] == [Lost]


def test_who_is_heard_of_seldom_is_waited_for_longer() -> None:
    """A busy machine is no death: silence is judged by the gaps there were of late."""
    pair = opened()
    for _ in range(10):
        pair.turn(1.0)
    assert pair.answerer.tick(pair.now + 3.0) == []
    for _ in range(4 * 40):
        pair.turn(0.25)
    assert [type(one) for one in pair.answerer.tick(pair.now + 3.0)] == [Lost], "that was long ago"


def test_a_connection_that_broke_is_waited_for_no_longer_than_another_takes() -> None:
    pair = opened()
    pair.answerer._silence_s = 60.0
    pair.turns(5)
    pair.answerer.cut(b"a", pair.now)
    pair.turns(4)
    back = pair.caller.packets(pair.now + 0.5)
    pair.answerer.take(b"b", back[0], pair.now)
    assert pair.answerer.tick(pair.now + 5.0) == [], "it has come back by another"
    pair.answerer.cut(b"a", pair.now)
    assert pair.answerer.tick(pair.now + 5.0) == [], "the old one is not its own any more"
    pair.answerer.cut(b"b", pair.now)
    assert pair.answerer.tick(pair.now + 0.9) == []
    assert [type(one) for one in pair.answerer.tick(pair.now + 1.1)] == [Lost]


def test_a_pulse_is_heard_of_beside_any_number_of_messages() -> None:
    """One that streams without a pause moves, and says so."""
    pair = opened()
    assert pair.caller.link is not None
    for num_steps in range(100):
        pair.caller.link.pulse = m.Beat(num_steps, has_work=True)
        pair.caller.send(m.Abort([num_steps]))
        pair.turn()
    beats = [one.message for one in pair.there if isinstance(one, Arrived) and isinstance(one.message, m.Beat)]
    assert len(beats) >= 20 and beats[-1].num_steps >= 90


def test_a_peer_that_takes_nothing_is_lost_before_memory_is() -> None:
    pair = opened()
    pair.turns(3)
    pair.answerer._most_backlog = 1000
    pair.answerer.send(pair.caller.session or 0, m.Abort([1]), [bytes(2000)])
    assert [type(one) for one in pair.answerer.tick(pair.now)] == [Lost]


@pytest.mark.parametrize(("name", "version", "why"), [("unwanted", m.VERSION, "no"), ("me", 77, "version is 77")])
def test_who_is_not_wanted_hears_why(name: str, version: int, why: str) -> None:
    pair = Pair()
    pair.caller = Caller(lambda: 5, lambda: m.Hello(version, name), 0.0)
    pair.turns(5)
    assert pair.caller.refused is not None and why in pair.caller.refused
    assert pair.caller.packets(pair.now) == [] and pair.answerer.sessions == []


@pytest.mark.parametrize("frames", [[], [b""], [b"\xff\xff"], [b"\x93\x01\x02"], [b"hello", b"you"]])
def test_what_is_no_packet_is_dropped(frames: list[bytes]) -> None:
    pair = opened()
    assert pair.answerer.take(b"a", frames, 0.0) == [] and pair.caller.take(frames, 0.0) == []


def test_that_nobody_answers_is_told_once_and_never_after_an_answer() -> None:
    pair = Pair()
    assert not pair.caller.is_unheard(UNHEARD_S / 2)
    assert pair.caller.is_unheard(UNHEARD_S) and not pair.caller.is_unheard(2 * UNHEARD_S)
    pair = Pair()
    while not pair.caller.was_heard:
        pair.turn()
    assert not pair.caller.is_unheard(100.0)
