"""`/v1/chat/completions`."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import UNSET, UnsetType

from perdure.server.protocol.common import Body, IdsOut, PromptLogprobs, Sampling, StopReason, Told, Usage


class Function(Body, kw_only=True):
    """parameters: a JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, kw_only=True):
    type: Literal["function"] = "function"
    function: Function


class NamedFunction(Body, kw_only=True):
    name: str


class NamedTool(Body, kw_only=True):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Sampling, kw_only=True):
    """messages: with `role`, `content` (a text, or parts of type "text") and whatever else the model's template knows.
    chat_template_kwargs: further names for that template. logprobs, top_logprobs: scores of each token, and of the k
    best. parallel_tool_calls=False: one call at most."""

    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None


class TokenLogprob(Told, kw_only=True):
    token: str
    logprob: float
    bytes: list[int] | None = None


class ChatTokenLogprob(TokenLogprob, kw_only=True):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Told, kw_only=True):
    content: list[ChatTokenLogprob] | None = None
    refusal: None = None


class CalledFunction(Told, kw_only=True):
    """arguments: JSON, as text."""

    name: str | UnsetType = UNSET
    arguments: str = ""


class ToolCall(Told, kw_only=True):
    """In a stream, index says which call a part belongs to, and only its first part has id, type and name."""

    index: int | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: CalledFunction


class ChatMessage(Told, kw_only=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | None | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: None | UnsetType = UNSET


class ChatChoice(IdsOut, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None


class ChatCompletion(Told, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(IdsOut, kw_only=True):
    index: int
    delta: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None


class ChatChunk(Told, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
