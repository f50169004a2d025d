"""What the page shows, from one look to the next. No prompt, no text, no token is in it."""

from __future__ import annotations

from perdure.api.output import ReplicaStatus, Stats
from perdure.api.span import State
from perdure.server.protocol.common import Told


class LiveRequest(Told, kw_only=True):
    """One request, or one that ended within the last seconds. age_s: since it arrived. state: what it does now; "ended"
    at the end, and then `ended_s` ago and for the `reason`.

    spans: (state, how many seconds ago it began), one after another; the last goes on, or went on until the end.
    num_output_tokens: of all its n samples; null of one that does not stream, until it ends. replica: who computes it,
    if that is known.
    """

    request_id: str
    state: str
    age_s: float
    spans: list[tuple[State, float]]
    n: int
    num_prompt_tokens: int
    num_output_tokens: int | None
    replica: int | None
    ended_s: float | None = None
    reason: str | None = None


class Live(Told, kw_only=True):
    """time: on the server's clock, in seconds. requests: by arrival, of all front ends, those in flight before those
    that have ended. num_not_shown: in flight, too, and too many for one look. stats: of all replicas together, heard
    `stats_age_s` ago; null until then.
    """

    time: float
    model: str
    is_draining: bool
    stats: Stats | None
    stats_age_s: float
    replicas: list[ReplicaStatus]
    requests: list[LiveRequest]
    num_not_shown: int
