"""What one output of a chat says: reasoning, content, calls of tools. The same pieces whole or streamed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence

from msgspec import UNSET

from perdure import SamplingParams
from perdure.server.calling import Calling
from perdure.server.front import Front
from perdure.server.prompts import Prompt
from perdure.server.protocol.chat import CalledFunction, ChatMessage, ToolCall
from perdure.server.reasoning import Split, ThinkSplitter, begins_inside
from perdure.server.tools.base import Called, Parser, Piece, Said


class Answer:
    """parser: of calls; None = all is content. splitter: of reasoning. most_calls: further ones are dropped.
    name: of this output, from which its calls are named."""

    def __init__(
        self, name: str, parser: Parser | None, splitter: ThinkSplitter | None, most_calls: int | None = None
    ) -> None:
        self._name = name
        self._parser = parser
        self._splitter = splitter
        self._most_calls = most_calls
        self.num_calls = 0

    def push(self, text: str) -> list[ChatMessage]:
        """Deltas of what became certain with this further text."""
        return self._deltas([Split("", text)] if self._splitter is None else self._splitter.push(text))

    def end(self) -> list[ChatMessage]:
        deltas = self._deltas([] if self._splitter is None else self._splitter.end())
        return deltas + self._said([] if self._parser is None else self._parser.end())

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.num_calls else reason

    def _deltas(self, splits: Iterable[Split]) -> list[ChatMessage]:
        found: list[ChatMessage] = []
        for reasoning, content in splits:
            if reasoning:
                found.append(ChatMessage(reasoning_content=reasoning))
            elif content and self._parser is None:
                found.append(ChatMessage(content=content))
            elif content:
                assert self._parser is not None
                found += self._said(self._parser.push(content))
        return found

    def _said(self, pieces: Sequence[Piece]) -> list[ChatMessage]:
        found = []
        for piece in pieces:
            if isinstance(piece, Said):
                found.append(ChatMessage(content=piece.text))
            elif self._most_calls is None or piece.number < self._most_calls:
                self.num_calls = piece.number + 1
                found.append(ChatMessage(tool_calls=[self._call(piece)]))
        return found

    def _call(self, piece: Called) -> ToolCall:
        if piece.name is None:
            return ToolCall(index=piece.number, function=CalledFunction(arguments=piece.arguments))
        digest = hashlib.blake2s(f"{self._name}/{piece.number}".encode(), digest_size=12).hexdigest()
        function = CalledFunction(name=piece.name, arguments=piece.arguments)
        return ToolCall(index=piece.number, id=f"call_{digest}", type="function", function=function)


def answers_for(
    front: Front, settings: SamplingParams, calling: Calling, prompt: Prompt, request_id: str
) -> list[Answer]:
    """One for each output. Reasoning is looked for where the server is told so, and nothing forces the output."""
    thinks = front.config.reasoning_parser == "think" and settings.structured_outputs is None
    tokenizer = front.llm.tokenizer
    is_inside = thinks and tokenizer is not None and begins_inside(tokenizer.decode(prompt.token_ids, False))
    return [
        Answer(
            f"{request_id}/{index}",
            calling.parser(),
            ThinkSplitter(is_inside) if thinks else None,
            calling.most_calls,
        )
        for index in range(settings.n)
    ]


def joined(deltas: Iterable[ChatMessage]) -> ChatMessage:
    """The message that a reader of these deltas ends with."""
    content, reasoning = "", ""
    calls: list[ToolCall] = []
    for delta in deltas:
        content += delta.content or ""
        reasoning += delta.reasoning_content or ""
        for call in delta.tool_calls or ():
            if call.id is not UNSET:
                function = CalledFunction(name=call.function.name, arguments=call.function.arguments)
                calls.append(ToolCall(id=call.id, type="function", function=function))
            else:
                calls[-1].function.arguments += call.function.arguments
    return ChatMessage(
        role="assistant",
        content=None if calls and not content else content,
        reasoning_content=reasoning or UNSET,
        tool_calls=calls or UNSET,
        refusal=None,
    )
