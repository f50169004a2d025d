"""Rows feat-swa-sink and feat-alternating-swa-sink: attention sinks through the coordinator and driven directly."""

from __future__ import annotations

from pathlib import Path

import pytest

from perdure import LLM
from perdure.models.tiny import make_tiny
from tests.coordinator.conftest import MakeFleet
from tests.engine.helpers import SINKS, check_equal, prompt, settings
from tests.witness import witness


@pytest.mark.parametrize("row", SINKS)
def test_sinks(make_fleet: MakeFleet, row: str, tmp_path: Path) -> None:
    """Five requests over two owners equal the same engine driven directly, exactly."""
    family, config = SINKS[row]
    model = make_tiny(family, tmp_path / family, **config)
    prompts = [prompt(length) for length in (16, 33, 5, 48, 17)]
    params = [
        settings(max_tokens=20, temperature=n % 2 * 0.8, seed=n, logprobs=2, return_prompt=True) for n in range(5)
    ]
    with LLM(str(model), num_pages=128, steps_in_flight=1, enable_prefix_caching=False) as direct:
        right = [direct.generate([ids], one)[0] for ids, one in zip(prompts, params)]
        kinds = [f"{kind.window} {kind.sink}" for kind in direct._engine.resolved.loaded.config.attention]
    found = make_fleet(model=model, steps_in_flight=2).client().generate(prompts, params)
    for one, two, ids in zip(found, right, prompts, strict=True):
        check_equal(one, two)
        assert one.prompt_token_ids == ids
    witness(row, device="cpu", layers=", ".join(kinds), token_ids=found[0].outputs[0].token_ids)
