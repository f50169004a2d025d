"""Settings of a request, from its body. Raises `InvalidValue` and `HTTPError`."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from perdure import Checkpoint, SamplingParams
from perdure.api.errors import InvalidValue
from perdure.api.sampling import ALL_LOGPROBS, OutputKind
from perdure.server.errors import HTTPError, Words
from perdure.server.protocol.chat import ChatRequest
from perdure.server.protocol.common import PASSED_OVER, ResponseFormat, Sampling
from perdure.server.protocol.completions import CompletionRequest
from perdure.server.protocol.responses import ResponsesRequest

DEFAULT_COMPLETION_TOKENS = 16
"""Of `/v1/completions` alone, as OpenAI's description says."""
BESIDE_CHECKPOINT = {"model", "checkpoint", "request_id", "stream", "stream_options"}
BESIDE_CHECKPOINT |= {"return_token_ids", "return_tokens_as_token_ids", *PASSED_OVER}
"""Fields that say nothing of what is computed."""


def of_completion(body: CompletionRequest) -> SamplingParams:
    given = _given(body)
    given["max_tokens"] = DEFAULT_COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    num_top = 0 if body.logprobs is None and body.logprob_token_ids else body.logprobs
    if num_top is not None:
        given["logprobs"] = num_top
        if body.echo:
            given.setdefault("prompt_logprobs", num_top)
    return SamplingParams(**given)


def of_checkpoint(body: CompletionRequest) -> Checkpoint:
    """One that goes on as it began, told as this body asks."""
    assert body.checkpoint is not None
    for name in body.__struct_fields__:
        if name not in BESIDE_CHECKPOINT and getattr(body, name) is not None:
            raise HTTPError(400, f"{name} is given, but a checkpoint goes on with what it began with", param=name)
    try:
        past = Checkpoint.from_bytes(body.checkpoint)
    except InvalidValue as error:
        raise HTTPError(400, f"checkpoint: {error}", param="checkpoint") from None
    if past.params.logits_processors:  # names of functions, which nobody gives over HTTP
        raise HTTPError(400, "checkpoint: its logits_processors are not taken over HTTP", param="checkpoint")
    return replace(past, params=replace(past.params, output_kind=_output_kind(body)))


def of_chat(body: ChatRequest, structure: dict[str, Any] | None) -> SamplingParams:
    """structure: what a forced call of a tool makes the output be."""
    given = _forced(body, structure)
    limits = {body.max_tokens, body.max_completion_tokens} - {None}
    if len(limits) > 1:
        raise HTTPError(
            400,
            f"max_tokens={body.max_tokens} and max_completion_tokens={body.max_completion_tokens} are two names of one"
            " limit: give one of them",
            param="max_tokens",
        )
    if limits:
        given["max_tokens"] = limits.pop()
    if body.logprobs:
        given["logprobs"] = num_top = body.top_logprobs or 0
        if num_top < ALL_LOGPROBS:
            raise HTTPError(400, f"top_logprobs={num_top} must be {ALL_LOGPROBS} (all) or more", param="top_logprobs")
    elif body.top_logprobs:
        raise HTTPError(400, f"top_logprobs={body.top_logprobs} needs logprobs=true", param="top_logprobs")
    elif body.logprob_token_ids:
        raise HTTPError(400, "logprob_token_ids is given, but needs logprobs=true", param="logprob_token_ids")
    return SamplingParams(**given)


def of_response(body: ResponsesRequest, structure: dict[str, Any] | None) -> SamplingParams:
    for name in ("prompt_logprobs", "logprob_token_ids"):
        if getattr(body, name) is not None:
            raise HTTPError(400, f"{name} is given, but a response tells no scores", param=name)
    given = _forced(body, structure)
    if body.max_output_tokens is not None:
        given["max_tokens"] = body.max_output_tokens
    return SamplingParams(**given)


def words_of(body: Sampling) -> Words:
    """By what names the client gave what the engine knows under others."""
    words: dict[str, str] = {}
    if body.structured_outputs is None:  # else it was given under that name
        words["structured_outputs.json"] = "tools"  # of a forced call
    if body.response_format is not None:
        words["structured_outputs.json"] = "response_format.json_schema.schema"
    match body:
        case ChatRequest():
            words |= {"logprobs": "top_logprobs"}
            if body.max_completion_tokens is not None:
                words["max_tokens"] = "max_completion_tokens"
        case ResponsesRequest():
            if body.text is not None and body.text.format is not None:
                words["structured_outputs.json"] = "text.format.schema"
            if body.max_output_tokens is not None:
                words["max_tokens"] = "max_output_tokens"
    return words


def _forced(body: Sampling, structure: dict[str, Any] | None) -> dict[str, Any]:
    given = _given(body)
    if structure is None:
        return given
    if "structured_outputs" in given:
        other = "structured_outputs" if body.structured_outputs is not None else _format_of(body)
        raise HTTPError(400, f"tool_choice forces a call, and {other} something else", param=other)
    return {**given, "structured_outputs": structure}


def _format_of(body: Sampling) -> str:
    """Where the client said what the answer's format is."""
    is_in_text = isinstance(body, ResponsesRequest) and body.text is not None and body.text.format is not None
    return "text.format" if is_in_text else "response_format"


def _given(body: Sampling) -> dict[str, Any]:
    given = body.given()
    given["output_kind"] = _output_kind(body)
    structure = _structure(body.response_format)
    if structure is not None:
        if "structured_outputs" in given:
            both = f"{_format_of(body)} and structured_outputs both say"
            raise HTTPError(400, f"{both} what the output is: give one of them")
        given["structured_outputs"] = structure
    return given


def _output_kind(body: Sampling) -> OutputKind:
    if body.stream_options is not None and not body.stream:
        raise HTTPError(400, "stream_options is given, but stream is not true", param="stream_options")
    return "delta" if body.stream else "final"


def _structure(given: ResponseFormat | None) -> dict[str, Any] | None:
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return {"json_object": True}
    if given.json_schema is None or given.json_schema.schema is None:
        raise HTTPError(
            400, "response_format.json_schema.schema is missing for type 'json_schema'", param="response_format"
        )
    return {"json": given.json_schema.schema}
