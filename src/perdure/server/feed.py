"""`Feed`: what is going on, as the page looks at it: `GET /state/live`.

- A look costs as much as the requests it shows, at most `MOST_SHOWN`, and one serves all who look within `FRESH_S`.
- It waits for nobody: an engine that is in a long step, or waits for an order, is shown as it was heard of last.
- Numbers and names of requests only. Who may ask for answers may look.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from itertools import islice
from typing import Generic, NamedTuple, Protocol, TypeVar

from msgspec.structs import replace

from perdure import AsyncLLM, EngineDead, PerdureError, RequestOutput, SamplingParams
from perdure.api.output import RequestMetrics
from perdure.api.span import Spans, State
from perdure.server.protocol.live import Live, LiveRequest

T = TypeVar("T")

FRESH_S = 0.25
"""For so long one look serves everybody."""
PATIENCE_S = 0.25
"""How long one look waits for the engine."""
KEPT_S = 20.0
"""How long a request is shown after its end."""
MOST_ENDED = 40
MOST_SHOWN = 200
MOST_SPANS = 40


class Handle(Protocol):
    """What `AsyncLLM.submit` gives, as far as it is looked at."""

    @property
    def request_id(self) -> str | int: ...

    @property
    def metrics(self) -> RequestMetrics: ...

    @property
    def num_output_tokens(self) -> int: ...

    def add_done_callback(self, call: Callable[[RequestOutput | BaseException], None]) -> None: ...


class Followed(NamedTuple):
    """A request of this front end. streams: whether its tokens are told as they come."""

    request_id: str | int
    num_prompt_tokens: int
    n: int
    streams: bool


class Ended(NamedTuple):
    """What is kept of one that has ended: neither prompt nor output."""

    request: Followed
    metrics: RequestMetrics
    num_output_tokens: int
    at: float
    reason: str | None


class Asked(Generic[T]):
    """A question that is asked once at a time, and its last answer. at: when that came."""

    def __init__(self, question: Callable[[], Awaitable[T]]) -> None:
        self.answer: T | None = None
        self.at = 0.0
        self._question = question
        self._task: asyncio.Task[None] | None = None

    async def ask(self) -> None:
        """Returns when it is answered, or after `PATIENCE_S`. An engine that cannot answer now is shown as it was.
        Raises `EngineDead`."""
        if self._task is None:
            self._task = asyncio.create_task(self._take())
        await asyncio.wait({self._task}, timeout=PATIENCE_S)
        if self._task.done():
            done, self._task = self._task, None
            done.result()

    async def _take(self) -> None:
        try:
            self.answer, self.at = await self._question(), time.monotonic()
        except EngineDead:
            raise
        except PerdureError:
            pass


class Feed:
    """Of one front end."""

    def __init__(self, llm: AsyncLLM, model: str) -> None:
        self._model = model
        self._live: dict[int, tuple[Followed, Handle]] = {}
        self._next = 0
        self._ended: deque[Ended] = deque(maxlen=MOST_ENDED)
        self._stats = Asked(llm.stats)
        self._replicas = Asked(llm.replicas)
        self._looking: asyncio.Task[Live] | None = None
        self._looked_at = 0.0

    def follow(self, handle: Handle, num_prompt_tokens: int, params: SamplingParams) -> None:
        """A request was submitted."""
        number, self._next = self._next, self._next + 1
        one = Followed(handle.request_id, num_prompt_tokens, params.n, params.output_kind != "final")
        self._live[number] = one, handle
        handle.add_done_callback(lambda result: self._leave(number, result))

    def _leave(self, number: int, result: RequestOutput | BaseException) -> None:
        one, _ = self._live.pop(number)
        if not isinstance(result, RequestOutput) or result.metrics is None:
            return
        if (at := result.metrics.finished_time) is None:
            return
        count = sum(event.num_tokens for event in result.metrics.events if event.kind == "ended")
        self._ended.append(Ended(one, result.metrics, count, at, result.outputs[0].finish_reason))

    async def look(self, is_draining: bool) -> Live:
        """Raises `EngineDead`."""
        now = time.monotonic()
        if self._looking is None or (self._looking.done() and now - self._looked_at > FRESH_S):
            self._looking, self._looked_at = asyncio.create_task(self._look(is_draining)), now
        return await asyncio.shield(self._looking)

    async def _look(self, is_draining: bool) -> Live:
        await self._stats.ask()
        await self._replicas.ask()
        now, stats, found = time.monotonic(), self._stats.answer, self._replicas.answer
        owners = {} if found is None else found.owners
        paused = set() if stats is None else set(stats.paused_ids)
        shown = []
        for one, handle in islice(self._live.values(), MOST_SHOWN):
            name = one.request_id
            shown.append(_shown(one, handle.metrics, handle.num_output_tokens, now, owners.get(name), name in paused))
        num_not_shown = len(self._live) - len(shown)
        shown += [_shown_ended(one, now) for one in self._ended if now - one.at <= KEPT_S]
        return Live(
            time=now,
            model=self._model,
            is_draining=is_draining,
            stats=stats,
            stats_age_s=0.0 if stats is None else round(now - self._stats.at, 3),
            replicas=[] if found is None else found.replicas,
            requests=shown,
            num_not_shown=num_not_shown,
        )


def together(looks: Sequence[Live]) -> Live:
    """Of several front ends, in the same order."""
    if len(looks) == 1:
        return looks[0]
    found = [one for look in looks for one in look.requests]
    in_flight = sorted((one for one in found if one.ended_s is None), key=lambda one: -one.age_s)
    ended = sorted((one for one in found if one.ended_s is not None), key=lambda one: -(one.ended_s or 0.0))
    num_not_shown = sum(look.num_not_shown for look in looks) + max(0, len(in_flight) - MOST_SHOWN)
    shown = [*in_flight[:MOST_SHOWN], *ended[-MOST_ENDED:]]
    return replace(looks[0], requests=shown, num_not_shown=num_not_shown)


def _shown(
    one: Followed, metrics: RequestMetrics, num_output_tokens: int, now: float, replica: int | None, is_paused: bool
) -> LiveRequest:
    spans = _spans(metrics, one.n, now)
    return LiveRequest(
        request_id=str(one.request_id),
        state="paused" if is_paused else spans[-1][0],
        age_s=round(now - metrics.arrival_time, 3),
        spans=[(state, round(now - start, 3)) for state, start in spans],
        n=one.n,
        num_prompt_tokens=one.num_prompt_tokens,
        num_output_tokens=num_output_tokens if one.streams else None,
        replica=replica,
    )


def _shown_ended(one: Ended, now: float) -> LiveRequest:
    request = one.request._replace(streams=True)
    shown = _shown(request, one.metrics, one.num_output_tokens, now, None, False)
    return replace(shown, state="ended", ended_s=round(now - one.at, 3), reason=one.reason)


def _spans(metrics: RequestMetrics, n: int, now: float) -> list[tuple[State, float]]:
    """The states of its first sample that goes on, else of the last that did, and when each began: the latest
    `MOST_SPANS`. Chunks of a prompt are one."""
    ended = [event.child for event in metrics.events if event.kind == "ended"]
    child = next((child for child in range(n) if child not in ended), ended[-1] if ended else 0)
    found = Spans(metrics.arrival_time)
    for event in metrics.events:
        if event.child == child:
            found.take(event.kind, event.num_tokens, event.time)
    found.close(now)
    changes: list[tuple[State, float]] = []
    for span in found.closed:
        if not changes or changes[-1][0] != span.state:
            changes.append((span.state, span.start))
    return changes[-MOST_SPANS:] or [(found.state, now)]
