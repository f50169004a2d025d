"""`perdure generate`: one or more prompts, continued together and printed in their order.

- On a terminal text appears as it comes; elsewhere, and of several samples, each result is printed when it is whole.
- A prompt that fails leaves the others alone; its error is told at the end, and the exit code is 2.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from perdure import InvalidValue, PerdureError, RequestOutput, SamplingParams
from perdure.cli.input import FROM_STDIN, text_from
from perdure.cli.options import EngineOptions, IdsOption, JsonOption, SamplingOptions, ids_from, spelled_out
from perdure.cli.output import complain, remark, write
from perdure.cli.scores import rows_of
from perdure.cli.speed import speed_of

if TYPE_CHECKING:
    from perdure import AsyncLLM

HEADING_LENGTH = 60


@spelled_out
def generate(
    sampling: SamplingOptions,
    engine: EngineOptions,
    prompts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Text to continue; - reads it from stdin.")
    ] = None,
    n: Annotated[int, typer.Option("--n", help="Samples of each prompt, each another draw.")] = 1,
    chat: Annotated[bool, typer.Option("--chat", help="Ask it as the user of a chat.")] = False,
    ids: IdsOption = None,
    logprobs: Annotated[
        int | None, typer.Option(help="With --json: scores, and the K best ids.", metavar="K", show_default=False)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Continue one or more prompts.

    The text goes to stdout, its speed to stderr. Several prompts run together and are printed in their order.
    """
    arguments = list(prompts or [])
    if not arguments and ids is None:
        raise InvalidValue("give a PROMPT (- reads it from stdin) or --ids")
    if arguments.count(FROM_STDIN) > 1:
        raise InvalidValue("- stands for stdin and can be given once only")
    if chat and ids is not None:
        raise InvalidValue("--chat lays out text, --ids gives what is laid out already: use one of them")
    if logprobs is not None and not as_json:
        raise InvalidValue(f"--logprobs={logprobs} needs --json")
    kind = "delta" if sys.stdout.isatty() and not as_json and n == 1 else "final"
    params = sampling.params(n=n, logprobs=logprobs, return_prompt=True, output_kind=kind)
    settings = engine.settings()
    inputs: list[str | list[int]] = [text_from(argument) for argument in arguments]
    if ids is not None:
        inputs.append(ids_from(ids))

    from perdure import AsyncLLM

    llm = AsyncLLM(**settings)
    try:
        outcomes = asyncio.run(_answer(llm, inputs, params, chat, as_json))
    except KeyboardInterrupt:
        write("\n" if sys.stdout.isatty() else "")  # what a shell prints next begins a line
        raise
    results = [one for one in outcomes if isinstance(one, RequestOutput)]
    if any(sample.token_ids for one in results for sample in one.outputs):
        remark(speed_of(results))
    failures = [(at, _error_of(one)) for at, one in enumerate(outcomes) if _error_of(one) is not None]
    for at, error in failures:
        complain(str(error) if len(outcomes) == 1 else f"prompt {at + 1}: {error}")
    if failures:
        raise typer.Exit(2)


Outcome = RequestOutput | PerdureError


async def _answer(
    llm: AsyncLLM, inputs: list[str | list[int]], params: SamplingParams, chat: bool, as_json: bool
) -> list[Outcome]:
    """Submit all, then show each in turn."""
    outcomes: list[Outcome] = []
    async with llm:
        handles = [
            llm.chat([{"role": "user", "content": prompt}], params) if chat else llm.submit(prompt, params)
            for prompt in inputs
        ]
        for at, handle in enumerate(handles):
            if len(handles) > 1 and not as_json:
                write(("\n" if at else "") + _heading(inputs[at]))
            try:
                async for part in handle:
                    if not as_json and params.n == 1:
                        write(part.outputs[0].text)
                outcome: Outcome = await handle
            except PerdureError as error:
                outcome = error
            if as_json:
                write("".join(json.dumps(one) + "\n" for one in _as_json(handle.request_id, outcome)))
            elif isinstance(outcome, RequestOutput):
                for sample in outcome.outputs:
                    if params.n > 1:
                        write(("\n" if sample.index else "") + f"==> sample {sample.index + 1} <==\n{sample.text}")
                    ids = "" if llm.tokenizer is not None else ",".join(map(str, sample.token_ids))
                    write(f"{ids}\n")
            outcomes.append(outcome)
    return outcomes


def _heading(prompt: str | list[int]) -> str:
    line = " ".join(prompt.split()) if isinstance(prompt, str) else ",".join(map(str, prompt))
    return f"==> {line if len(line) <= HEADING_LENGTH else line[: HEADING_LENGTH - 3] + '...'} <==\n"


def _error_of(outcome: Outcome) -> Exception | None:
    return outcome.error if isinstance(outcome, RequestOutput) else outcome


def _as_json(request_id: str | int, outcome: Outcome) -> list[dict[str, Any]]:
    """One result, an object a sample; scores only if they were asked, an index only where there are several."""
    if isinstance(outcome, PerdureError):
        fields: dict[str, Any] = {"text": "", "token_ids": [], "finish_reason": "error", "stop_reason": None}
        return [{"request_id": request_id, **fields, "error": str(outcome)}]
    shown = []
    for completion in outcome.outputs:
        fields = {"request_id": request_id, **({"index": completion.index} if len(outcome.outputs) > 1 else {})}
        fields |= {name: getattr(completion, name) for name in ("text", "token_ids", "finish_reason", "stop_reason")}
        if completion.logprobs is not None:
            fields["logprobs"] = rows_of(completion.logprobs, with_best=True)
        if outcome.error is not None and completion.finish_reason == "error":
            fields["error"] = str(outcome.error)
        shown.append(fields)
    return shown
