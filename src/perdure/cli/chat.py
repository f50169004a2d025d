"""`perdure chat`: turns of one conversation, streamed, on a terminal or line by line from a pipe.

- Each turn sends the whole conversation; the engine's prefix cache holds all of it but the last words.
- Ctrl-C ends the answer, and what was said of it stays in the conversation; at the prompt it gives up the line.
"""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from perdure import InvalidValue, SamplingParams
from perdure.cli.input import lines, typed_lines
from perdure.cli.options import EngineOptions, SamplingOptions, spelled_out
from perdure.cli.output import complain, remark, write

if TYPE_CHECKING:
    from perdure import AsyncLLM

TEMPERATURE = 0.7
PROMPT = "> "


@spelled_out
def chat(
    sampling: SamplingOptions,
    engine: EngineOptions,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first turn.")] = None,
) -> None:
    """Talk with a model, a line a turn.

    Ctrl-C ends an answer, /new the conversation, /quit or Ctrl-D the program. A pipe's lines are turns too.
    """
    params = sampling.params(temperature=TEMPERATURE)
    settings = engine.settings()

    from perdure import AsyncLLM

    with asyncio.Runner() as runner:
        llm = AsyncLLM(**settings)
        try:
            _converse(runner, Conversation(llm, params, system))
        finally:
            llm.shutdown()


def _converse(runner: asyncio.Runner, conversation: Conversation) -> None:
    somebody = sys.stdin.isatty() and sys.stdout.isatty()
    if somebody:
        remark("Ctrl-C ends an answer, /new the conversation, /quit or Ctrl-D the program.")
    for line in typed_lines(PROMPT) if somebody else lines():
        if line.strip() == "/quit":
            return
        if line.strip() == "/new":
            conversation.restart()
        elif line.strip():
            try:
                runner.run(conversation.answer(line))
            except (KeyboardInterrupt, InvalidValue) as error:  # the turn is dropped
                if not somebody:
                    raise
                if isinstance(error, InvalidValue):
                    complain(str(error))


class Conversation:
    """The messages so far; a turn that fails leaves them as they were."""

    def __init__(self, llm: AsyncLLM, params: SamplingParams, system: str | None) -> None:
        if llm.tokenizer is None:
            raise InvalidValue("chat needs a tokenizer, and the model came without one")
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._params = params
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._messages = self._system

    def restart(self) -> None:
        self._messages = self._system

    async def answer(self, text: str) -> None:
        """Stream the answer to the user's next message. Cancelling ends the answer, not the call."""
        turn = [*self._messages, {"role": "user", "content": text}]
        handle = self._llm.submit(self._tokenizer.apply_chat_template(turn), self._params)
        said = ""
        try:
            async for part in handle:
                said += part.outputs[0].text
                write(part.outputs[0].text)
        except asyncio.CancelledError:
            handle.abort()
        result = await handle
        write("\n")
        if result.error is not None:
            raise result.error
        self._messages = [*turn, {"role": "assistant", "content": said}]
