"""`Link`: one end of a session. What is sent arrives once and in the order of sending, or the session ends.

The wire below may lose, delay, repeat and reorder packets. Messages are numbered and kept until the other end says that
it has them; what does not arrive is sent again. Nothing above this file ever sees a message twice or out of turn.

- A session is named by two numbers, the caller's and the answerer's. A packet of any other session is not of this one:
  so nothing of a session that is over, or of a peer before its restart, can be taken for new.
- Pure: packets and the time come as arguments, packets to send are asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from enum import IntEnum

import msgspec

from perdure.coordinator.messages import Hello, Message

RESEND_S = 0.3
"""How long an acknowledgement may take before the oldest message is sent again; doubled each time, up to a limit."""
MOST_RESEND_S = 2.0
ACKNOWLEDGE_S = 0.02
"""How long one may wait for a message to travel with."""
BEAT_S = 0.2
"""A link says at least so often that it is alive."""
WINDOW = 4096
"""Most messages under way; further ones wait here."""
RESENT_AT_ONCE = 16
GAP_FADES_S = 10.0
"""A long silence counts for half of itself as much later."""
HEAD_BYTES = 64
"""What a message without frames counts for."""

Frames = Sequence[bytes]


class Kind(IntEnum):
    """open, opened, refused: how a session begins, or does not. over: the answerer knows of no such session."""

    OPEN = 0
    OPENED = 1
    REFUSED = 2
    DATA = 3
    BEAT = 4
    OVER = 5


class Packet(msgspec.Struct, frozen=True, array_like=True):
    """The first frame of everything on the wire; a message's own frames follow.

    number: of a message in its direction, from 1. received: all up to this number has arrived here.
    """

    kind: Kind
    caller: int
    answerer: int = 0
    number: int = 0
    received: int = 0
    message: Message | None = None
    hello: Hello | None = None
    why: str = ""


encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Packet).decode


class Link:
    """The state of one end. heard_at: when the last packet of this session came. longest_gap: between two packets, of
    late: on a busy machine everybody is heard of less often."""

    def __init__(self, caller: int, answerer: int, now: float) -> None:
        self.caller = caller
        self.answerer = answerer
        self.heard_at = now
        self.longest_gap = 0.0
        self.pulse: Message | None = None
        """What beats carry. Then they come whatever else is sent: it tells what nothing else does."""
        self.num_bytes = 0
        """Of all that is not known to have arrived."""
        self._next = 1
        self._unsent: deque[tuple[int, Message, Frames]] = deque()
        self._under_way: deque[tuple[int, list[bytes]]] = deque()
        self._received = 0
        self._early: dict[int, tuple[Message, Frames]] = {}
        """What came before its turn."""
        self._told = 0
        """The last number that the other end knows to have arrived."""
        self._owed_since: float | None = None
        self._sent_at = self._beaten_at = now
        self._resend_at = 0.0
        self._resend_s = RESEND_S

    def send(self, message: Message, frames: Frames = ()) -> None:
        self._unsent.append((self._next, message, frames))
        self._next += 1
        self.num_bytes += HEAD_BYTES + sum(map(len, frames))

    @property
    def is_flushed(self) -> bool:
        """Whether all that was sent has arrived."""
        return not (self._unsent or self._under_way)

    @property
    def is_eager(self) -> bool:
        """Whether something can go out at once."""
        return bool(self._unsent) and len(self._under_way) < WINDOW

    def beat_soon(self) -> None:
        """Let the other end hear of this one at once."""
        self._sent_at -= BEAT_S
        self._beaten_at -= BEAT_S

    def take(self, packet: Packet, frames: Frames, now: float) -> list[tuple[Message, Frames]]:
        """A packet of this session came; returns the messages whose turn it is."""
        gap = now - self.heard_at
        self.longest_gap = max(gap, self.longest_gap * 0.5 ** (gap / GAP_FADES_S))
        self.heard_at = now
        self._arrived(packet.received, now)
        if packet.message is None:
            return []
        if packet.kind is Kind.BEAT:
            return [(packet.message, frames)]
        number = packet.number
        if self._owed_since is None:
            self._owed_since = now
        if number <= self._received or number > self._received + WINDOW:
            self._told = 0  # it was sent again, so what was said of it is lost
            return []
        if number != self._received + 1:
            self._early[number] = (packet.message, frames)
            return []
        self._received = number
        ready = [(packet.message, frames)]
        while (following := self._early.pop(self._received + 1, None)) is not None:
            self._received += 1
            ready.append(following)
        return ready

    def _arrived(self, number: int, now: float) -> None:
        if not (self._under_way and self._under_way[0][0] <= number):
            return
        while self._under_way and self._under_way[0][0] <= number:
            _, frames = self._under_way.popleft()
            self.num_bytes -= HEAD_BYTES + sum(map(len, frames)) - len(frames[0])
        self._resend_s = RESEND_S
        self._resend_at = now + RESEND_S

    def packets(self, now: float) -> list[list[bytes]]:
        """What is to go onto the wire now."""
        out: list[list[bytes]] = []
        if self._under_way and now >= self._resend_at:
            out += [frames for _, frames in list(self._under_way)[:RESENT_AT_ONCE]]
            self._resend_s = min(2 * self._resend_s, MOST_RESEND_S)
            self._resend_at = now + self._resend_s
        while self._unsent and len(self._under_way) < WINDOW:
            number, message, frames = self._unsent.popleft()
            head = encode(Packet(Kind.DATA, self.caller, self.answerer, number, self._received, message))
            if not self._under_way:
                self._resend_at = now + self._resend_s
            self._under_way.append((number, [head, *frames]))
            out.append([head, *frames])
            self._said(now)
        if now >= self._next_beat():
            out.append([encode(Packet(Kind.BEAT, self.caller, self.answerer, 0, self._received, self.pulse))])
            self._beaten_at = now
            self._said(now)
        return out

    def _said(self, now: float) -> None:
        self._told, self._owed_since, self._sent_at = self._received, None, now

    def _next_beat(self) -> float:
        beat_at = (self._sent_at if self.pulse is None else self._beaten_at) + BEAT_S
        if self._owed_since is not None and self._told != self._received:
            return min(self._owed_since + ACKNOWLEDGE_S, beat_at)
        return beat_at

    def due(self, now: float) -> float:
        """When `packets` has something next."""
        if self.is_eager:
            return now
        return min(self._next_beat(), self._resend_at) if self._under_way else self._next_beat()
