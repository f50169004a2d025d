"""Receivers of requests: they collect a request's events on the loop's thread and hand its result to whoever waits."""

from __future__ import annotations

import time
from collections.abc import Callable

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.checkpoint import Timing
from perdure.api.errors import PerdureError
from perdure.api.event import Event
from perdure.api.output import CompletionOutput, RequestMetrics, RequestOutput
from perdure.api.request import RequestId
from perdure.api.sampling import SamplingParams
from perdure.api.scores import TokenScores


class Arrivals:
    """Times of one request, and its last event. Times of a request that goes on from a checkpoint are shifted as if it
    had not lain in between. on_event is called on the loop's thread after each event."""

    def __init__(self, submission: cmd.Submit, on_event: Callable[[Event | PerdureError], None]) -> None:
        self.submission = submission
        self.request = submission.request
        self._on_event = on_event
        past = Timing() if submission.checkpoint is None else submission.checkpoint.timing
        self._arrival_time = time.monotonic() - past.elapsed_s
        self._first_token_time = None if past.first_token_s is None else self._arrival_time + past.first_token_s
        self._finished_time: float | None = None

    def deliver(self, event: Event) -> None:
        if isinstance(event, ev.FirstToken):
            self._first_token_time = time.monotonic()
            return
        if isinstance(event, ev.Ended):
            self._finished_time = time.monotonic()
        self._on_event(event)

    def fail(self, error: PerdureError) -> None:
        self._on_event(error)

    def timing(self) -> Timing:
        """Until now, for a checkpoint."""
        first, begin = self._first_token_time, self._arrival_time
        return Timing(time.monotonic() - begin, None if first is None else first - begin)

    def metrics(self, record: ev.Record) -> RequestMetrics:
        return RequestMetrics(
            self._arrival_time,
            self._first_token_time,
            self._finished_time,
            num_pauses=record.num_pauses,
            num_evictions=record.num_evictions,
            num_checkpoints=record.num_checkpoints,
        )


def refused_output(request_id: RequestId, params: SamplingParams, error: PerdureError) -> RequestOutput:
    """What stands in a list of results for a request that was not admitted."""
    scores = None if params.logprobs is None else TokenScores()
    completion = CompletionOutput(index=0, text="", token_ids=[], logprobs=scores, finish_reason="error")
    return RequestOutput(request_id, [completion], finished=True, error=error)
