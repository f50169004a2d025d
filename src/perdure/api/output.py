"""Results as callers see them, in vLLM's shape, the same for every ending. Built once, from the record."""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.api.event import FinishReason
from perdure.api.moment import MomentKind, RequestEvent
from perdure.api.request import RequestId
from perdure.api.scores import TokenScores


class CompletionOutput(msgspec.Struct, frozen=True):
    """One sample. len(token_ids) == len(logprobs) whenever scores were asked, in each streamed part too.

    index: which of the request's n. stop_reason: None for an end id of the model, else the id, the sequence or the
    string that stopped it.
    weight_epochs: (first output index, epoch) wherever other weights took over; in a part, those that begin in it.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: TokenScores | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | tuple[int, ...] | str | None = None
    weight_epochs: list[tuple[int, int]] = []

    @property
    def selected_logprobs(self) -> list[float] | None:
        """The chosen tokens' scores alone."""
        return None if self.logprobs is None else list(self.logprobs.chosen)

    @property
    def cumulative_logprob(self) -> float | None:
        return None if self.logprobs is None else float(sum(self.logprobs.chosen))


class RequestMetrics(msgspec.Struct, frozen=True):
    """When and how a request went its way, in seconds on one monotonic clock.

    arrival_time: of the call that submitted it. events: from "queued" to "ended", in order; with n > 1 of all its
    samples, and the counts are theirs together.
    """

    arrival_time: float
    events: tuple[RequestEvent, ...]
    num_pauses: int = 0
    num_evictions: int = 0
    num_checkpoints: int = 0

    def _first(self, kind: MomentKind) -> float | None:
        return next((event.time for event in self.events if event.kind == kind), None)

    @property
    def first_scheduled_time(self) -> float | None:
        return self._first("scheduled")

    @property
    def first_token_time(self) -> float | None:
        """None if no token came."""
        return self._first("first_token")

    @property
    def finished_time(self) -> float | None:
        """Of its last sample."""
        return next((event.time for event in reversed(self.events) if event.kind == "ended"), None)

    @property
    def time_in_queue(self) -> float | None:
        """Seconds from its arrival to its first pages; None if it never had any."""
        scheduled = self.first_scheduled_time
        return None if scheduled is None else scheduled - self.arrival_time


class RequestOutput(msgspec.Struct, frozen=True):
    """One request's result, or one streamed part of it (`finished` False).

    outputs: in the order of their index, n of them. A streamed part has one, of the sample that its index names; a
    sample's last part has its finish_reason, and the request's last part is `finished`.
    prompt and prompt_token_ids are None unless asked by `return_prompt`. error: what ended it, or the first of its
    samples that has reason "error".
    exact: nothing on the way weakened the promise that this equals the undisturbed run; False after a checkpoint
    crossed to an engine of another fingerprint and, without batch invariance, after a hit, an eviction or a move.
    """

    request_id: RequestId
    outputs: list[CompletionOutput]
    finished: bool
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: TokenScores | None = None
    num_cached_tokens: int = 0
    exact: bool = True
    metrics: RequestMetrics | None = None
    error: Exception | None = None


class ReplicaStatus(msgspec.Struct, frozen=True):
    """One engine of those that serve together. index: its place among them. num_requests: that it has now, whoever
    submitted them. for_s: how long it has been so.

    state: serving; joining, which is being brought into line with the others; lost, until another takes its place.
    """

    index: int
    state: Literal["serving", "joining", "lost"]
    num_requests: int
    for_s: float


class Replicas(msgspec.Struct, frozen=True):
    """owners: the index of the replica that computes a request, of the requests of whoever asks."""

    replicas: list[ReplicaStatus]
    owners: dict[RequestId, int]


class Stats(msgspec.Struct, frozen=True):
    """A snapshot of the scheduler. Counts of requests are of now, the others since start or `reset`.

    state: running, paused, suspended or stopped. paused_ids: requests that wait for a page, in order; an engine that is
    paused need have none. A request with n > 1 counts n times, but for its prompt's tokens. num_pinned_pages: held by
    `pin_prefix`, whoever else holds them.
    """

    state: str
    weight_epoch: int
    paused_ids: list[RequestId]
    num_pages: int
    num_free_pages: int
    num_pinned_pages: int
    num_running: int
    num_waiting: int
    num_paused: int
    num_requests: int
    num_pauses: int
    num_evictions: int
    num_steps: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
