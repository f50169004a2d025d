"""Items of `/v1/responses`: those of an input as messages, and the deltas of an answer as items of an output.

Events and the whole output are made by one builder, so that a stream's last event is what is not streamed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

from msgspec import UNSET

from perdure import InvalidValue
from perdure.server.protocol.chat import ChatMessage, ToolCall
from perdure.server.protocol.responses import (
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
    ResponsesEvent,
)


def messages_of(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> tuple[list[dict[str, Any]], list[str]]:
    """The messages, and where each was begun, in the client's words. Raises `InvalidValue`."""
    found: list[dict[str, Any]] = [] if instructions is None else [{"role": "system", "content": instructions}]
    places = ["instructions"] * len(found)
    if isinstance(given, str):
        return [*found, {"role": "user", "content": given}], [*places, "input"]
    for at, item in enumerate(given):
        kind = item.get("type", "message")
        if kind == "message":
            role = "system" if item.get("role") == "developer" else item.get("role")
            if role != "assistant" or not _is_open(found):
                found.append({"role": role})
            found[-1]["content"] = item.get("content")
        elif kind == "reasoning":
            texts = [_joined(at, item.get(name)) for name in ("content", "summary")]
            found.append({"role": "assistant", "content": "", "reasoning_content": "\n".join(filter(None, texts))})
        elif kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments", "")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            _of_assistant(found).setdefault("tool_calls", []).append(call)
        elif kind == "function_call_output":
            found.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
        else:
            raise InvalidValue(f"input[{at}] is of type {str(kind)[:40]!r}: messages and calls of functions are taken")
        places += [f"input[{at}]"] * (len(found) - len(places))
    return found, places


def _is_open(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is reasoning that waits for what was said after it."""
    return bool(messages) and "reasoning_content" in messages[-1] and not messages[-1]["content"]


def _of_assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The message of the assistant that goes on; a new one if somebody else spoke last."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _joined(at: int, given: Any) -> str:
    parts = [] if given is None else given if isinstance(given, list) else [given]
    if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in parts):
        raise InvalidValue(f"input[{at}] is reasoning with parts that have no text")
    return "\n".join(part["text"] for part in parts)


class Items:
    """The output so far, and the events that tell of it. An event shows its item as it is when it is yielded: write it
    before the next is asked for. name: from which items are named."""

    def __init__(self, name: str, number: Callable[[], int]) -> None:
        self._name = name
        self._number = number
        self.output: list[OutputItem] = []
        self._is_open = False

    def take(self, delta: ChatMessage) -> Iterator[ResponsesEvent]:
        if delta.reasoning_content is not UNSET and delta.reasoning_content:
            item: Any = yield from self._opened(OutputReasoning)
            item.content[0].text += delta.reasoning_content
            yield self._event("response.reasoning_text.delta", content_index=0, delta=delta.reasoning_content)
        if delta.content is not UNSET and delta.content:
            item = yield from self._opened(OutputMessage)
            item.content[0].text += delta.content
            yield self._event("response.output_text.delta", content_index=0, delta=delta.content, logprobs=[])
        for call in delta.tool_calls or ():
            yield from self._called(call)

    def end(self, status: str) -> Iterator[ResponsesEvent]:
        """status: of the item that is open."""
        if not self._is_open:
            return
        self._is_open = False
        item = self.output[-1]
        item.status = status
        match item:
            case OutputMessage():
                part, text = item.content[0], item.content[0].text
                yield self._event("response.output_text.done", content_index=0, text=text, logprobs=[])
                yield self._event("response.content_part.done", content_index=0, part=part)
            case OutputReasoning():
                yield self._event("response.reasoning_text.done", content_index=0, text=item.content[0].text)
            case OutputCall():
                yield self._event("response.function_call_arguments.done", name=item.name, arguments=item.arguments)
        yield self._event("response.output_item.done", item=item)

    def _called(self, call: ToolCall) -> Iterator[ResponsesEvent]:
        if call.id is not UNSET:
            yield from self.end("completed")
            name, call_id = str(call.function.name), str(call.id)
            item_id = f"fc_{self._name}_{len(self.output)}"
            item = OutputCall(id=item_id, call_id=call_id, name=name, arguments="", status="in_progress")
            self._open(item)
            yield self._event("response.output_item.added", item=item)
        found = self.output[-1]
        assert isinstance(found, OutputCall)
        found.arguments += call.function.arguments
        yield self._event("response.function_call_arguments.delta", delta=call.function.arguments)

    def _opened(self, kind: type[OutputMessage | OutputReasoning]) -> Generator[ResponsesEvent, None, Any]:
        """The open item of this kind; another one is closed first. (A generator of events that returns it.)"""
        if self._is_open and isinstance(self.output[-1], kind):
            return self.output[-1]
        yield from self.end("completed")
        at = len(self.output)
        if kind is OutputMessage:
            message = OutputMessage(id=f"msg_{self._name}_{at}", status="in_progress", content=[])
            self._open(message)
            yield self._event("response.output_item.added", item=message)
            message.content.append(OutputText(text=""))
            yield self._event("response.content_part.added", content_index=0, part=message.content[0])
        else:
            reasoning = OutputReasoning(id=f"rs_{self._name}_{at}", status="in_progress", content=[])
            self._open(reasoning)
            yield self._event("response.output_item.added", item=reasoning)
            reasoning.content.append(ReasoningText(text=""))
        return self.output[-1]

    def _open(self, item: OutputItem) -> None:
        self.output.append(item)
        self._is_open = True

    def _event(self, kind: str, **fields: Any) -> ResponsesEvent:
        at = len(self.output) - 1
        if "item" not in fields:
            fields["item_id"] = self.output[at].id
        return ResponsesEvent(type=kind, sequence_number=self._number(), output_index=at, **fields)
