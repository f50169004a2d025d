"""Kept sets, draws and scores against their float64 oracles, and each row's independence of the others.

Names T38, T48, T49, T50 are rows of the project's list of cases.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from perdure.ops import sampling_reference as reference
from perdure.ops.philox import uniforms
from perdure.ops.sampling import SamplingColumns, Scores, draw, processed, sample, score, unusable_rows
from perdure.ops.select import kept, largest

EPS = float(np.finfo(np.float32).eps)


def chi_squared_limit(freedom: int) -> float:
    """Exceeded once in a thousand (Wilson and Hilferty's approximation)."""
    return freedom * (1 - 2 / (9 * freedom) + 3.09 * math.sqrt(2 / (9 * freedom))) ** 3


def columns(rows: list[dict[str, Any]], first_index: int = 0) -> SamplingColumns:
    """Settings of rows given as keywords; row i has seed i and output index first_index unless told."""
    return SamplingColumns(
        temperature=np.array([row.get("temperature", 1.0) for row in rows], np.float32),
        top_k=np.array([row.get("top_k", 0) for row in rows], np.int64),
        top_p=np.array([row.get("top_p", 1.0) for row in rows], np.float64),
        min_p=np.array([row.get("min_p", 0.0) for row in rows], np.float64),
        seed=np.array([row.get("seed", index) for index, row in enumerate(rows)], np.uint64),
        child=np.array([row.get("child", 0) for row in rows], np.int64),
        output_index=np.array([row.get("output_index", first_index) for row in rows], np.int64),
    )


def repeated(logits: np.ndarray, num_draws: int, **settings: Any) -> np.ndarray:
    """Many draws from one row of logits: as many output indices of one seed."""
    rows = [{**settings, "seed": 3, "output_index": index} for index in range(num_draws)]
    return sample(np.broadcast_to(logits, (num_draws, len(logits))), columns(rows))


def random_logits(num_rows: int, vocab_size: int, seed: int = 0) -> np.ndarray:
    """Rows with ties: values are multiples of 1/8."""
    rng = np.random.default_rng(seed)
    return (np.round(rng.standard_normal((num_rows, vocab_size)) * 24) / 8).astype(np.float32)


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_k": 4},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.8, "min_p": 0.01},
    {"top_k": 1},
    {"temperature": 2.0, "top_p": 0.3},
    {"temperature": 0.0},
    {"top_k": 5, "top_p": 0.999},
]


@pytest.mark.parametrize("vocab_size", [10, 512, 1000])
def test_kept_sets_equal_the_reference(vocab_size):
    logits = random_logits(len(MIXED), vocab_size)
    logits[4, 3] = logits[4].max()  # a tie for the best
    logits[7, [0, 7, 9]] = logits[8, 5] = -np.inf  # excluded before
    x = processed(logits, columns(MIXED))
    for row, settings in enumerate(MIXED):
        expected = reference.kept_ids(logits[row], **{"temperature": 1.0, **settings})
        assert np.flatnonzero(np.isfinite(x[row])).tolist() == expected, settings


def test_kept_sets_of_random_settings_equal_the_reference():
    rng = np.random.default_rng(11)
    for _ in range(150):
        logits = random_logits(1, 300, seed=int(rng.integers(1 << 30)))
        settings = {
            "temperature": float(np.float32(rng.choice([0.3, 1.0, 2.5]))),
            "top_k": int(rng.choice([0, 2, 7, 40])),
            "top_p": float(rng.choice([1.0, 0.99999, 0.95, 0.4, 1e-6])),
            "min_p": float(rng.choice([0.0, 0.003, 0.21])),
        }
        x = processed(logits, columns([settings]))[0]
        assert np.flatnonzero(np.isfinite(x)).tolist() == reference.kept_ids(logits[0], **settings), settings


def test_a_row_is_the_same_alone_and_among_others():
    logits = random_logits(len(MIXED) * 4, 5000, seed=1)
    settings = MIXED * 4
    together = columns(settings)
    tokens, x = sample(logits, together), processed(logits, together)
    scores = score(logits, tokens, np.full(len(logits), 3))
    for row in range(len(logits)):
        own = together.take(np.array([row]))
        alone = logits[row : row + 1]
        assert sample(alone, own)[0] == tokens[row]
        assert np.array_equal(processed(alone, own)[0], x[row])
        single = score(alone, tokens[row : row + 1], np.array([3]))
        assert single.chosen[0] == scores.chosen[row] and single.rank[0] == scores.rank[row]
        assert np.array_equal(single.top_scores[0], scores.top_scores[row])


def test_logits_are_left_alone():
    logits = random_logits(len(MIXED), 300)
    before = logits.copy()
    sample(logits, columns(MIXED))
    processed(logits, columns(MIXED))
    assert np.array_equal(logits, before)


