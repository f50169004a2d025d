"""What a caller may ask of the engine loop. Plain values: a journal of them replays a run.

A `ticket` is the caller's number for the answer: requests are answered by `event.Refused` or `event.Ended`,
`TakeCheckpoint` by `event.Taken` or a failed `event.Done`, the rest by `event.Done`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from perdure.api.checkpoint import Checkpoint
from perdure.api.event import Failure
from perdure.api.request import Request, RequestId

PauseMode = Literal["keep", "wait", "abort"]
KVMode = Literal["persist", "offload", "recompute"]
WeightsMode = Literal["keep", "offload", "drop"]
Tag = Literal["weights", "kv"]
CachePolicy = Literal["invalidate", "salt", "keep"]
InFlightPolicy = Literal["recompute", "keep"]


class Submit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Admit one request, or refuse it before anything of it exists.

    checkpoint: where it goes on; the request's prompt and settings are the checkpoint's then. None: from its prompt.
    again: it was given to a replica that is lost, so it is no newcomer: an engine that is suspended, or whose queue is
    full, takes it as one of those inside.
    """

    request: Request
    checkpoint: Checkpoint | None = None
    again: bool = False


class Abort(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End live requests with what they have. Unknown and finished ones are left alone; `everything` ends all."""

    request_ids: list[RequestId] = []
    tickets: list[int] = []
    everything: bool = False


class Prepared(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """What a request waits for is ready, or cannot be made: then it is refused. request_ticket: its submitter's."""

    request_ticket: int
    failure: Failure | None = None


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


class Suspend(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Stop planning and, once no step is in flight, give memory back until `Resume`. Nothing is submitted meanwhile.

    kv: stays where it is; is copied out and back; or is dropped and computed again. weights: stay, are copied out and
    back, or are dropped, to be updated before the KV wakes. Nothing happens in a suspended engine.
    """

    ticket: int
    kv: KVMode = "persist"
    weights: WeightsMode = "keep"


class Resume(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Go on after `Pause` or `Suspend`; nothing happens in a running engine.

    tags: what wakes of a suspended engine, None = all. It runs when everything is awake.
    """

    ticket: int
    tags: list[Tag] | None = None


class Reset(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Begin anew, as after start: empty cache, counts at zero. Refused with requests inside, or while suspended."""

    ticket: int


class UpdateWeights(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Load weights that the device was given under this ticket, or with has_weights=False move the epoch alone.

    epoch: the number of these weights in results, None = one more than now. cache: keys are forgotten; are found again
    only under their own epoch; or stay, and a result that used one is not exact. in_flight: what requests inside have
    computed is computed again; or stays, and their results are not exact.
    """

    ticket: int
    epoch: int | None = None
    has_weights: bool = True
    cache: CachePolicy = "invalidate"
    in_flight: InFlightPolicy = "recompute"


class ResetPrefixCache(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Unpublish every cached prefix. Live requests keep their pages; pins hold what is computed anew."""

    ticket: int


class PinPrefix(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Keep the full pages of this prefix from being reclaimed: those that are cached, and further ones as requests
    compute them. Answered with the number of tokens in them. The ticket names the pin."""

    ticket: int
    prompt_token_ids: list[int]
    cache_salt: str | None = None


class UnpinPrefix(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Give up a pin, named by the ticket of its `PinPrefix`. Nothing happens if there is none."""

    ticket: int
    pin: int


class GetStats(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Answered with an `api.output.Stats`."""

    ticket: int


class GetReplicas(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Of a client: who serves, answered by the coordinator at once, whatever the replicas are doing, with an
    `api.output.Replicas`."""

    ticket: int


class Stop(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """End every request with what it has, then the loop. Answered when drained."""

    ticket: int


Order = Pause | Suspend | Resume | Reset | UpdateWeights
"""Commands that change the engine's state; each waits for those before it."""

Command = (
    Submit
    | Prepared
    | Abort
    | TakeCheckpoint
    | Order
    | ResetPrefixCache
    | PinPrefix
    | UnpinPrefix
    | GetStats
    | GetReplicas
    | Stop
)
