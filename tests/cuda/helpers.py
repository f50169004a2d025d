"""What these tests share."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from perdure import LLM
from perdure.ops.attention import LayerAttention
from tests.engine.helpers import num_replays, prompt, settings
from tests.engine.test_value_pages import LENGTHS, PageWatch
from tests.witness import witness

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""Relative error of a function of a few sums, by the type it computes in."""


class Random:
    """Tensors without a pattern, the same for the same order of calls."""

    def __init__(self, device: torch.device, seed: int = 0) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator).to(self._device, dtype)

    def order(self, count: int) -> torch.Tensor:
        return torch.randperm(count, generator=self._generator)


def sinks_of(layer: LayerAttention, num_heads: int, random: Random) -> torch.Tensor | None:
    """Of a size that matters, if there are any."""
    return None if layer.sink is None else 2.0 * random(num_heads) * (layer.sink == "learnable")


def check_close(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> None:
    """right may be of a wider type. NaN never passes."""
    error = (found.double() - right.double()).norm() / right.double().norm()
    assert error <= TOLERANCE[dtype], f"relative error {error:.1e}"


def check_poisoned(model: Path, backend: str) -> None:
    """T58 by this form of attention: prompts of 1, 15, 16 and 17 ids, then again over the pages that are cached, each
    growing by pages that are planned ahead. model: in float16, with logits of size 30."""
    config: dict[str, Any] = {"device": "cuda", "num_pages": 24, "attention_backend": backend, "max_num_seqs": 8}
    prompts, params = [prompt(length) for length in LENGTHS], settings(max_tokens=40, prompt_logprobs=0, logprobs=0)
    with (
        LLM(str(model), **config) as plain,
        LLM(str(model), poison_free_pages=True, check_integrity=True, **config) as poisoned,
    ):
        watch = PageWatch(poisoned._engine)
        for _ in range(2):
            for found, right in zip(poisoned.generate(prompts, params), plain.generate(prompts, params), strict=True):
                assert found.error is None and found.outputs[0].token_ids == right.outputs[0].token_ids
                for one, two in ((found.outputs[0].logprobs, right.outputs[0].logprobs),
                                 (found.prompt_logprobs, right.prompt_logprobs)):  # fmt: skip
                    scores = torch.tensor(one.chosen), torch.tensor(two.chosen)
                    torch.testing.assert_close(*scores, atol=0.1, rtol=0.0, equal_nan=True)
                assert all(map(math.isfinite, found.outputs[0].selected_logprobs))
        assert watch.num_poisoned >= 2 * 5
        replays = {"replays": num_replays(poisoned)} if num_replays(poisoned) else {}
        witness("T58", num_poisoned_pages=watch.num_poisoned, num_kept=watch.num_kept, backend=backend, **replays)