def test_draws_equal_the_reference_to_the_bit():
    rng = np.random.default_rng(5)
    w = np.exp(rng.standard_normal((300, 1000)) * 4).astype(np.float32)
    w[rng.random(w.shape) < 0.5] = 0.0
    w[:100, :960] = 0.0  # only the last, partial block has mass
    u = rng.random(300).astype(np.float32)
    u[:2] = [0.0, np.float32(1 - 2**-24)]
    tokens = draw(w, u)
    assert tokens.tolist() == [reference.draw(row, value) for row, value in zip(w, u)]
    assert (w[np.arange(300), tokens] > 0).all()


def test_rounding_never_draws_an_id_without_mass():
    """A block whose running sum stays below the target gives its last id with mass."""
    w = np.zeros((4096, 128), np.float32)
    w[:, :64] = np.random.default_rng(0).random((4096, 64), np.float32)
    w[:, 60:64] = 0.0
    u = np.full(4096, 1 - 2**-24, np.float32)
    tokens = draw(w, u)
    assert tokens.max() < 60
    assert tokens.tolist() == [reference.draw(row, value) for row, value in zip(w, u)]


def test_the_draw_is_keyed_by_seed_child_and_output_index():
    logits = np.zeros((1, 64 * 64), np.float32)
    for seed, child, index in ((0, 0, 0), (0, 0, 1), (7, 0, 0), (0, 1, 0), (2**64 - 1, 3, 12345)):
        u = uniforms(np.array([seed], np.uint64), np.array([index]), child)[0]
        own = columns([{"seed": seed, "child": child, "output_index": index}])
        assert sample(logits, own)[0] == math.floor(u * 64 * 64)


def test_t48_greedy_edge():
    logits = np.tile(np.array([1.0, 1e4, -1e4, 1e4, 9999.0, 0.0], np.float32), (5, 1))
    temperatures = [0.0, 1e-6, 1e-3, 1.0, 2.0]
    rows = [{"temperature": value} for value in temperatures]
    assert sample(logits, columns(rows))[0] == 1  # ties go to the lowest id
    x = processed(logits, columns(rows))
    assert not np.isnan(x).any()
    gap = np.tile(np.array([3.0, 3.0 + 2e-4, -1e4, 1.0], np.float32), (200, 1))
    assert set(sample(gap, columns([{"temperature": 1e-6}] * 200))) == {1}
    assert set(repeated(logits[0], 200, temperature=1e-6)) == {1, 3}  # equals share, at any temperature above 0
    assert set(repeated(logits[0], 200, temperature=0.0)) == {1}


def test_t48_the_smallest_temperature_is_not_zero():
    logits = np.array([0.0, 5.0, 5.0, -3.0], np.float32)
    assert set(repeated(logits, 100, temperature=float(np.finfo(np.float32).tiny))) == {1, 2}


def test_t49_top_k():
    logits = random_logits(1, 512, seed=2)[0]
    logits += np.arange(512, dtype=np.float32) * 1e-3  # no ties
    for off in (0, -1, 512, 513, 10**7):
        drawn = repeated(logits, 20_000 if off == 0 else 500, top_k=off)
        if off == 0:
            full = drawn
        assert np.array_equal(drawn, full[: len(drawn)])
    expected = np.exp(reference.log_softmax(logits)) * len(full)
    counts = np.bincount(full, minlength=512)
    rare = expected < 5  # too few for the test: taken together
    counts = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    assert ((counts - expected) ** 2 / expected).sum() < chi_squared_limit(len(counts) - 1)
    assert set(repeated(logits, 50, top_k=1)) == {logits.argmax()}
    assert set(repeated(logits, 2000, top_k=4)) == set(np.argsort(logits)[-4:])


def test_t49_ties_at_the_border_are_kept_except_for_one():
    logits = np.array([1.0, 3.0, 2.0, 2.0, 3.0, 2.0], np.float32)
    ids = kept(logits - 3, np.exp(logits - 3), top_k=3, top_p=1.0, min_p=0.0)
    assert ids is not None and ids.tolist() == [1, 2, 3, 4, 5]
    assert set(repeated(logits, 100, top_k=1)) == {1}


@pytest.mark.parametrize(
    ("settings", "ids"),
    [
        ({"top_p": 0.73, "top_k": 3}, [0, 1]),  # top_k first, then renormalised: .427 + .305 = .732
        ({"top_p": 0.55}, [0, 1]),
        ({"top_p": 1.0}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.6}, [0, 1, 2]),  # at least .21
        ({"min_p": 0.6, "top_p": 0.7}, [0, 1]),  # of .82: .35 + .25 = .732 of it
    ],
)
def test_t50_top_p_and_the_order_of_filters(settings, ids):
    logits = np.log(np.array([0.35, 0.25, 0.22, 0.18], np.float32))
    assert np.flatnonzero(np.isfinite(processed(logits[None], columns([settings]))[0])).tolist() == ids
    assert set(repeated(logits, 300, **settings)) == set(ids)
    assert reference.kept_ids(logits, temperature=1.0, **settings) == ids


