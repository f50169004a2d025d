"""Kept sets and draws of random rows against float64, and distributions of many draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perdure.ops import sampling_reference as reference
from perdure.ops.philox import uniforms
from perdure.ops.sampling import draw, processed, sample
from tests.ops.test_sampling import chi_squared_limit, columns
from tests.witness import witness

ROWS = 50
EXAMPLES = 100  # 5,000 rows
NEAR = 1e-5  # how far a border may be off in fp32, relative


def random_settings(rng: np.random.Generator) -> dict[str, Any]:
    return {
        "temperature": float(np.float32(rng.choice([0.0, 1e-3, 0.3, 0.7, 1.0, 2.5]))),
        "top_k": int(rng.choice([0, -1, 1, 2, 3, 7, 40, 1000])),
        "top_p": float(rng.choice([1.0, 1.0, 0.9999, 0.95, 0.5, 0.1, 1e-7])),
        "min_p": float(rng.choice([0.0, 0.0, 0.001, 0.05, 0.3, 1.0])),
    }


def random_rows(rng: np.random.Generator) -> np.ndarray:
    """Rows with ties, of different spread, some ids excluded."""
    vocab_size = int(rng.integers(2, 60))
    x = rng.standard_normal((ROWS, vocab_size)) * rng.choice([0.1, 1.0, 8.0], (ROWS, 1))
    x = (np.round(x * 64) / 64).astype(np.float32)
    x[(rng.random(x.shape) < 0.2) & (np.arange(vocab_size) > 0)] = -np.inf
    return x


def check_kept(kept: list[int], logits: np.ndarray, asked: dict[str, Any]) -> bool:
    """Whether the ids are the reference's; where they differ it must be by what fp32 cannot tell apart."""
    if kept == reference.kept_ids(logits, **asked):
        return True
    fewer = reference.kept_ids(
        logits, **{**asked, "top_p": asked["top_p"] * (1 - NEAR), "min_p": min(1.0, asked["min_p"] * (1 + NEAR))}
    )
    more = reference.kept_ids(
        logits, **{**asked, "top_p": min(1.0, asked["top_p"] * (1 + NEAR)), "min_p": asked["min_p"] * (1 - NEAR)}
    )
    assert {*fewer} <= {*kept} <= {*more}, (kept, fewer, more, asked)
    return False


def test_kept_sets_and_draws_of_random_rows(soak_factor: int) -> None:
    num_exact = num_rows = 0

    @settings(max_examples=EXAMPLES if soak_factor == 1 else 20 * EXAMPLES * soak_factor // 10)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        nonlocal num_exact, num_rows
        rng = np.random.default_rng(seed)
        logits = random_rows(rng)
        asked = [random_settings(rng) for _ in range(ROWS)]
        own = columns(
            [{**one, "seed": seed, "child": index % 3, "output_index": index} for index, one in enumerate(asked)]
        )
        x, tokens = processed(logits, own), sample(logits, own)
        u = uniforms(own.seed, own.output_index, own.child)
        for row, one in enumerate(asked):
            kept = np.flatnonzero(np.isfinite(x[row])).tolist()
            num_exact += check_kept(kept, logits[row], one)
            num_rows += 1
            assert tokens[row] in kept
            if one["temperature"] > 0 and one["top_k"] != 1:
                mass = np.exp((logits[row, kept].astype(np.float64) - logits[row].max()) / one["temperature"])
                at = kept.index(tokens[row])
                below, total = mass[:at].sum(), mass.sum()
                assert below / total - NEAR <= u[row] <= (below + mass[at]) / total + NEAR

    check()
    witness("kept-sets", rows=num_rows, exact=num_exact)
    assert num_exact >= 0.999 * num_rows


DRAWS = 200_000


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0.6},
        {"temperature": 1.0, "top_k": 9},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.07},
        {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02},
    ],
    ids=["temperature", "top_k", "top_p", "min_p", "joint"],
)
def test_draws_follow_the_distribution(asked: dict[str, Any]) -> None:
    """200,000 draws of one seed, by output index, from what `sample` draws from."""
    logits = np.random.default_rng(4).standard_normal((1, 80)).astype(np.float32) * 2
    w = np.exp(processed(logits, columns([asked])))
    index = np.arange(DRAWS)
    tokens = draw(np.broadcast_to(w, (DRAWS, 80)), uniforms(np.full(DRAWS, 3, np.uint64), index))
    few = columns([{**asked, "seed": 3, "output_index": at} for at in range(1000)])
    assert np.array_equal(sample(np.broadcast_to(logits, (1000, 80)), few), tokens[:1000])
    expected = np.exp(reference.processed(logits[0], **{"top_k": 0, "top_p": 1.0, "min_p": 0.0, **asked})) * DRAWS
    counts = np.bincount(tokens, minlength=80)
    assert counts[expected == 0].sum() == 0
    rare = (expected < 5) & (expected > 0)
    often = expected >= 5
    observed = np.append(counts[often], counts[rare].sum())[: None if rare.any() else -1]
    wanted = np.append(expected[often], expected[rare].sum())[: None if rare.any() else -1]
    assert ((observed - wanted) ** 2 / wanted).sum() < chi_squared_limit(len(wanted) - 1)
