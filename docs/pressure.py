"""Makes docs/pressure.svg: eight requests in a fifth of the pages they need give the texts they give in a roomy pool.

    python docs/pressure.py

`tests/engine/test_pressure.py` runs and asserts the same.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from perdure import LLM, RequestOutput, SamplingParams, Trace
from perdure.api.output import Stats

PROMPTS = (
    "Once upon a time there was",
    "The capital of France is",
    "def fibonacci(n):",
    "Water boils at",
    "The three laws of motion are",
    "My favourite colour is",
    "A prime number is",
    "In the year 1969,",
)
SHARE = 5
SETTINGS: dict[str, Any] = {"page_size": 8, "max_model_len": 512, "max_num_batched_tokens": 32}
"""Small pages and chunks: a short run then shows what a long one has."""


def run(count: int, max_tokens: int, **settings: Any) -> tuple[list[RequestOutput], Stats]:
    """So many requests at once, of so many new tokens each, with their scores."""
    prompts = [f"{PROMPTS[number % 8]} {number // 8 or ''}".strip() for number in range(count)]
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, logprobs=0, return_prompt=True)
    names = [f"request {number + 1}" for number in range(count)]
    with LLM(max_num_seqs=count, **SETTINGS, **settings) as llm:
        return llm.generate(prompts, params, request_ids=names), llm.stats()


def num_pages_needed(outputs: list[RequestOutput]) -> int:
    """In which all fit at once."""
    lengths = [len(one.prompt_token_ids or ()) + len(one.outputs[0].token_ids) for one in outputs]
    return sum(-(-length // SETTINGS["page_size"]) for length in lengths)


def run_twice(count: int, max_tokens: int, journal: Path) -> tuple[list[RequestOutput], list[RequestOutput], Stats]:
    """With room for all, then in a fifth of the pages that they have held, recorded."""
    roomy, _ = run(count, max_tokens)
    num_pages = num_pages_needed(roomy) // SHARE
    tight, stats = run(count, max_tokens, num_pages=num_pages, paused_pages=num_pages // 2, journal=str(journal))
    return roomy, tight, stats


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        journal = Path(directory) / "run"
        roomy, tight, stats = run_twice(8, 60, journal)
        for one, other in zip(roomy, tight, strict=True):
            assert one.outputs[0].text == other.outputs[0].text and one.outputs[0].logprobs == other.outputs[0].logprobs
        Path(__file__).with_suffix(".svg").write_text(Trace.read(journal).svg())
    print(f"{len(tight)} equal results after {stats.num_pauses} pauses and {stats.num_evictions} evictions")


if __name__ == "__main__":
    main()
