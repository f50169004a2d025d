"""Receivers of requests: they collect a request's events on the loop's thread and hand its result to whoever waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from msgspec.structs import replace

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Timing
from perdure.api.errors import InvalidValue, PerdureError, QueueFull, StateError
from perdure.api.event import Event
from perdure.api.moment import RequestEvent
from perdure.api.output import CompletionOutput, RequestMetrics, RequestOutput
from perdure.api.request import RequestId
from perdure.api.sampling import SamplingParams
from perdure.api.scores import TokenScores

REFUSALS = (InvalidValue, StateError, QueueFull)
"""Errors of a request that was never admitted."""


class Arrivals:
    """What happened to one request and when, and the records of its children. on_event is called on the loop's thread
    with all that is more than a moment on the way; the last is a refusal, an error or an `Ended` that leaves nobody.

    A request that goes on from a checkpoint brings its past; the time it lay as one does not count.
    """

    def __init__(self, submission: cmd.Submit, on_event: Callable[[Event | PerdureError], None]) -> None:
        self.submission = submission
        self.request = submission.request
        self.records: list[ev.Record] = []
        """As they ended."""
        self._on_event = on_event
        self._num_told: dict[int, int] = {}
        """Tokens of each child, as far as they were told."""
        past = Timing() if submission.checkpoint is None else submission.checkpoint.timing
        self._arrival_time = time.monotonic() - past.elapsed_s
        self._events = [replace(event, time=self._arrival_time + event.time) for event in past.events]

    def deliver(self, event: Event, time: float) -> None:
        if isinstance(event, ev.Moment):
            self._events.append(RequestEvent(event.kind, time, event.num_tokens, event.child))
            return
        if isinstance(event, ev.Ended):
            record = event.record
            self._events.append(RequestEvent("ended", time, len(record.token_ids), record.child))
            self.records.append(record)
        elif isinstance(event, ev.Progress):
            self._num_told[event.child] = event.first + len(event.token_ids)
        self._on_event(event)

    def fail(self, error: PerdureError) -> None:
        self._on_event(error)

    def timing(self, now: float) -> Timing:
        """For a checkpoint that is taken now."""
        begin = self._arrival_time
        return Timing(now - begin, tuple(replace(event, time=event.time - begin) for event in self._events))

    def metrics(self) -> RequestMetrics:
        """Until now; pauses and evictions of those that have ended."""
        return RequestMetrics(
            self._arrival_time,
            tuple(self._events),
            num_pauses=sum(record.num_pauses for record in self.records),
            num_evictions=sum(record.num_evictions for record in self.records),
            num_checkpoints=self.records[0].num_checkpoints if self.records else 0,
        )

    @property
    def num_output_tokens(self) -> int:
        """Of a request that streams, so far; of all its samples."""
        ended = {record.child for record in self.records}
        going_on = (count for child, count in self._num_told.items() if child not in ended)
        return sum(len(record.token_ids) for record in self.records) + sum(going_on)


def refused_output(request_id: RequestId, params: SamplingParams, error: PerdureError) -> RequestOutput:
    """What stands in a list of results for a request that was not admitted."""
    outputs = []
    for index in range(params.n):
        scores = TokenScores(listed_ids=params.logprob_token_ids) if params.asks_scores else None
        outputs.append(CompletionOutput(index=index, text="", token_ids=[], logprobs=scores, finish_reason="error"))
    return RequestOutput(request_id, outputs, finished=True, error=error)
