"""`perdure chat`: turns of one conversation, streamed, on a terminal or line by line from a pipe.

- Each turn sends the whole conversation; the engine's prefix cache holds all of it but the last words.
- On a terminal Ctrl-C ends the answer, and what was said of it stays in the conversation; at the prompt it gives up the
  turn. With a pipe it ends the program.
- On a terminal a turn that fails is told and dropped, unless the engine died of it; a pipe ends there, since what
  follows may lean on it.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer

from perdure import EngineDead, InvalidValue, PerdureError
from perdure.cli.conversation import Conversation
from perdure.cli.input import objects_from, piped_line, typed_line
from perdure.cli.options import EngineOptions, SamplingOptions, spelled_out
from perdure.cli.output import complain, remark
from perdure.cli.speed import speed_of
from perdure.cli.turns import Turn, turns

TEMPERATURE = 0.7
GREETING = "Ctrl-C ends an answer, /help shows what can be typed, /quit or Ctrl-D ends the program."
HELP = (
    "/help          shows this",
    "/reset, /new   begins a new conversation",
    "/system TEXT   begins a new one and tells the model TEXT first; without TEXT, nothing",
    "/quit, Ctrl-D  ends the program",
    "Ctrl-C         ends an answer, or gives up what is being typed",
    'A line that ends in \\ goes on in the next; """ begins a text of many lines, """ ends it.',
)


@spelled_out
def chat(
    sampling: SamplingOptions,
    engine: EngineOptions,
    system: Annotated[str | None, typer.Option(help="What the model is told before the first turn.")] = None,
    tools: Annotated[
        Path | None, typer.Option(metavar="FILE.json", help="Tools that the model's template describes to it.")
    ] = None,
    speed: Annotated[bool, typer.Option("--speed", help="Say after each answer how fast it came.")] = False,
) -> None:
    """Talk with a model, a line a turn.

    Ctrl-C ends an answer, /reset the conversation, /quit or Ctrl-D the program; /help tells more. A pipe's lines are
    turns too.
    """
    params = sampling.params(temperature=TEMPERATURE, return_prompt=speed)
    settings = engine.settings()
    described = None if tools is None else objects_from(tools)

    from perdure import AsyncLLM

    with asyncio.Runner() as runner:
        llm = AsyncLLM(**settings)
        try:
            _converse(runner, Conversation(llm, params, system, described), speed)
        finally:
            llm.shutdown()


def _converse(runner: asyncio.Runner, conversation: Conversation, speed: bool) -> None:
    somebody = sys.stdin.isatty() and sys.stdout.isatty()
    if somebody:
        remark(GREETING)
    for turn in turns(typed_line if somebody else piped_line, may_give_up=somebody):
        if turn.command == "/quit":
            return
        try:
            _take(runner, conversation, turn, speed, somebody)
        except (KeyboardInterrupt, PerdureError) as error:  # the turn is dropped
            if not somebody or isinstance(error, EngineDead):
                raise
            if isinstance(error, PerdureError):
                complain(str(error))


def _take(runner: asyncio.Runner, conversation: Conversation, turn: Turn, speed: bool, somebody: bool) -> None:
    """One turn: a command, or something to answer."""
    match turn.command:
        case None:
            result = runner.run(conversation.answer(turn.text, interruptible=somebody))
            if result.outputs[0].finish_reason == "abort":
                remark("stopped; what was said so far stays in the conversation")
            if speed:
                remark(speed_of([result]))
        case "/help":
            for line in HELP:
                remark(line)
        case "/new" | "/reset":
            conversation.restart()
        case "/system":
            conversation.tell(turn.text or None)
        case unknown:
            raise InvalidValue(f'{unknown} is no command; /help lists them, and """ before a text sends it as it is')
