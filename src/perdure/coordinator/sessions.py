"""How sessions begin and end: `Answerer` is the coordinator's side, with one link a peer, `Caller` everybody else's.

- The caller opens with a number of its own, the answerer adds one of its own, and both are in every packet from then
  on. An answerer that does not know a session says so, and the caller opens another.
- A session is heard of above only once the caller has used both numbers: a stray opening of long ago begins nothing.
- At the answerer a session ends by silence, judged by how often the peer was heard of before, and soon after the
  connection broke, unless the peer comes back by another. The caller goes on calling; how long is its owner's to say.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec

from perdure.coordinator.link import RESEND_S, Frames, Kind, Link, Packet, decode, encode
from perdure.coordinator.messages import VERSION, Hello, Message

SILENCE_S = 1.2
"""A peer that was not heard of for so long is lost, unless longer gaps than a quarter of that are usual."""
USUAL_GAPS = 4.0
"""How many times its longest gap of late a peer may be silent."""
AGAIN_S = 0.05
"""How soon one is asked again what it is, who could not say."""
CUT_S = 1.0
"""A peer whose connection broke is lost after so long without another: its process has ended, or the network."""
UNHEARD_S = 5.0
"""After so long without any answer whoever called it may be told that nobody is there."""
MOST_BACKLOG = 256 * 2**20
"""Bytes that may wait for one peer. One that takes no more is lost: it can call again, and goes on where it stood."""


class Opened(NamedTuple):
    """A session began. hello: what the caller is."""

    session: int
    hello: Hello


class Arrived(NamedTuple):
    session: int
    message: Message
    frames: Frames


class Lost(NamedTuple):
    """The session is over; nothing more comes of it."""

    session: int


Happening = Opened | Arrived | Lost


class _Peer:
    """address: where its last packet came from. cut_at: when that was found to lead nowhere. hello: until it has shown
    that it knows both numbers. timer_at: when its link is looked at next."""

    __slots__ = ("address", "cut_at", "hello", "link", "timer_at")

    def __init__(self, address: bytes, link: Link, hello: Hello) -> None:
        self.address = address
        self.cut_at: float | None = None
        self.timer_at = math.inf
        self.link = link
        self.hello: Hello | None = hello

    def moved(self, address: bytes) -> None:
        """It speaks from here now."""
        if address != self.address:
            self.address, self.cut_at = address, None

    def is_lost(self, now: float, silence_s: float) -> bool:
        """Whether it is to be waited for no longer."""
        silent_s = now - self.link.heard_at
        if silent_s > max(silence_s, USUAL_GAPS * self.link.longest_gap):
            return True
        return self.cut_at is not None and min(silent_s, now - self.cut_at) > CUT_S


class Answerer:
    """refusal(hello) says why a caller is not wanted, or None. A session is named by the answerer's number."""

    def __init__(
        self,
        new_number: Callable[[], int],
        refusal: Callable[[Hello], str | None],
        silence_s: float = SILENCE_S,
        most_backlog: int = MOST_BACKLOG,
    ) -> None:
        self._new_number = new_number
        self._refusal = refusal
        self._silence_s = silence_s
        self._most_backlog = most_backlog
        self._peers: dict[int, _Peer] = {}
        self._by_caller: dict[int, int] = {}
        self._stray: list[tuple[bytes, list[bytes]]] = []
        self._eager: dict[int, None] = {}
        """Sessions with something to send at once."""
        self._timers: list[tuple[float, int]] = []
        """A heap of (time, session). One that is not its peer's `timer_at` is of the past."""

    @property
    def sessions(self) -> list[int]:
        return list(self._peers)

    def take(self, address: bytes, frames: list[bytes], now: float) -> list[Happening]:
        """A packet came; what is no packet of ours is dropped."""
        try:
            packet = decode(frames[0])
        except (msgspec.MsgspecError, IndexError):
            return []
        if packet.kind is Kind.OPEN:
            self._open(address, packet, now)
            return []
        peer = self._peers.get(packet.answerer)
        if peer is None or peer.link.caller != packet.caller:
            self._say(address, Packet(Kind.OVER, packet.caller, packet.answerer))
            return []
        peer.moved(address)
        found: list[Happening] = []
        if peer.hello is not None:
            found.append(Opened(packet.answerer, peer.hello))
            peer.hello = None
        for message, own in peer.link.take(packet, frames[1:], now):
            found.append(Arrived(packet.answerer, message, own))
        self._set_timer(packet.answerer, peer, now)
        return found

    def _open(self, address: bytes, packet: Packet, now: float) -> None:
        number = self._by_caller.get(packet.caller)
        if number is None:
            hello = packet.hello
            if hello is None:
                return
            why = self._refusal(hello) if hello.version == VERSION else _other_version(hello.version)
            if why is not None:
                self._say(address, Packet(Kind.REFUSED, packet.caller, why=why))
                return
            number = self._new_number()
            self._by_caller[packet.caller] = number
            self._peers[number] = _Peer(address, Link(packet.caller, number, now), hello)
        self._say(address, Packet(Kind.OPENED, packet.caller, number))

    def _say(self, address: bytes, packet: Packet) -> None:
        self._stray.append((address, [encode(packet)]))

    def send(self, session: int, message: Message, frames: Frames = ()) -> None:
        """Nothing happens if the session is over: whoever sent has not heard of it yet."""
        if (peer := self._peers.get(session)) is not None:
            peer.link.send(message, frames)
            self._eager[session] = None

    def close(self, session: int) -> None:
        """End a session from here; the peer hears of it when it speaks next."""
        if (peer := self._peers.pop(session, None)) is not None:
            del self._by_caller[peer.link.caller]

    def close_address(self, address: bytes) -> list[int]:
        """End all sessions from there."""
        found = [number for number, peer in self._peers.items() if peer.address == address]
        for number in found:
            self.close(number)
        return found

    def cut(self, address: bytes, now: float) -> None:
        """What was sent there has nobody to go to."""
        for peer in self._peers.values():
            if peer.address == address and peer.cut_at is None:
                peer.cut_at = now

    def excuse(self, seconds: float, now: float) -> None:
        """Nobody could be heard for so long."""
        for peer in self._peers.values():
            peer.link.heard_at = min(now, peer.link.heard_at + seconds)

    def tick(self, now: float) -> list[Happening]:
        """Sessions that ended because the peer is lost, or takes nothing."""
        found: list[Happening] = []
        for number, peer in list(self._peers.items()):
            if peer.is_lost(now, self._silence_s) or peer.link.num_bytes > self._most_backlog:
                self.close(number)
                if peer.hello is None:
                    found.append(Lost(number))
        return found

    def packets(self, now: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """What is to go onto the wire now, each with its address."""
        stray, self._stray = self._stray, []
        yield from stray
        eager, self._eager = self._eager, {}
        for session in eager:
            yield from self._spoken(session, now)
        while self._timers and self._timers[0][0] <= now:
            at, session = heapq.heappop(self._timers)
            if (peer := self._peers.get(session)) is not None and peer.timer_at == at:
                peer.timer_at = math.inf
                yield from self._spoken(session, now)

    def _spoken(self, session: int, now: float) -> Iterator[tuple[bytes, list[bytes]]]:
        """What this one is told now."""
        peer = self._peers.get(session)
        if peer is None or peer.hello is not None:
            return
        for frames in peer.link.packets(now):
            yield peer.address, frames
        self._set_timer(session, peer, now)

    def _set_timer(self, session: int, peer: _Peer, now: float) -> None:
        """Unless it is looked at before."""
        if (at := peer.link.due(now)) < peer.timer_at:
            peer.timer_at = at
            heapq.heappush(self._timers, (at, session))

    def due(self, now: float) -> float:
        """When `packets` has something next."""
        if self._eager or self._stray:
            return now
        return self._timers[0][0] if self._timers else math.inf

    @property
    def is_flushed(self) -> bool:
        """Whether all that was sent has arrived."""
        return all(peer.link.is_flushed for peer in self._peers.values())


class Caller:
    """One session at a time with an answerer, opened again whenever it is over. make_hello: None = who calls cannot say
    yet what it is. `refused`: why we are not wanted. `was_heard`: whether anybody ever answered."""

    def __init__(self, new_number: Callable[[], int], make_hello: Callable[[], Hello | None], now: float) -> None:
        self._new_number = new_number
        self._make_hello = make_hello
        self.refused: str | None = None
        self.heard_at = now
        self.was_heard = False
        self._has_told = False
        self.link: Link | None = None
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._number = self._new_number()
        self._call_at = now
        self.link = None

    @property
    def session(self) -> int | None:
        """The answerer's number, while a session is open."""
        return None if self.link is None else self.link.answerer

    def take(self, frames: list[bytes], now: float) -> list[Happening]:
        try:
            packet = decode(frames[0])
        except (msgspec.MsgspecError, IndexError):
            return []
        if packet.caller != self._number:
            return []
        self.heard_at, self.was_heard = now, True
        link = self.link
        match packet.kind:
            case Kind.OPENED if link is None:
                self.link = Link(self._number, packet.answerer, now)
                self.link.beat_soon()
                return [Opened(packet.answerer, Hello(VERSION, ""))]
            case Kind.REFUSED if link is None:
                self.refused = packet.why
            case Kind.OVER if link is not None and packet.answerer == link.answerer:
                return self.reopen(now)
            case Kind.DATA | Kind.BEAT if link is not None and packet.answerer == link.answerer:
                return [Arrived(link.answerer, message, own) for message, own in link.take(packet, frames[1:], now)]
        return []

    def is_unheard(self, now: float) -> bool:
        """Whether nobody has answered for long, ever: True once, for who tells it."""
        if self.was_heard or self._has_told or now - self.heard_at < UNHEARD_S:
            return False
        self._has_told = True
        return True

    def reopen(self, now: float) -> list[Happening]:
        """Give the session up and open another."""
        old = self.session
        self._begin(now)
        return [] if old is None else [Lost(old)]

    def send(self, message: Message, frames: Frames = ()) -> None:
        """In a session that is open."""
        assert self.link is not None
        self.link.send(message, frames)

    def packets(self, now: float) -> list[list[bytes]]:
        if self.link is not None:
            return self.link.packets(now)
        if now < self._call_at or self.refused is not None:
            return []
        hello = self._make_hello()
        self._call_at = now + (RESEND_S if hello is not None else AGAIN_S)
        return [] if hello is None else [[encode(Packet(Kind.OPEN, self._number, hello=hello))]]

    def due(self, now: float) -> float:
        return self._call_at if self.link is None else self.link.due(now)


def _other_version(version: int) -> str:
    return f"the wire's version is {version} there and {VERSION} here: run one version of perdure everywhere"
