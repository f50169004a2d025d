"""Llama with random weights, through the whole engine, against transformers: an implementation that is not ours.

Scores of the whole vocabulary stand for logits: they are these less one number a row, so an error of a logit shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from perdure import LLM
from perdure.models.tiny import make_tiny_llama
from tests.engine.conftest import MakeLLM
from tests.engine.helpers import SCORE_TOLERANCE, changed_tensors, prompt, settings, whole_rows
from tests.engine.reference import CLEAR_LEAD

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "llama2": {"num_kv_heads": 4, "seed": 1},
    "llama3": {"rope_scaling": LLAMA3, "tie": True, "seed": 3},
}
GREEDY_TOKENS = 64
LENGTHS = (1, 5, 16, 33, 100)


class Oracle:
    """transformers' LlamaForCausalLM of the same directory, in fp32, without a cache."""

    def __init__(self, directory: Path) -> None:
        from transformers import LlamaForCausalLM

        # In float64, so that what is seen is our rounding alone: in fp32 the oracle's own error here is as large.
        self._model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float64).eval()

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """[N, V]"""
        found: Tensor = self._model(torch.tensor([list(ids)]), use_cache=False).logits[0]
        return found

    def scores(self, ids: Sequence[int]) -> Tensor:
        return self.logits(ids).double().log_softmax(-1)


@pytest.fixture(scope="module", params=SHAPES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_tiny_llama(tmp_path_factory.mktemp("parity"), **SHAPES[request.param])
    # Logits of the size that real models have: an error of 1e-4 is then 30 times the rounding of the largest.
    with changed_tensors(made) as tensors:
        if (head := tensors.get("lm_head.weight")) is not None:
            head *= 0.5
    return made


@pytest.fixture(scope="module")
def oracle(directory: Path) -> Oracle:
    return Oracle(directory)


@pytest.mark.parametrize("budget", [512, 32, 7])
def test_logits_of_prefill_chunks_and_decode(budget: int, directory: Path, oracle: Oracle, make_llm: MakeLLM) -> None:
    """Every position of a prompt, whole and in chunks of 32 and 7, and of 20 tokens decoded after it: to 1e-4."""
    llm, ids = make_llm(directory, max_num_batched_tokens=budget), prompt(100)
    (output,) = llm.generate([ids], settings(max_tokens=20, logprobs=-1, prompt_logprobs=-1))
    of_prompt, of_output = whole_rows(output.prompt_logprobs), whole_rows(output.outputs[0].logprobs)
    truth = oracle.scores([*ids, *output.outputs[0].token_ids])
    assert truth.std() > 3, "scores of this size make the tolerance mean something"
    assert of_prompt.shape == (99, 512) and of_output.shape == (20, 512)
    assert (of_prompt.double() - truth[:99]).abs().max() <= SCORE_TOLERANCE
    assert (of_output.double() - truth[99:119]).abs().max() <= SCORE_TOLERANCE


def check_greedy(llm: LLM, oracle: Oracle, prompts: list[list[int]]) -> None:
    """Their 64 greedy ids are the oracle's; at each of them the two best logits differ clearly."""
    for output, ids in zip(llm.generate(prompts, settings(max_tokens=GREEDY_TOKENS)), prompts):
        token_ids = output.outputs[0].token_ids
        assert len(token_ids) == GREEDY_TOKENS
        # Equal to the best id after the oracle's own reading of all ids before it: by induction its own continuation.
        rows = oracle.logits([*ids, *token_ids])[len(ids) - 1 : -1]
        best = rows.topk(2).values
        assert float((best[:, 0] - best[:, 1]).min()) > CLEAR_LEAD, "these ids prove nothing"
        assert token_ids == rows.argmax(-1).tolist()


@pytest.mark.parametrize("depth", [1, 2])
def test_greedy_ids_alone_and_among_mixed_lengths(
    depth: int, directory: Path, oracle: Oracle, make_llm: MakeLLM
) -> None:
    llm = make_llm(directory, steps_in_flight=depth, max_num_batched_tokens=48)
    prompts = [prompt(length, seed=2) for length in LENGTHS]
    for ids in prompts:
        check_greedy(llm, oracle, [ids])
    llm.reset_prefix_cache()
    check_greedy(llm, oracle, prompts)
