"""What a caller may ask of the engine loop. Plain values: a journal of them replays a run.

A `ticket` is the caller's number for the answer: requests are answered by `event.Refused` or `event.Ended`,
`TakeCheckpoint` by `event.Taken` or a failed `event.Done`, the rest by `event.Done`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.api.checkpoint import Checkpoint
from perdure.api.request import Request, RequestId

PauseMode = Literal["keep", "wait", "abort"]


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Admit one request, or refuse it before anything of it exists.

    checkpoint: where it goes on; the request's prompt and settings are the checkpoint's then. None: from its prompt.
    """

    request: Request
    checkpoint: Checkpoint | None = None


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End live requests with what they have. Unknown and finished ones are left alone; `everything` ends all."""

    request_ids: list[RequestId] = []
    tickets: list[int] = []
    everything: bool = False


class TakeCheckpoint(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give out a live request, named by its id or, if that is None, by its submitter's ticket.

    end: end it at once with what it has, as `Abort` does; else it lives on and does not notice.
    """

    ticket: int
    request_id: RequestId | None = None
    request_ticket: int | None = None
    end: bool = False


class Pause(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop planning. Answered when no step is in flight and no token will come before `Resume`.

    keep: requests stay as they are. wait: those admitted so far end first. abort: all are ended now.
    """

    ticket: int
    mode: PauseMode = "keep"


class Resume(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Go on after `Pause`; nothing happens in a running engine."""

    ticket: int


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Unpublish every cached prefix. Live requests keep their pages."""

    ticket: int


class GetStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered with an `api.output.Stats`."""

    ticket: int


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End every request with what it has, then the loop. Answered when drained."""

    ticket: int


Command = Submit | Abort | TakeCheckpoint | Pause | Resume | ResetPrefixCache | GetStats | Stop
