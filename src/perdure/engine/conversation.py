"""Conversations as callers give them, brought into the form that chat templates expect, and laid out as ids.

- Messages and tools reach the template as they are, but for one thing: a tool call's arguments, JSON text in OpenAI's
  interface, become the object that templates print.
- What cannot be laid out is refused: `InvalidValue`, one line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from perdure.api.errors import InvalidValue, shown
from perdure.engine.chat_template import Messages, TemplateKwargs, Tools
from perdure.engine.tokenizer import Tokenizer

OUR_NAMES = {
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
    messages = [_with_objects(one) for one in messages]
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


def is_list(value: object) -> bool:
    """Whether it may hold messages: a text is a sequence too, and holds none."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


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


def _with_objects(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """The message with the arguments of its tool calls as objects. What is no message is the template's to refuse."""
    calls = message.get("tool_calls") if isinstance(message, Mapping) else None
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        return message
    return {**message, "tool_calls": [_call(one) for one in calls]}


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(text := function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(text) if text.strip() else {}
    except ValueError as error:
        name = function.get("name")
        raise InvalidValue(f"arguments={text!r} of the tool call {name!r} are not JSON ({error})") from None
    return {**call, "function": {**function, "arguments": arguments}}
