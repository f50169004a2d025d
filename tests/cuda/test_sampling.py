"""Draws and scores in Triton against `ops.sampling`, from equal logits: the same tokens, and scores to a rounding."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from perdure.ops import sampling
from perdure.ops.select import kept
from perdure.ops.triton import filters
from perdure.ops.triton.adjust import FINE, UNUSABLE, adjust, unadjusted
from perdure.ops.triton.filters import find_kept
from perdure.ops.triton.sampling import draw_tokens, restrict, weigh
from perdure.ops.triton.scores import Entries, View, best_ids, score
from perdure.ops.triton.weights import FAR, Filter, Kept, Masses, Settings, exp, scaled, weight
from tests.cuda.conftest import ON_GPU
from tests.witness import witness

VOCAB = 151_936 if ON_GPU else 600
ROWS = 256 if ON_GPU else 3


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
        asked=column(np.zeros(rows), torch.int64),
        masks=column(np.zeros(rows), torch.int64),
    )


def draw(
    logits: np.ndarray | torch.Tensor, of: sampling.SamplingColumns, device: torch.device, find: Filter = find_kept
) -> list[int]:
    tokens, codes, last = (
        torch.full((len(logits) + extra,), -7, dtype=torch.int32, device=device) for extra in (0, 0, 1)
    )
    draw_tokens(torch.as_tensor(logits).to(device), settings(of, device), tokens, codes, last, find)
    assert last.tolist() == [*tokens.tolist(), -7] and set(codes.tolist()) == {FINE.value}
    return tokens.tolist()


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
    found = draw(logits, of, device)
    assert found == sampling.sample(logits, of).tolist()
    witness("sampling-cuda-draw", rows=len(found), distinct=len({*found}))


def test_logits_of_16_bits_are_read_as_they_are(device):
    """Equals in plenty, and no copy in fp32."""
    rng = np.random.default_rng(8)
    logits = (3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    narrow = torch.from_numpy(logits).to(torch.bfloat16 if ON_GPU else torch.float16)  # no bfloat16 in the interpreter
    of = columns(ROWS, rng)
    assert draw(narrow, of, device) == sampling.sample(narrow.float().numpy(), of).tolist()


@triton.jit
def _weight_kernel(x, scaled_to, exps, weights, top, heat, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    its = scaled(tl.load(x + at), tl.load(top), tl.load(heat))
    tl.store(scaled_to + at, its)
    tl.store(exps + at, exp(its))
    tl.store(weights + at, weight(tl.load(x + at), tl.load(top), tl.load(heat)))


@pytest.mark.parametrize("heat", [1.0, 0.7, 1.9999999, 0.013, 3e-20])
def test_scaled_values_and_weights_to_the_bit(device, heat):
    """Of values spread over all there are, near the largest and far below it."""
    bits = np.arange(0, 2**31 - 2**23, 97 if ON_GPU else 40_009, dtype=np.int64).astype(np.int32)
    bits = np.concatenate([bits, np.zeros(-len(bits) % 1024, np.int32)])
    top = np.float32(1.0 if heat < 1e-9 else 17.3)
    values = top - bits.view(np.float32)
    x = torch.from_numpy(values).to(device)
    scaled_to, exps, weights = (torch.empty_like(x) for _ in range(3))
    limits = (torch.tensor([value], dtype=torch.float32, device=device) for value in (top, heat))
    _weight_kernel[(len(x) // 1024,)](x, scaled_to, exps, weights, *limits, BLOCK=1024, enable_fp_fusion=False)
    with np.errstate(over="ignore"):
        right = (values - top) / np.float32(heat)
    near = values - top > FAR.value
    assert np.array_equal(scaled_to.cpu().numpy()[near], right[near])
    assert np.array_equal(exps.cpu().numpy(), np.exp(right))
    assert np.array_equal(weights.cpu().numpy(), np.exp(right))


def test_a_uniform_draw_is_in_place(device):
    """Flat logits: the token says which number was drawn, so the key is right to its last bit."""
    rows = 16 if ON_GPU else 2
    of = columns(rows, np.random.default_rng(3), temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)
    logits = np.zeros((rows, VOCAB), np.float32)
    assert draw(logits, of, device) == sampling.sample(logits, of).tolist()


def test_forced_tokens_and_unusable_rows(device):
    rng = np.random.default_rng(1)
    logits = rng.standard_normal((4, 300)).astype(np.float32)
    logits[1, 77], logits[2] = np.nan, -np.inf
    of = settings(columns(4, rng, temperature=1.0), device)
    of.forced[0] = 123
    tokens, codes, last = (torch.zeros(4, dtype=torch.int32, device=device) for _ in range(3))
    draw_tokens(torch.from_numpy(logits).to(device), of, tokens, codes, last)
    fine, bad = FINE.value, UNUSABLE.value
    assert tokens[0] == 123 and codes.tolist() == [fine, bad, bad, fine] and tokens[1] == tokens[2] == 0


@pytest.mark.parametrize("is_processed", [False, True], ids=["raw", "processed"])
def test_scores(device, is_processed):
    """Of the tokens of rows in any order, one of them twice; of a listed id, and of none."""
    rng = np.random.default_rng(4)
    logits = (3 * rng.standard_normal((6, VOCAB))).astype(np.float32)
    logits[3] = np.round(logits[3])
    logits[4, 3] = -0.0
    of = columns(6, rng)
    order = np.array([4, 0, 3, 3, 5, 1, 2])
    ids, listed = sampling.sample(logits, of)[order], rng.integers(0, VOCAB, 7)
    seen = sampling.processed(logits, of) if is_processed else logits
    right = sampling.score(seen[order], ids, np.full(7, 0), [np.array([id_]) for id_ in listed])
    placed = settings(of, device)
    tokens, codes, last = (torch.zeros(7, dtype=torch.int32, device=device) for _ in range(3))
    drawn = draw_tokens(torch.from_numpy(logits).to(device), placed, tokens, codes, last)
    entries = Entries(*(torch.tensor(x, dtype=torch.int32, device=device) for x in (order, [int(is_processed)] * 7)))
    view = View(drawn[0], entries, (placed, drawn[1]))
    asked = np.stack([ids, listed, np.full(7, -1)], 1)
    found = score(view, torch.from_numpy(asked).to(device, torch.int32))
    near(found.scores[:, 0], right.chosen)
    near(found.scores[:, 1], np.concatenate(right.listed_scores))
    assert found.ranks[:, 0].tolist() == right.rank.tolist() and not found.is_bad.any()
    assert found.ranks[:, 1].tolist() == np.concatenate(right.listed_ranks).tolist()
    for count in (20, 100):  # one after the other, and all at once
        top = sampling.score(seen[order], ids, np.full(7, count), [np.array([id_]) for id_ in listed])
        best, values = best_ids(view, count, found.normaliser)
        assert best.tolist() == np.stack(top.top_ids).tolist()
        near(values, np.stack(top.top_scores))


def near(found: torch.Tensor, right: np.ndarray) -> None:
    np.testing.assert_allclose(found.cpu().numpy(), right, rtol=1e-6, atol=1e-6)


def test_unusable_rows_have_no_scores(device):
    logits = torch.zeros(3, VOCAB, device=device)
    logits[1, 17] = torch.nan
    every = torch.arange(3, dtype=torch.int32, device=device)
    view = View(unadjusted(logits), Entries(every, torch.zeros_like(every)))
    assert score(view, every[:, None]).is_bad.tolist() == [False, True, False]


KEPT = {
    "top-k": {"top_k": 4, "top_p": 1.0, "min_p": 0.0},
    "top-p": {"top_k": 0, "top_p": 0.7, "min_p": 0.0},
    "joint": {"top_k": 50, "top_p": 0.9, "min_p": 0.0},
    "min-p": {"top_k": 50, "top_p": 0.95, "min_p": 0.05},
}


def kept_by(form: Kept, x: np.ndarray, least: np.ndarray, row: int) -> list[int]:
    """Ids of scaled values x [n, V]."""
    edge, tie = form.border[row].item(), form.last_tie[row].item()
    inside = (x[row] > edge) | ((x[row] == edge) & (np.arange(x.shape[1]) <= tie))
    return np.flatnonzero(inside & (np.exp(x[row]) >= np.float32(least[row]))).tolist()


SHAPES = {"peaked": (3.0, 0.0), "flat": (0.01, 0.0), "ties": (3.0, 0.5), "few values": (0.4, 1.0), "level": (0.0, 0.0)}
"""Of logits: their spread, and what they are rounded to."""


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("room", [64, filters.ROOM])
def test_kept_ids(device, monkeypatch, room, shape):
    """To the id, of many settings; where all that is in question has room beside the row, and where it has not."""
    monkeypatch.setattr(filters, "ROOM", room)
    (spread, step), rng, rows = SHAPES[shape], np.random.default_rng(7), 40 if ON_GPU else 3
    logits = (2.0 + spread * rng.standard_normal((rows, VOCAB))).astype(np.float32)
    if step:
        logits = (np.round(logits / step) * step).astype(np.float32)
    logits[:, 5::7] = -np.inf
    of = columns(rows, rng)
    of.temperature[:] = rng.choice([0.3, 0.7, 1.3], rows)
    of.top_k[:] = rng.choice([0, 2, 50, 300, 100_000], rows)
    of.top_p[:] = rng.choice([1.0, 0.999, 0.95, 0.5], rows)
    of.min_p[:] = rng.choice([0.0, 0.0, 1e-3, 0.2], rows)
    placed = settings(of, device)
    x = unadjusted(torch.from_numpy(logits).to(device))
    form = find_kept(x, placed, weigh(x, placed))
    seen = (logits - logits.max(1, keepdims=True)) / of.temperature[:, None]
    for row in range(rows):
        limits = {"top_k": int(of.top_k[row]), "top_p": float(of.top_p[row]), "min_p": float(of.min_p[row])}
        right = kept(seen[row], np.exp(seen[row]), **limits)
        every = np.arange(VOCAB) if right is None else right
        assert kept_by(form, seen, of.min_p, row) == every.tolist(), (limits, float(of.temperature[row]))


def test_masses_of_what_is_kept(device):
    """Of rows with filters, where these are not found by a kernel that sums them on its way; others stay."""
    rng, rows = np.random.default_rng(9), 5
    logits = (3 * rng.standard_normal((rows, VOCAB))).astype(np.float32)
    of = columns(rows, rng, temperature=0.7, top_p=1.0, min_p=0.0)
    of.top_k[:] = [5, 0, 300, 1, 0]
    of.top_p[4] = 0.8
    placed = settings(of, device)
    x = unadjusted(torch.from_numpy(logits).to(device))
    masses = weigh(x, placed)
    form = find_kept(x, placed, masses)
    found = Masses(torch.full_like(masses.sums, 7.0), masses.of_chunks)
    restrict(x, placed, form, found)
    seen = (logits - logits.max(1, keepdims=True)) / of.temperature[:, None]
    sums = found.sums.double().sum(1)
    for row in (0, 2, 4):
        near(sums[row], np.exp(seen[row, kept_by(form, seen, of.min_p, row)]).sum())
    assert found.sums[1].eq(7.0).all(), "it has no filter"


@pytest.mark.parametrize("name", KEPT)
def test_kept_ids_by_flashinfer(gpu, name):
    """Both forms keep what `ops.select.kept` does, of logits without a pattern; and what is drawn is the same."""
    pytest.importorskip("flashinfer")
    from perdure.ops import flashinfer_filters

    rng = np.random.default_rng(5)
    logits = (3 * rng.standard_normal((ROWS, VOCAB))).astype(np.float32)
    logits[:, 5::7] = -np.inf
    of = columns(ROWS, rng, temperature=0.7, **KEPT[name])
    placed = settings(of, gpu)
    x = adjust(torch.from_numpy(logits).to(gpu), placed.asked, placed.masks, placed.output_index)
    seen = (logits - logits.max(1, keepdims=True)) / of.temperature[:, None]
    counts = []
    masses = weigh(x, placed)
    ours, theirs = find_kept(x, placed, masses), flashinfer_filters.find_kept(x, placed, masses)
    for row in range(ROWS):
        limits = {"top_k": int(of.top_k[row]), "top_p": float(of.top_p[row]), "min_p": float(of.min_p[row])}
        right = kept(seen[row], np.exp(seen[row]), **limits)
        for form in (ours, theirs):
            assert kept_by(form, seen, of.min_p, row) == right.tolist()
        counts.append(len(right))
    assert draw(logits, of, gpu, flashinfer_filters.find_kept) == draw(logits, of, gpu)
    witness("sampling-flashinfer-kept", rows=ROWS, most=max(counts), least=min(counts))
