"""Control verbs, and what operators ask."""

from __future__ import annotations

from typing import Any, Literal

from perdure.api.command import CachePolicy, InFlightPolicy, KVMode, PauseMode, Tag, WeightsMode
from perdure.server.protocol.common import Body, Told


class Ready(Told, kw_only=True):
    ready: bool
    state: str


class Version(Told, kw_only=True):
    version: str


class State(Told, kw_only=True):
    """The engine's, as `LLM.stats()` has it."""

    state: str
    is_draining: bool
    stats: dict[str, Any]


class Nothing(Body, kw_only=True):
    """No field."""


class PauseRequest(Body, kw_only=True):
    """keep: requests stay; wait: they end first; abort: now."""

    mode: PauseMode = "keep"


class SuspendRequest(Body, kw_only=True):
    kv: KVMode = "persist"
    weights: WeightsMode = "keep"


class ResumeRequest(Body, kw_only=True):
    tags: list[Tag] | None = None


class AbortRequest(Body, kw_only=True):
    """request_ids: of live requests; null = all, whoever submitted them."""

    request_ids: str | int | list[str | int] | None = None


class WeightsRequest(Body, kw_only=True):
    """weights: a directory or a GGUF file that the engine can read; null moves the epoch alone."""

    weights: str | None = None
    epoch: int | None = None
    cache: CachePolicy = "invalidate"
    in_flight: InFlightPolicy = "recompute"


class CheckpointRequest(Body, kw_only=True):
    request_id: str | int
    end: bool = False


class Asleep(Told, kw_only=True):
    is_sleeping: bool


class Done(Told, kw_only=True):
    status: Literal["ok"] = "ok"
