"""`Timeline`: a run as its journal tells it: requests as spans of states, steps, how full the engine was.

- Times are seconds since the journal's first entry.
- A request's spans follow one another without a gap, from "queued" to its end, or to the journal's if it has none.
- A kind of moment that is not known here changes no state: it is kept as a mark, so a new kind shows without a line.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import msgspec

from perdure.api.config import CoreConfig
from perdure.api.event import Moment
from perdure.api.moment import MomentKind
from perdure.api.plan import StepPlan
from perdure.api.request import RequestId
from perdure.api.span import Span, Spans
from perdure.core.journal import Committed, Entry, Launched, Level, Told

UNREMARKABLE = ("running", "stopped")
"""States of an engine that need no span: what they mean for requests is seen at these."""

LABEL_LENGTH = 24


class Mark(msgspec.Struct, frozen=True):
    """A moment that is no change of state."""

    kind: MomentKind
    time: float
    num_tokens: int = 0


class Step(msgspec.Struct, frozen=True):
    """One step: from its launch, or the end of the step before, to its commit."""

    number: int
    start: float
    end: float
    num_rows: int
    num_positions: int


class EngineSpan(msgspec.Struct, frozen=True):
    """A time in which the whole engine was paused or suspended."""

    state: str
    start: float
    end: float


class Track:
    """The way of one request, or of one of its samples. end_reason: as in its result, or "refused"; None if the journal
    ends before it."""

    def __init__(self, moment: Moment, time: float) -> None:
        self.ticket = moment.ticket
        self.child = moment.child
        self.request_id: RequestId = moment.detail
        self.queued = time
        self.marks: list[Mark] = []
        self.ended: float | None = None
        self.end_reason: str | None = None
        self.num_output = 0
        self.num_pauses = 0
        self.num_evictions = 0
        self.num_puts_back = 0
        """How often its pages were taken, by eviction or with the whole engine's."""
        self._spans = Spans(time)

    @property
    def label(self) -> str:
        """Its id on one line; that of a later sample of a request has its index too."""
        text = f"{self.request_id} #{self.child}" if self.child else str(self.request_id)
        text = text if text.isprintable() else repr(text)
        return text if len(text) <= LABEL_LENGTH else text[: LABEL_LENGTH - 1] + "…"

    @property
    def time_in_queue(self) -> float | None:
        """Until its first pages; None if it never had any."""
        return next((span.start - self.queued for span in self.spans if span.state != "waiting"), None)

    @property
    def time_to_first_token(self) -> float | None:
        return next((mark.time - self.queued for mark in self.marks if mark.kind == "first_token"), None)

    @property
    def spans(self) -> list[Span]:
        return self._spans.closed

    def take(self, moment: Moment, time: float) -> None:
        """What happened next."""
        self._spans.take(moment.kind, moment.num_tokens, time)
        match moment.kind:
            case "queued" | "scheduled" | "chunk" | "resumed":
                pass
            case "paused":
                self.num_pauses += 1
            case "evicted" | "dropped":
                self.num_evictions += moment.kind == "evicted"
                self.num_puts_back += 1
            case "ended" | "refused":
                reason = str(moment.detail) if moment.kind == "ended" else moment.kind
                self.ended, self.end_reason, self.num_output = time, reason, moment.num_tokens
            case kind:
                self.marks.append(Mark(kind, time, moment.num_tokens))

    def close(self, time: float) -> None:
        """The journal ends."""
        if self.ended is None:
            self._spans.close(time)


class Timeline:
    """tracks: in the order of submission. levels: (time, level) whenever it changed."""

    def __init__(self, config: CoreConfig, entries: Iterable[Entry]) -> None:
        self.config = config
        self.duration = 0.0
        self.tracks: list[Track] = []
        self.num_refused = 0
        self.steps: list[Step] = []
        self.levels: list[tuple[float, Level]] = []
        self.engine_spans: list[EngineSpan] = []
        self._live: dict[tuple[int, int], Track] = {}
        """By ticket and child."""
        self._launched: deque[tuple[StepPlan, float]] = deque()
        self._engine: tuple[str, float] = (UNREMARKABLE[0], 0.0)
        """Its state, and since when."""
        start: float | None = None
        for entry in entries:
            start = entry.time if start is None else start
            self.duration = entry.time - start
            self._take(entry, self.duration)
        for track in self._live.values():
            track.close(self.duration)
        self._set_engine(UNREMARKABLE[0], self.duration)

    def _take(self, entry: Entry, time: float) -> None:
        match entry:
            case Launched(plan) if plan is not None:
                self._launched.append((plan, time))
            case Committed():
                self._commit(time)
            case Told(moments, level):
                for moment in moments:
                    self._tell(moment, time)
                if not self.levels or level != self.levels[-1][1]:
                    self.levels.append((time, level))
                self._set_engine(level.state, time)

    def _commit(self, time: float) -> None:
        plan, since = self._launched.popleft()
        start = max(since, self.steps[-1].end if self.steps else since)
        self.steps.append(Step(plan.step, start, time, len(plan.request), sum(plan.length)))

    def _tell(self, moment: Moment, time: float) -> None:
        if moment.kind == "refused":
            self.num_refused += 1
            for key in [key for key in self._live if key[0] == moment.ticket]:
                self._live.pop(key).take(moment, time)
            return
        key = moment.ticket, moment.child
        if moment.kind == "queued":
            self._live[key] = track = Track(moment, time)
            self.tracks.append(track)
        self._live[key].take(moment, time)
        if moment.kind == "ended":
            del self._live[key]

    def _set_engine(self, state: str, time: float) -> None:
        before, since = self._engine
        if state != before:
            if before not in UNREMARKABLE:
                self.engine_spans.append(EngineSpan(before, since, time))
            self._engine = (state, time)
