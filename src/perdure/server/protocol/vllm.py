"""What clients of vLLM ask a server about itself."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from perdure.server.protocol.common import Body, Told
from perdure.server.protocol.control import DtypeName, Size, WeightsRequest

Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Ranks = Annotated[int, msgspec.Meta(ge=2, le=65536)]


class ServerInfo(Told, kw_only=True):
    """vllm_config: the settings that clients look up, under vLLM's names; configuration: all of ours."""

    vllm_config: dict[str, Any]
    configuration: dict[str, Any]


class WorldSize(Told, kw_only=True):
    world_size: int


class TokenizerInfo(Told, kw_only=True):
    """Enough to use `/tokenize` and `/detokenize` as a tokenizer."""

    bos_token: str | None
    eos_token: str | None
    model_max_length: int | None = None


class CacheCleared(Told, kw_only=True):
    status: Literal["ok"] = "ok"
    success: bool = True


class InitInfo(Body, kw_only=True):
    """Where the trainer, rank 0, waits; this server is rank_offset. packed: as in `UpdateInfo`, for all updates."""

    master_address: str
    master_port: Port
    rank_offset: int = 1
    world_size: Ranks
    packed: bool = False


class InitTransferRequest(Body, kw_only=True):
    init_info: InitInfo


class StartUpdateRequest(Body, kw_only=True):
    """is_checkpoint_format: tensors have the names and shapes of a checkpoint's; the only form that is taken."""

    is_checkpoint_format: Literal[True] = True


class UpdateInfo(Body, kw_only=True):
    """Tensors in the order in which they are broadcast. packed: several as one, up to more than so many bytes."""

    names: list[str]
    dtype_names: list[DtypeName]
    shapes: list[list[Size]]
    packed: bool | None = None
    packed_buffer_size_bytes: Annotated[int, msgspec.Meta(ge=1, le=2**40)] = 2**30
    packed_num_buffers: int = 2


class UpdateRequest(WeightsRequest, kw_only=True):
    """`/weights`, or a trainer's tensors over the group of `/init_weight_transfer_engine`."""

    update_info: UpdateInfo | None = None


class InitCommunicatorRequest(Body, kw_only=True):
    """Of TRL's own server: this one is rank 0 and listens, the client is the last rank."""

    host: str = "0.0.0.0"
    port: Port
    world_size: Ranks = 2
    client_device_uuid: str | None = None


class NamedTensorRequest(Body, kw_only=True):
    """One tensor, which is broadcast after the answer."""

    name: str
    dtype: str
    shape: list[Size]


class TrlSampling(Body, kw_only=True):
    """Settings as TRL's own server takes them. Clients that give logprobs are told lists of scores, others one score a
    token. truncate_prompt_tokens: of a prompt the last so many ids; -1 = all."""

    n: int = 1
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int = 16
    logprobs: int | None | UnsetType = UNSET
    truncate_prompt_tokens: Annotated[int, msgspec.Meta(ge=-1)] | None = None
    guided_decoding_regex: str | None = None
    structured_outputs_regex: str | None = None
    generation_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)


class GenerateRequest(TrlSampling, kw_only=True):
    """Continue these."""

    prompts: list[str | list[int]]
    images: None = None


class ConversationsRequest(TrlSampling, kw_only=True):
    """Several at once, with one set of tools."""

    messages: list[list[dict[str, Any]]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class Generated(Told, kw_only=True):
    """completion_ids: n for each prompt, one after another."""

    prompt_ids: list[list[int]]
    completion_ids: list[list[int]]
    logprobs: list[list[float | list[float]]] | None
    logprob_token_ids: list[list[list[int]]] | None | UnsetType = UNSET
