"""Prompts of a body as ids: those that were given, untouched, or those of a text or a conversation."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from perdure import AsyncLLM, Checkpoint, InvalidValue

T = TypeVar("T")

LONG_TEXT = 20_000
"""Characters beyond which a text is made ids of beside the event loop."""


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
        return [await _of_text(llm, given, add_special_tokens)]
    if not given:
        return [Prompt([])]  # refused like any empty prompt
    if all(isinstance(one, int) for one in given):
        return [Prompt([one for one in given if isinstance(one, int)])]
    found = []
    for at, one in enumerate(given):
        if isinstance(one, int):
            raise InvalidValue(
                f"prompt[{at}]={one} is an id beside prompts: a list holds ids, or texts and lists of ids"
            )
        found.append(Prompt(one) if isinstance(one, list) else await _of_text(llm, one, add_special_tokens))
    return found


def of_checkpoint(past: Checkpoint) -> Prompt:
    return Prompt(past.prompt_token_ids, past.prompt, past)


async def _of_text(llm: AsyncLLM, text: str, add_special_tokens: bool) -> Prompt:
    tokenizer = llm.tokenizer
    if tokenizer is None:
        raise InvalidValue("prompt is text, but the model came without a tokenizer: give token ids")
    return Prompt(await beside(len(text), lambda: tokenizer.encode(text, add_special_tokens)), text)


async def of_chat(
    llm: AsyncLLM,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    tools: Sequence[Mapping[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> Prompt:
    """Raises `InvalidValue`."""
    if not messages:
        raise InvalidValue("messages=[] is an empty conversation")
    plain = [_message(at, one) for at, one in enumerate(messages)]
    size = sum(len(one["content"]) for one in plain if isinstance(one.get("content"), str))
    return Prompt(
        await beside(size, lambda: llm.lay_out(plain, add_generation_prompt, tools, chat_template_kwargs or {}))
    )


async def beside(size: int, work: Callable[[], T]) -> T:
    """The work's result; long work leaves the event loop free."""
    return await asyncio.to_thread(work) if size > LONG_TEXT else work()


def _message(at: int, message: Mapping[str, Any]) -> Mapping[str, Any]:
    """With one text as content, which is what templates of texts know; all else goes to the template as it is."""
    if not isinstance(message.get("role"), str):
        raise InvalidValue(f"messages[{at}].role={message.get('role')!r} is not a text")
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, list):
        raise InvalidValue(f"messages[{at}].content is neither a text nor a list of parts")
    return {**message, "content": "\n".join(_text(at, number, part) for number, part in enumerate(content))}


def _text(at: int, number: int, part: Any) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in ("text", "input_text", "output_text") and isinstance(part.get("text"), str):
        return str(part["text"])
    raise InvalidValue(f"messages[{at}].content[{number}] is of type {kind!r}: only parts of type 'text' are taken")