def test_draws_follow_the_kept_distribution():
    logits = np.log(np.array([0.35, 0.25, 0.22, 0.18], np.float32))
    for settings, top in (({}, 4), ({"temperature": 0.5}, 4), ({"top_k": 2}, 2)):
        drawn = np.bincount(repeated(logits, 20_000, **settings), minlength=4)[:top]
        p = np.exp(reference.processed(logits, **{"temperature": 1.0, **settings}))[:top] * 20_000
        assert ((drawn - p) ** 2 / p).sum() < chi_squared_limit(top - 1)


def test_excluded_ids_are_not_drawn_and_count_for_nothing():
    logits = np.array([5.0, 4.0, 1.0, 1.0], np.float32)
    logits[:2] = -np.inf
    assert set(repeated(logits, 200)) == {2, 3}
    x = processed(logits[None], columns([{"min_p": 0.5}]))
    assert np.flatnonzero(np.isfinite(x[0])).tolist() == [2, 3]


@pytest.mark.parametrize("settings", [{"top_k": 4}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.9, "min_p": 0.02}])
def test_t38_raw_and_processed_scores(settings):
    settings = {"temperature": 0.7, **settings}
    logits = random_logits(16, 800, seed=6)
    own = columns([settings] * 16)
    tokens = sample(logits, own)
    none = np.zeros(16, np.int64)
    raw, drawn_from = score(logits, tokens, none), score(processed(logits, own), tokens, none)
    for row, token in enumerate(tokens.tolist()):
        expected = reference.log_softmax(logits[row])[token]
        assert abs(raw.chosen[row] - expected) <= 8 * EPS * max(1.0, abs(expected))
        expected = reference.processed(logits[row], **settings)[token]
        assert np.isfinite(expected)
        assert abs(drawn_from.chosen[row] - expected) <= 8 * EPS * max(1.0, abs(expected))
    assert not np.array_equal(raw.chosen, drawn_from.chosen)


def test_a_greedy_row_is_drawn_from_a_single_point():
    logits = random_logits(2, 20)
    own = columns([{"temperature": 0.0}, {"top_k": 1}])
    tokens = sample(logits, own)
    scores = score(processed(logits, own), tokens, np.array([3, 3]))
    assert scores.chosen.tolist() == [0.0, 0.0] and scores.rank.tolist() == [1, 1]
    assert scores.top_ids[0][0] == tokens[0] and scores.top_scores[0].tolist() == [0.0, -math.inf, -math.inf]


def check_scores(scores: Scores, x: np.ndarray, ids: np.ndarray, num_top: list[int]) -> None:
    for row in range(len(x)):
        expected = reference.log_softmax(x[row])
        np.testing.assert_allclose(scores.chosen[row], expected[ids[row]], rtol=8 * EPS)
        assert scores.rank[row] == reference.rank(x[row], ids[row])
        k = x.shape[1] if num_top[row] < 0 else min(num_top[row], x.shape[1])
        assert scores.top_ids[row].tolist() == reference.order(x[row])[:k]
        np.testing.assert_allclose(scores.top_scores[row], expected[scores.top_ids[row]], rtol=8 * EPS)
        at = np.flatnonzero(scores.top_ids[row] == ids[row])
        assert all(scores.top_scores[row][at] == scores.chosen[row])  # one number however it is asked for


def test_scores_ranks_and_the_best_equal_the_reference():
    x = random_logits(7, 300, seed=8)
    x[2, :250] = -np.inf
    num_top = [0, 1, 5, 300, 1000, -1, 20]
    ids = np.array([int(largest(row, 9)[index % 9]) for index, row in enumerate(x)])
    check_scores(score(x, ids, np.array(num_top)), x, ids, num_top)


def test_rows_without_a_usable_logit_are_named():
    logits = random_logits(5, 100)
    logits[1, 50] = np.nan
    logits[2] = -np.inf
    logits[3, 0] = np.inf
    logits[4, 1:] = -np.inf
    assert unusable_rows(logits).tolist() == [False, True, True, True, False]


def test_weights_do_not_depend_on_the_place_in_the_row():
    """`select` sorts values and exponentiates them again: that must give the bits they had in place."""
    x = random_logits(1, 5003)[0] - np.float32(7)
    order = np.random.default_rng(0).permutation(len(x))
    w = np.exp(x)
    assert np.array_equal(np.exp(x[order]), w[order])
    assert all(
        np.array_equal(np.exp(x[low : low + size]), w[low : low + size]) for low in range(9) for size in (1, 5, 40)
    )
