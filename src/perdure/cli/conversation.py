"""One conversation with a model: the messages so far, and the next answer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from perdure import InvalidValue, RequestOutput, SamplingParams
from perdure.cli.output import write

if TYPE_CHECKING:
    from perdure import AsyncLLM


class Answer(NamedTuple):
    """interrupted: somebody ended it; what was said until then counts."""

    result: RequestOutput
    interrupted: bool


class Conversation:
    """The messages so far; a turn that fails leaves them as they were."""

    def __init__(
        self, llm: AsyncLLM, params: SamplingParams, system: str | None, tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        if llm.tokenizer is None:
            raise InvalidValue("chat needs a tokenizer, and the model came without one")
        self._llm = llm
        self._params = params
        self._tools = tools
        self._system = system
        self._messages: list[dict[str, str]] = []
        self.restart()

    def restart(self) -> None:
        """Forget all but what the model is told first."""
        self._messages = [] if self._system is None else [{"role": "system", "content": self._system}]

    def tell(self, system: str | None) -> None:
        """Begin anew with this, or with nothing, told first."""
        self._system = system
        self.restart()

    async def answer(self, text: str) -> Answer:
        """Stream the answer to the user's next message. Cancelling ends the answer, not the call."""
        turn = [*self._messages, {"role": "user", "content": text}]
        handle = self._llm.chat(turn, self._params, tools=self._tools)
        said, interrupted = "", False
        try:
            async for part in handle:
                said += part.outputs[0].text
                write(part.outputs[0].text)
        except asyncio.CancelledError:
            handle.abort()
            interrupted = True
        result = await handle
        write("\n")
        if result.error is not None:
            raise result.error
        self._messages = [*turn, {"role": "assistant", "content": said}]
        return Answer(result, interrupted)
