"""Control verbs, and what operators ask."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from perdure.api.command import CachePolicy, InFlightPolicy, KVMode, PauseMode, Tag, WeightsMode
from perdure.server.protocol.common import Body, Told

DtypeName = Literal["float32", "float16", "bfloat16", "float8_e4m3fn"]
Size = Annotated[int, msgspec.Meta(ge=0, le=2**40)]


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


class SleepRequest(Body, kw_only=True):
    """Of vLLM. In a query all is text."""

    level: Literal[1, 2, "1", "2"] = 1


class WakeRequest(Body, kw_only=True):
    """Of vLLM, which says kv_cache."""

    tags: list[Literal["weights", "kv", "kv_cache"]] | None = None


class AbortRequest(Body, kw_only=True):
    """request_ids: of live requests; null = all, whoever submitted them."""

    request_ids: str | int | list[str | int] | None = None


class TensorShape(Body, kw_only=True):
    """offset: where it begins in shared memory, in bytes."""

    name: str
    dtype: DtypeName
    shape: list[Size]
    offset: Annotated[int, msgspec.Meta(ge=0, le=2**62)] = 0


class SharedTensors(Body, kw_only=True):
    """file: its path, or shm: a name of POSIX shared memory. tensors: what lies where; null = it is safetensors."""

    file: str | None = None
    shm: str | None = None
    tensors: list[TensorShape] | None = None


class Broadcast(Body, kw_only=True):
    """tensors: in the order in which `root` sends them to the group of `/init_weight_group`."""

    tensors: list[TensorShape]
    root: int = 0


class GroupRequest(Body, kw_only=True):
    """Of torch.distributed: where its store is, this server's rank, how many ranks there are, and for how long anybody
    waits for anybody."""

    master_address: str
    master_port: Annotated[int, msgspec.Meta(ge=1, le=65535)]
    rank: int = 1
    world_size: Annotated[int, msgspec.Meta(ge=2, le=65536)] = 2
    backend: Literal["gloo", "nccl"] = "gloo"
    timeout_s: Annotated[float, msgspec.Meta(gt=0, le=86400)] = 300.0


class WeightsRequest(Body, kw_only=True):
    """weights: a directory or a GGUF file that the engine can read; shared, broadcast: tensors instead, by the names
    that Hugging Face's files give them. None of these moves the epoch alone."""

    weights: str | None = None
    shared: SharedTensors | None = None
    broadcast: Broadcast | None = None
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
