"""Against transformers' own logits processors on SmolLM2: processed scores equal to 1e-5, on prompts of MT-bench.

The logits are the engine's; what is done to them, from the history there really was, is theirs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process as theirs

from perdure import LLM, SamplingParams
from tests.engine.helpers import check_empty, whole_rows
from tests.witness import witness

PROMPTS, NEW = 50, 2

Process = Callable[[Tensor, Tensor, int], Tensor]
"""From input ids [1, n], logits [1, V] and the prompt's length."""


def chain(*processors: Any) -> Process:
    def process(ids: Tensor, x: Tensor, prompt_length: int) -> Tensor:
        for processor in processors:
            x = processor(ids, x)
        return x

    return process


def noting(logits_seen: list[Tensor]) -> Callable[[list[int], Tensor], Tensor]:
    """A processor that keeps the model's logits and changes nothing."""

    def processor(output_ids: list[int], logits: Tensor) -> Tensor:
        logits_seen.append(logits.clone())
        return logits

    return processor


def bias(of: dict[int, float]) -> Any:
    return theirs.SequenceBiasLogitsProcessor({(token,): value for token, value in of.items()})


EOS = 2
FORMS: dict[str, tuple[dict[str, Any], Process]] = {
    "temperature": ({"temperature": 0.7}, chain(theirs.TemperatureLogitsWarper(0.7))),
    "top_k": ({"top_k": 20}, chain(theirs.TopKLogitsWarper(20))),
    "top_p": ({"top_p": 0.9}, chain(theirs.TopPLogitsWarper(0.9))),
    "min_p": ({"min_p": 0.05}, chain(theirs.MinPLogitsWarper(0.05))),
    "repetition_penalty": ({"repetition_penalty": 1.3}, chain(theirs.RepetitionPenaltyLogitsProcessor(1.3))),
    "bad_words": (
        {"bad_words": [[260], [28, 216], [198, 198]]},
        chain(theirs.NoBadWordsLogitsProcessor([[260], [28, 216], [198, 198]], None)),
    ),
    "logit_bias": ({"logit_bias": {260: 4.0, 28: -3.5}}, chain(bias({260: 4.0, 28: -3.5}))),
    "allowed_token_ids": (
        {"allowed_token_ids": [*range(100, 4000)]},
        chain(theirs.PrefixConstrainedLogitsProcessor(lambda batch, ids: [*range(100, 4000)], 1)),
    ),
    "min_tokens": (
        {"min_tokens": 2, "stop_token_ids": [260, 28], "ignore_eos": True},
        lambda ids, x, prompt_length: theirs.MinNewTokensLengthLogitsProcessor(prompt_length, 2, [260, 28])(ids, x),
    ),
    "all": (
        {
            "logit_bias": {260: 4.0},
            "bad_words": [[28]],
            "repetition_penalty": 1.2,
            "temperature": 1.4,
            "min_p": 0.001,
            "top_k": 40,
            "top_p": 0.95,
        },
        chain(
            bias({260: 4.0}),
            theirs.NoBadWordsLogitsProcessor([[28]], None),
            theirs.RepetitionPenaltyLogitsProcessor(1.2),
            theirs.TemperatureLogitsWarper(1.4),
            theirs.MinPLogitsWarper(0.001),
            theirs.TopKLogitsWarper(40),
            theirs.TopPLogitsWarper(0.95),
        ),
    ),
}


@pytest.fixture(scope="module")
def prompts(data_dir: Path, smollm2_path: Path) -> list[str]:
    path = data_dir / "mt_bench" / "question.jsonl"
    if not path.exists():
        pytest.skip(f"no MT-bench at {path}")
    return [json.loads(line)["turns"][0] for line in path.read_text(encoding="utf-8").splitlines()][:PROMPTS]


def test_each_processor_equals_transformers(prompts: Sequence[str], smollm2_path: Path) -> None:
    """Each prompt has one of the settings, all run together; at each position all 49,152 scores are theirs."""
    names = [[*FORMS][at % len(FORMS)] for at in range(len(prompts))]
    seen: list[list[Tensor]] = [[] for _ in prompts]
    common: dict[str, Any] = {"max_tokens": NEW, "logprobs": -1, "logprobs_mode": "processed"}
    asked = [
        SamplingParams(**{"ignore_eos": True, **FORMS[name][0]}, **common, seed=at, logits_processors=noting(seen[at]))
        for at, name in enumerate(names)
    ]
    with LLM(str(smollm2_path), max_model_len=512) as llm:
        assert llm.tokenizer is not None
        ids = [llm.tokenizer.encode(text)[:24] for text in prompts]
        outputs = llm.generate(ids, asked)
        check_empty(llm._engine)
        size = llm.vocab_size
    worst = 0.0
    for name, prompt_ids, output, logits in zip(names, ids, outputs, seen):
        tokens = output.outputs[0].token_ids
        assert len(tokens) == NEW == len(logits)
        found = whole_rows(output.outputs[0].logprobs, size).double()
        for index in range(NEW):
            history = torch.tensor([[*prompt_ids, *tokens[:index]]])
            truth = FORMS[name][1](history, logits[index][None].double(), len(prompt_ids))[0].log_softmax(0)
            assert torch.equal(truth.isfinite(), found[index].isfinite()), f"{name}: other ids are kept"
            kept = truth.isfinite()
            worst = max(worst, (truth - found[index])[kept].abs().max().item())
            assert worst <= 1e-5, name
    witness("transformers-processors", prompts=len(prompts), settings=len({*names}), worst=worst)
