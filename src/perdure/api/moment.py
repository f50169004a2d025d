"""What can happen to a request on its way, and when it did."""

from __future__ import annotations

from typing import Literal

import msgspec

MomentKind = Literal[
    "queued",  # admitted, and waiting; detail: the request's id
    "held",  # waits for something beside the loop; detail: what that is
    "released",  # that is ready
    "awaits",  # waits on, because another request is about to publish pages of its prompt
    "scheduled",  # has a slot and pages; num_tokens: known tokens it has to compute before it goes on
    "chunk",  # so many of these were computed in one step
    "first_token",  # the first output token is known
    "paused",  # no page for its next position; it keeps those it has
    "resumed",  # goes on after a pause
    "evicted",  # its pages are taken; what was computed will be computed again
    "dropped",  # the same, because the whole engine's KV was dropped
    "checkpoint",  # a checkpoint of it was given out; num_tokens: output tokens so far
    "ended",  # detail: the finish reason; num_tokens: output tokens
    "refused",  # never begun; detail: the error's class
]


class RequestEvent(msgspec.Struct, frozen=True, array_like=True):
    """Something that happened to a request (`MomentKind` says what, and what `num_tokens` counts), and when. child: to
    which of its samples."""

    kind: MomentKind
    time: float
    num_tokens: int = 0
    child: int = 0
