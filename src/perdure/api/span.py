"""What a request was doing, and from when to when, as its moments tell it."""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.api.moment import MomentKind

State = Literal["waiting", "prefill", "decode", "paused", "evicted", "recompute"]
"""evicted: waits to be computed again, for whatever reason. recompute: is computed again, its output so far with it."""


class Span(msgspec.Struct, frozen=True):
    """One state of a request. num_tokens: positions that a chunk of prefill or recompute computed; 0 elsewhere."""

    state: State
    start: float
    end: float
    num_tokens: int = 0


class Spans:
    """Those of one request, or of one of its samples, from `start` on, without a gap. Moments are taken in their order;
    one that changes no state is passed over."""

    def __init__(self, start: float) -> None:
        self.closed: list[Span] = []
        self.since = start
        """When the present state began."""
        self._num_residencies = 0
        self._is_resident = False
        self._is_paused = False
        self._num_left = 0
        """Known tokens that are to be computed before it goes on."""

    @property
    def state(self) -> State:
        if not self._is_resident:
            return "evicted" if self._num_residencies else "waiting"
        if self._is_paused:
            return "paused"
        if self._num_left > 0:
            return "recompute" if self._num_residencies > 1 else "prefill"
        return "decode"

    def take(self, kind: MomentKind, num_tokens: int, time: float) -> None:
        """What happened next."""
        match kind:
            case "scheduled":
                self.close(time)
                self._num_residencies += 1
                self._is_resident, self._is_paused, self._num_left = True, False, num_tokens
            case "chunk":
                if not self._is_paused:
                    self.close(time, num_tokens)
                self._num_left -= num_tokens
            case "paused":
                self.close(time)
                self._is_paused = True
            case "resumed":
                self.close(time)
                self._is_paused = False
            case "evicted" | "dropped" | "queued":  # queued: a second time, elsewhere
                self.close(time)
                self._is_resident = self._is_paused = False
            case "ended" | "refused":
                self.close(time)

    def close(self, time: float, num_tokens: int = 0) -> None:
        """The present state ends here; whatever comes next begins."""
        if time > self.since:
            self.closed.append(Span(self.state, self.since, time, num_tokens))
        self.since = time
