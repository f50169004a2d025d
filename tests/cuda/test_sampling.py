"""Draws and scores in Triton against `ops.sampling`, from equal logits: the same tokens, and scores to a rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perdure.ops import sampling
from perdure.ops.triton.sampling import Settings, draw_tokens, score_ids, top_ids
from tests.cuda.conftest import ON_GPU
from tests.witness import witness

VOCAB = 151_936 if ON_GPU else 600
ROWS = 256 if ON_GPU else 5


def columns(rows: int, rng: np.random.Generator, **fixed: float) -> sampling.SamplingColumns:
    """Mixed settings, a column of them fixed."""

    def drawn(name, values):
        return np.full(rows, fixed[name]) if name in fixed else rng.choice(values, rows)

    return sampling.SamplingColumns(
        temperature=drawn("temperature", [0.0, 0.01, 0.6, 0.7, 1.0, 1.3]).astype(np.float32),
        top_k=drawn("top_k", [0, 0, 1, 5, 50]).astype(np.int64),
        top_p=drawn("top_p", [1.0, 1.0, 0.95, 0.5, 0.1]).astype(np.float64),
        min_p=drawn("min_p", [0.0, 0.0, 0.05]).astype(np.float64),
        seed=rng.integers(0, 2**63, rows).astype(np.uint64),
        child=rng.integers(0, 4, rows),
        output_index=rng.integers(0, 5000, rows),
    )


def settings(of: sampling.SamplingColumns, device: torch.device) -> Settings:
    def column(values: np.ndarray, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device, dtype)

    rows = len(of.top_k)
    low, high = of.seed & np.uint64(0xFFFFFFFF), of.seed >> np.uint64(32)
    return Settings(
        temperature=column(of.temperature, torch.float32),
        top_k=column(of.top_k),
        top_p=column(of.top_p, torch.float64),
        min_p=column(of.min_p, torch.float32),
        seed_low=column(low.astype(np.uint32).view(np.int32)),
        seed_high=column(high.astype(np.uint32).view(np.int32)),
        output_index=column(of.output_index),
        child=column(of.child),
        forced=column(np.full(rows, -1)),
        slots=column(np.arange(rows)),
    )


def draw(logits: np.ndarray, of: sampling.SamplingColumns, device: torch.device) -> tuple[list[int], list[int]]:
    tokens, bad, last = (
        torch.full((len(logits) + extra,), -7, dtype=torch.int32, device=device) for extra in (0, 0, 1)
    )
    draw_tokens(torch.from_numpy(logits).to(device), settings(of, device), tokens, bad, last)
    assert last.tolist() == [*tokens.tolist(), -7]
    return tokens.tolist(), bad.tolist()


@pytest.mark.parametrize(
    "fixed",
    [{"top_k": 0, "top_p": 1.0, "min_p": 0.0}, {"top_p": 1.0, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0}, {}],
    ids=["plain", "top_k", "top_p", "mixed"],
)
@pytest.mark.parametrize("ties", [False, True], ids=["", "ties"])
def test_equal_logits_give_equal_tokens(device, fixed, ties):
    rng = np.random.default_rng(len(fixed) + 10 * ties)
    logits = (3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    if ties:
        logits = np.round(logits * 2) / 2
    logits[:, 5::7] = -np.inf
    of = columns(ROWS, rng, **fixed)
    found, bad = draw(logits, of, device)
    right = sampling.sample(logits, of).tolist()
    assert found == right and not any(bad)
    witness("sampling-cuda-draw", rows=len(found), distinct=len({*found}))


def test_a_uniform_draw_is_in_place(device):
    """Flat logits: the token says which number was drawn, so the key is right to its last bit."""
    rows = 16 if ON_GPU else 4
    of = columns(rows, np.random.default_rng(3), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    logits = np.zeros((rows, VOCAB), np.float32)
    assert draw(logits, of, device)[0] == sampling.sample(logits, of).tolist()


def test_forced_tokens_and_unusable_rows(device):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    logits[1, 77], logits[2] = np.nan, -np.inf
    of = settings(columns(4, rng, temperature=1.0), device)
    of.forced[0] = 123
    tokens, bad, last = (torch.zeros(4, dtype=torch.int32, device=device) for _ in range(3))
    draw_tokens(torch.from_numpy(logits).to(device), of, tokens, bad, last)
    assert tokens[0] == 123 and bad.tolist() == [0, 1, 1, 0] and tokens[1] == tokens[2] == 0


def test_scores(device):
    rng = np.random.default_rng(4)
    logits = (3 * rng.standard_normal((6, VOCAB))).astype(np.float32)
    logits[3] = np.round(logits[3])
    logits[4, 3] = -0.0
    ids = rng.integers(0, VOCAB, 6)
    right = sampling.score(logits, ids, np.full(6, 20))
    on_device = torch.from_numpy(logits).to(device)
    chosen, rank, normaliser, bad = score_ids(on_device, torch.from_numpy(ids).to(device, torch.int32))
    assert np.abs(chosen.cpu().numpy() - right.chosen).max() <= 1e-6 and not bad.any()
    assert rank.tolist() == right.rank.tolist()
    best = top_ids(on_device, 20)
    assert best.tolist() == np.stack(right.top_ids).tolist()
    values = (on_device.gather(1, best).double() - normaliser[:, None]).float().cpu().numpy()
    assert np.abs(values - np.stack(right.top_scores)).max() <= 1e-6
