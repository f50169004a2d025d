"""Conversations as callers give them, brought into the form that chat templates expect, and laid out as ids.

- Messages and tools reach the template as they are, but for two things: a tool call's arguments, JSON text in OpenAI's
  interface, become the object that templates print, and parts of a content one text.
- What cannot be laid out is refused: `InvalidValue`, one line. Templates print whatever they are given, so nothing that
  is no message goes there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.api.errors import InvalidValue, shown
from perdure.engine.chat_template import Messages, TemplateKwargs, Tools
from perdure.engine.prompts import is_list
from perdure.engine.tokenizer import Tokenizer

OUR_NAMES = {
    "self",
    "messages",
    "conversation",
    "tools",
    "add_generation_prompt",
    "tokenize",
    "chat_template",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
}
"""What a template is given by us, and what transformers would take for itself."""

TEXTS = ("text", "input_text", "output_text")
"""Types of a content's parts that are texts, in OpenAI's interfaces."""


def laid_out(
    tokenizer: Tokenizer | None,
    messages: Messages,
    add_generation_prompt: bool = True,
    tools: Tools | None = None,
    template_kwargs: TemplateKwargs | None = None,
) -> list[int]:
    """The ids of one conversation."""
    if tokenizer is None:
        raise InvalidValue("chat needs a tokenizer, and the model came without one")
    check_tools(tools)
    check_template_kwargs(template_kwargs)
    if not is_list(messages):
        raise InvalidValue(f"messages={shown(messages)} is not a list of messages")
    if not messages:
        raise InvalidValue("messages=[] is an empty conversation")
    messages = [_with_objects(_with_text(at, one)) for at, one in enumerate(messages)]
    return tokenizer.apply_chat_template(messages, add_generation_prompt, tools, template_kwargs)


def all_laid_out(
    tokenizer: Tokenizer | None,
    conversations: Sequence[Messages],
    add_generation_prompt: bool = True,
    tools: Tools | None = None,
    template_kwargs: TemplateKwargs | None = None,
) -> list[list[int] | InvalidValue]:
    """The ids of each conversation; what is wrong with one stands in its place. Wrong tools are every one's: raised."""
    check_tools(tools)
    check_template_kwargs(template_kwargs)
    found: list[list[int] | InvalidValue] = []
    for at, messages in enumerate(conversations):
        try:
            found.append(laid_out(tokenizer, messages, add_generation_prompt, tools, template_kwargs))
        except InvalidValue as error:
            found.append(InvalidValue(f"messages[{at}]: {error}"))
    return found


def check_tools(tools: Tools | None) -> None:
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise InvalidValue(f"tools={shown(tools)} is not a list of objects")


def check_template_kwargs(given: TemplateKwargs | None) -> None:
    if given is None:
        return
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise InvalidValue(f"chat_template_kwargs={shown(given)} is no dictionary of names")
    for name in given:
        if name in OUR_NAMES:
            raise InvalidValue(f"chat_template_kwargs holds {name!r}, which is none of the template's own")


def _with_text(at: int, message: object) -> Mapping[str, Any]:
    """The message with one text as its content. Only an assistant's may lack it: it may be calls alone."""
    if not isinstance(message, Mapping):
        raise InvalidValue(f"messages[{at}]={shown(message)} is no message: it has a role and a content")
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise InvalidValue(f"messages[{at}].role={shown(role)} is not a text")
    if content is None and role != "assistant":
        raise InvalidValue(f"messages[{at}].content is missing: only an assistant's message may do without")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not is_list(content):
        raise InvalidValue(f"messages[{at}].content={shown(content)} is neither a text nor a list of parts")
    return {**message, "content": "\n".join(_text(at, number, part) for number, part in enumerate(content))}


def _text(at: int, number: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    where = f"messages[{at}].content[{number}]"
    if not isinstance(part, Mapping) or kind not in TEXTS:
        raise InvalidValue(f"{where} is of type {shown(kind)}: only parts of type 'text' are taken")
    text = part.get("text")
    if not isinstance(text, str):
        raise InvalidValue(f"{where}.text={shown(text)} is not a text")
    return text


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its tool calls as objects."""
    calls = message.get("tool_calls")
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [_call(one) for one in calls]}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        name = function.get("name")
        raise InvalidValue(f"arguments={shown(text)} of the tool call {shown(name)} are not JSON ({error})") from None
    return {**call, "function": {**function, "arguments": arguments}}
