"""`perdure logprobs`: how likely a model finds a text, token by token."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from perdure import InvalidValue
from perdure.cli.input import text_from
from perdure.cli.options import EngineOptions, IdsOption, JsonOption, ids_from, spelled_out
from perdure.cli.output import json_number, write, write_table
from perdure.cli.scores import rows_of


@spelled_out
def logprobs(
    engine: EngineOptions,
    text: Annotated[
        str | None, typer.Argument(help="Text to score; - reads it from stdin.", show_default=False)
    ] = None,
    continuation: Annotated[str | None, typer.Option(help="Score only this, which follows the text.")] = None,
    ids: IdsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score a text, token by token.

    Scores are natural logarithms; rank 1 is the most likely token.
    """
    if (text is None) == (ids is None):
        raise InvalidValue("give either TEXT (- reads it from stdin) or --ids")
    settings = engine.settings()
    prompt: str | list[int] = ids_from(ids) if ids is not None else text_from(text or "")
    tail = None if continuation is None else text_from(continuation)

    from perdure import LLM

    with LLM(**settings) as llm:
        (result,) = llm.logprobs([prompt], None if tail is None else [tail])
        if result.error is not None:
            raise result.error
        scores = result.prompt_logprobs if tail is None else result.outputs[0].logprobs
        assert scores is not None
        rows = rows_of(scores)
        if scores.leading_none:
            rows.insert(0, _first_row(llm, prompt))
    total = float(sum(scores.chosen))
    if as_json:
        write(json.dumps({"tokens": rows, "sum": json_number(total)}) + "\n")
        return
    cells = [
        [str(at), str(row["token_id"]), _score(row["logprob"]), str(row["rank"] or "-"), repr(row["token"] or "")]
        for at, row in enumerate(rows)
    ]
    write_table(["at", "id", "logprob", "rank", "token"], cells)
    write(f"sum {total:.4f} over {scores.num_scored} tokens\n")


def _first_row(llm: Any, prompt: str | list[int]) -> dict[str, Any]:
    """The first token, which nothing precedes: it has no score."""
    tokenizer = llm.tokenizer
    first = tokenizer.encode(prompt)[0] if isinstance(prompt, str) else prompt[0]
    token = None if tokenizer is None else tokenizer.decode([first], False)
    return {"token_id": first, "token": token, "logprob": None, "rank": None}


def _score(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
