"""What bodies of several endpoints have in common: settings of sampling, errors, usage, models."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from perdure.api.sampling import LogprobsMode, SamplingParams


class Body(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a client sends. A field that nobody knows is refused: what is asked is done, or said not to be."""


class Told(msgspec.Struct, kw_only=True):
    """What we send. A field that is UNSET is not there."""


class ErrorDetail(Told, kw_only=True):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(Told, kw_only=True):
    error: ErrorDetail


class StreamOptions(Body, kw_only=True):
    """include_usage: one more event at the end, with no choice in it. continuous_usage_stats: in each event, too."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class JsonSchemaFormat(Body, kw_only=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class Sampling(Body, kw_only=True):
    """The fields of `SamplingParams` that every generating endpoint takes, under its names; null is "not given".

    user, metadata, store, service_tier, safety_identifier, prompt_cache_key change no result and are passed over.
    """

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str | list[int]] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_token_sequences: list[list[int]] | None = None
    ignore_eos: bool | None = None
    strip_stop_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    prompt_logprobs: int | None = None
    logprobs_mode: LogprobsMode | None = None
    logprob_token_ids: list[int] | None = None
    forced_token_ids: list[int] | None = None
    structured_outputs: dict[str, Any] | None = None
    detokenize: bool | None = None
    skip_special_tokens: bool | None = None
    stream_interval: int | None = None
    priority: int | None = None
    skip_reading_prefix_cache: bool | None = None

    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    def given(self) -> dict[str, Any]:
        """Keywords for `SamplingParams`: what was given under its names."""
        found = {name: getattr(self, name) for name in SHARED}
        return {name: value for name, value in found.items() if value is not None}


PASSED_OVER = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
SHARED = tuple(name for name in SamplingParams.__struct_fields__ if name in Sampling.__struct_fields__)


class PromptTokensDetails(Told, kw_only=True):
    cached_tokens: int = 0


class Usage(Told, kw_only=True):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None


class ScoredToken(Told, kw_only=True):
    """Of `prompt_logprobs`, by id."""

    logprob: float
    rank: int
    decoded_token: str | None = None


PromptLogprobs = list[dict[str, ScoredToken] | None]
StopReason = int | str | list[int] | None


class IdsOut(Told, kw_only=True):
    """What a choice says of its tokens when `return_token_ids` was asked: ids, and which weights they come from."""

    token_ids: list[int] | UnsetType = UNSET
    weight_epochs: list[tuple[int, int]] | UnsetType = UNSET


class Model(Told, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "perdure"
    root: str
    max_model_len: int | None = None


class Models(Told, kw_only=True):
    object: Literal["list"] = "list"
    data: list[Model]
