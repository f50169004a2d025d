"""Prompts of a body as ids: those that were given, untouched, or those of a text or a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from perdure import AsyncLLM, Checkpoint, InvalidValue

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters beyond which the texts of a body are made ids of beside the event loop."""


class Prompt(NamedTuple):
    """text: as it was given; None = ids were. checkpoint: the request that goes on instead of a new one."""

    token_ids: list[int]
    text: str | None = None
    checkpoint: Checkpoint | None = None


async def of_completion(
    llm: AsyncLLM, given: str | list[str | int | list[int]], add_special_tokens: bool
) -> list[Prompt]:
    """All prompts. Raises `InvalidValue`."""
    if isinstance(given, str):
        return await _of_texts(llm, [given], add_special_tokens)
    if not given:
        return [Prompt([])]  # refused like any empty prompt
    if all(isinstance(one, int) for one in given):
        return [Prompt([one for one in given if isinstance(one, int)])]
    for at, one in enumerate(given):
        if isinstance(one, int):
            raise InvalidValue(
                f"prompt[{at}]={one} is an id beside prompts: a list holds ids, or texts and lists of ids"
            )
    of_texts = iter(await _of_texts(llm, [one for one in given if isinstance(one, str)], add_special_tokens))
    return [Prompt(one) if isinstance(one, list) else next(of_texts) for one in given]


def of_checkpoint(past: Checkpoint) -> Prompt:
    return Prompt(past.prompt_token_ids, past.prompt, past)


async def _of_texts(llm: AsyncLLM, texts: list[str], add_special_tokens: bool) -> list[Prompt]:
    if not texts:
        return []
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InvalidValue("prompt is text, but the model came without a tokenizer: give token ids")
    return await beside(
        _size(texts), lambda: [Prompt(tokenizer.encode(text, add_special_tokens), text) for text in texts]
    )


async def of_chats(
    llm: AsyncLLM,
    conversations: Sequence[Sequence[Mapping[str, Any]]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> list[Prompt]:
    """One prompt for each conversation. Raises `InvalidValue`."""
    given = chat_template_kwargs or {}
    return await beside(
        _size([conversations, tools, given]),
        lambda: [Prompt(llm.lay_out(one, add_generation_prompt, tools, given)) for one in conversations],
    )


async def beside(size: int, work: Callable[[], T]) -> T:
    """The work's result; long work leaves the event loop free."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


def _size(value: object) -> int:
    """Characters of all texts in it, and one for whatever else; not counted on beyond LONG_TEXT."""
    size, left = 0, [value]
    while left and size <= LONG_TEXT:
        one = left.pop()
        if isinstance(one, Mapping):
            left.extend(one.values())
        elif isinstance(one, (list, tuple)):
            left.extend(one)
        size += len(one) if isinstance(one, str) else 1
    return size
