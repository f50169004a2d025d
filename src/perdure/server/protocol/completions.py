"""`/v1/completions`."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

from perdure.server.protocol.common import ErrorDetail, IdsOut, PromptLogprobs, Sampling, StopReason, Told, Usage


class CompletionRequest(Sampling, kw_only=True):
    """prompt: a text, its ids, or a list of either. max_tokens: 16 unless given, as OpenAI has it. logprobs: the k best
    of each token, and the chosen one. echo: the prompt comes back before the output, with its scores if these are.
    checkpoint: what `/checkpoint` gave, in base64, instead of a prompt and of all settings: it goes on."""

    prompt: str | list[str | int | list[int]] | None = None
    checkpoint: bytes | None = None
    max_tokens: int | None = None
    logprobs: int | None = None
    echo: bool | None = None


class Logprobs(Told, kw_only=True):
    """One entry a token; text_offset: where its text begins in the choice's."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(IdsOut, kw_only=True):
    """error: what ended or refused this one of several prompts, whose finish_reason is "error"."""

    index: int
    text: str
    logprobs: Logprobs | None = None
    finish_reason: str | None = None
    stop_reason: StopReason = None
    prompt_logprobs: PromptLogprobs | None | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    error: ErrorDetail | UnsetType = UNSET


class Completion(Told, kw_only=True):
    """Whole, and each event of a stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None | UnsetType = UNSET
