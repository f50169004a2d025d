"""`/v1/responses`: text and tools. Nothing is stored, so a conversation comes whole in `input`."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from perdure.server.protocol.common import Body, IdsOut, Sampling, Told


class ResponsesTool(Body, kw_only=True):
    """A function, with its fields beside its type."""

    type: Literal["function"] = "function"
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ResponsesNamedTool(Body, kw_only=True):
    type: Literal["function"] = "function"
    name: str


class TextFormat(Body, kw_only=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class TextOptions(Body, kw_only=True):
    format: TextFormat | None = None


class ReasoningOptions(Body, kw_only=True):
    effort: str | None = None


class ResponsesRequest(Sampling, kw_only=True):
    """input: a text, or items: messages, calls of tools and what came of them. instructions: a system message before
    all. store is passed over: nothing is kept."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponsesNamedTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class OutputText(Told, kw_only=True, tag_field="type", tag="output_text"):
    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)


class OutputMessage(Told, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class OutputCall(Told, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class ReasoningText(Told, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str


class OutputReasoning(Told, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = msgspec.field(default_factory=list)
    content: list[ReasoningText]
    status: str


OutputItem = OutputMessage | OutputCall | OutputReasoning


class InputTokensDetails(Told, kw_only=True):
    cached_tokens: int = 0


class ResponsesUsage(Told, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    total_tokens: int


class IncompleteDetails(Told, kw_only=True):
    reason: str


class ResponsesResponse(IdsOut, kw_only=True):
    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: Literal["in_progress", "completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponsesUsage | None = None
    error: None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    temperature: float | None = None
    top_p: float | None = None
    max_output_tokens: int | None = None
    metadata: Any = None
    store: bool = False
    prompt_token_ids: list[int] | UnsetType = UNSET


class ResponsesEvent(Told, kw_only=True):
    """One event of a stream; its type says which of the fields it has."""

    type: str
    sequence_number: int
    response: ResponsesResponse | UnsetType = UNSET
    output_index: int | UnsetType = UNSET
    item_id: str | UnsetType = UNSET
    content_index: int | UnsetType = UNSET
    item: OutputItem | UnsetType = UNSET
    part: OutputText | ReasoningText | UnsetType = UNSET
    delta: str | UnsetType = UNSET
    text: str | UnsetType = UNSET
    arguments: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    logprobs: list[Any] | UnsetType = UNSET
