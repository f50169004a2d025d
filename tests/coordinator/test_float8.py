"""Row feat-fp8: weights, inputs and pages in 8 bits, through the coordinator and driven directly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perdure import LLM
from perdure.models.tiny import make_tiny_llama
from perdure.ops.float8 import E4M3, Float8Weight
from tests.coordinator.conftest import MakeFleet
from tests.engine.helpers import check_equal, prompt, settings
from tests.witness import witness


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As M, hidden 128."""
    return make_tiny_llama(tmp_path_factory.mktemp("wide") / "llama", hidden_size=128)


def test_feat_fp8(make_fleet: MakeFleet, wide: Path) -> None:
    """Five requests over two owners equal the same engine driven directly, exactly; scores are finite."""
    prompts = [prompt(length) for length in (16, 33, 5, 48, 17)]
    params = [
        settings(max_tokens=20, temperature=n % 2 * 0.8, seed=n, logprobs=2, return_prompt=True) for n in range(5)
    ]
    config = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
    with LLM(str(wide), num_pages=128, steps_in_flight=1, enable_prefix_caching=False, **config) as direct:
        right = [direct.generate([ids], one)[0] for ids, one in zip(prompts, params)]
        runner = direct._engine.resolved.runner
        held = runner.memory._weights._weights.values()  # type: ignore[union-attr]
        quantised = sum(isinstance(weight, Float8Weight) for weight in held)
        assert runner._kv.layers[0].dtype == E4M3
    found = make_fleet(model=wide, steps_in_flight=2, **config).client().generate(prompts, params)
    for one, two in zip(found, right, strict=True):
        check_equal(one, two)
        scores = one.outputs[0].logprobs
        assert one.prompt_token_ids and scores is not None and torch.tensor(scores.top_scores).isfinite().all()
    witness("feat-fp8", device="cpu", weights=quantised, token_ids=found[0].outputs[0].token_ids)
