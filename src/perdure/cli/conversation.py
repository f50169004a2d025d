"""One conversation with a model: the messages so far, and the next answer."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from perdure import InvalidValue, RequestOutput, SamplingParams
from perdure.cli.output import write

if TYPE_CHECKING:
    from perdure import AsyncLLM


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

    async def answer(self, text: str, *, interruptible: bool) -> RequestOutput:
        """Stream the answer to the user's next message. interruptible: Ctrl-C, once or often, ends it early; what was
        said until then counts."""
        turn = [*self._messages, {"role": "user", "content": text}]
        handle = self._llm.chat(turn, self._params, tools=self._tools)
        said = ""
        with _on_ctrl_c(handle.abort) if interruptible else nullcontext():
            async for part in handle:
                said += part.outputs[0].text
                write(part.outputs[0].text)
            write("\n")
            result = await handle
            if result.error is not None:
                raise result.error
            self._messages = [*turn, {"role": "assistant", "content": said}]
        return result


@contextmanager
def _on_ctrl_c(act: Callable[[], None]) -> Iterator[None]:
    """Do this whenever Ctrl-C is pressed, instead of cancelling. (A second press would break into whatever runs.)"""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, act)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)
