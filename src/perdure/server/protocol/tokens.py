"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

from typing import Any

from perdure.server.protocol.chat import Tool
from perdure.server.protocol.common import Body, Told


class TokenizeRequest(Body, kw_only=True):
    """prompt, or messages as a chat has them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool = False


class Tokenized(Told, kw_only=True):
    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(Body, kw_only=True):
    model: str | None = None
    tokens: list[int]


class Detokenized(Told, kw_only=True):
    prompt: str
