"""Drawing tokens and scoring them, vectorised over rows with mixed settings.

- Order: what `adjust` does; temperature, min_p, top_k, renormalise, top_p over what is left; then one keyed draw.
- Temperature 0 and top_k 1 are the argmax, ties to the lowest id.
- A row's token and scores are functions of that row's logits and settings: no bit depends on the other rows.
- The draw is spelled out to the rounding (`draw`), so that any device can reproduce it from the same weights.
- Logits are never changed; a few rows at a time are copied, as many as stay in the cache.

Shapes: n rows, V = vocabulary, nb = blocks of 64 ids. Logits are fp32 [n, V] with a finite largest value in each row,
-inf where an id is excluded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from perdure.ops.philox import uniforms
from perdure.ops.select import TINY, Floats, Ids, kept, largest, row_slices

BLOCK = 64  # ids in one block of the draw's sum; part of the definition of a draw


NO_LIST: Ids = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Settings of n rows."""

    temperature: NDArray[np.float32]
    top_k: Ids
    top_p: NDArray[np.float64]
    min_p: NDArray[np.float64]
    seed: NDArray[np.uint64]
    child: Ids
    output_index: Ids

    def take(self, rows: Ids) -> SamplingColumns:
        """The settings of some rows, ascending."""
        return SamplingColumns(
            self.temperature[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.seed[rows],
            self.child[rows],
            self.output_index[rows],
        )


@dataclass(frozen=True, slots=True)
class Scores:
    """Scores of one id a row. top_ids and top_scores: the best of each row, best first, ties to the lower id.
    listed_ranks and listed_scores: of each row's listed ids, in their order."""

    chosen: Floats
    rank: Ids
    top_ids: list[Ids]
    top_scores: list[Floats]
    listed_ranks: list[Ids]
    listed_scores: list[Floats]


def unusable_rows(logits: Floats) -> NDArray[np.bool_]:
    """Rows [n] with a NaN or no finite largest value: nothing can be drawn from them."""
    unusable: NDArray[np.bool_] = ~np.isfinite(logits.max(axis=1, initial=-np.inf))
    return unusable


def sample(logits: Floats, columns: SamplingColumns) -> Ids:
    """One token a row [n]."""
    tokens = np.empty(len(logits), np.int64)
    greedy = (columns.temperature == 0.0) | (columns.top_k == 1)
    for row in np.flatnonzero(greedy).tolist():
        tokens[row] = logits[row].argmax()  # numpy's argmax is the first of equals
    drawn = np.flatnonzero(~greedy)
    if len(drawn) == 0:
        return tokens
    u = uniforms(columns.seed[drawn], columns.output_index[drawn], columns.child[drawn])
    for part in row_slices(len(drawn), logits.shape[1]):
        rows = drawn[part]
        x = _scaled(logits, columns, rows)
        w = np.exp(x)
        for index, row in enumerate(rows.tolist()):
            ids = _kept(x[index], w[index], columns, row)
            if ids is not None:
                w[index] = _only(w[index], ids, 0.0)
        tokens[rows] = draw(w, u[part])
    return tokens


def processed(logits: Floats, columns: SamplingColumns) -> Floats:
    """What `sample` draws from, as logits [n, V]: scaled, -inf where dropped. A greedy row is all on its one id."""
    x = _scaled(logits, columns, np.arange(len(logits)))
    for row in range(len(logits)):
        if columns.temperature[row] == 0.0 or columns.top_k[row] == 1:
            best = logits[row].argmax()
            x[row] = -np.inf
            x[row, best] = 0.0
        else:
            ids = _kept(x[row], np.exp(x[row]), columns, row)
            if ids is not None:
                x[row] = _only(x[row], ids, -np.inf)
    return x


def draw(w: Floats, u: Floats) -> Ids:
    """The first id of each row whose cumulative mass exceeds u * total; w [n, V] >= 0 with a positive sum, u [n].

    All sums are fp32. Blocks of 64 ids (the last filled with zeros) are summed by halves: x[:32] + x[32:], and so on.
    The total and the block are found from the running sum of blocks; inside the block weights are added one by one to
    the running sum before it. If rounding leaves that below the target, the block's last id with mass is taken.
    """
    sums = _block_sums(w)
    rows = np.arange(len(w))
    running = np.add.accumulate(sums, axis=1)  # [n, nb], sequential
    target = u * running[:, -1]
    # u is at most 1 - 2**-24, so the target rounds to less than the total and some block reaches it.
    block = (running > target[:, None]).argmax(axis=1)
    ids = block[:, None] * BLOCK + np.arange(BLOCK)
    inside = np.where(ids < w.shape[1], w[rows[:, None], np.minimum(ids, w.shape[1] - 1)], np.float32(0.0))
    before = np.where(block > 0, running[rows, block - 1], np.float32(0.0))
    reached = np.add.accumulate(np.concatenate([before[:, None], inside], axis=1), axis=1)[:, 1:] > target[:, None]
    last = BLOCK - 1 - (inside[:, ::-1] > 0.0).argmax(axis=1)
    return block * BLOCK + np.where(reached.any(axis=1), reached.argmax(axis=1), last)


def score(x: Floats, ids: Ids, num_top: Ids, listed: Sequence[Ids] | None = None) -> Scores:
    """log-softmax of each row of x [n, V] (which may hold -inf) at ids [n], its rank, the num_top[row] best, and the
    listed[row] ids with their ranks.

    rank = 1 + how many come before it in (value descending, id ascending). num_top < 0 or > V = all.
    """
    num_rows, vocab_size = x.shape
    chosen = np.empty(num_rows, np.float32)
    rank = np.empty(num_rows, np.int64)
    top_ids, top_scores = [], []
    listed_ranks, listed_scores = [], []
    for part in row_slices(num_rows, vocab_size):
        rows = x[part]
        at = np.arange(len(rows)), ids[part]
        normaliser = _log_sum_exp(rows)
        chosen[part] = rows[at] - normaliser
        greater = np.count_nonzero(rows > rows[at][:, None], axis=1)
        for index, (row, k) in enumerate(zip(rows, num_top[part].tolist(), strict=True)):
            id_ = at[1][index]
            rank[part.start + index] = 1 + greater[index] + np.count_nonzero(row[:id_] == row[id_])
            others = NO_LIST if listed is None else listed[part.start + index]
            listed_ranks.append(np.array([_rank(row, other) for other in others.tolist()], np.int64))
            listed_scores.append((row[others] - normaliser[index]).astype(np.float32))
            best = largest(row, vocab_size if k < 0 else min(k, vocab_size))
            top_ids.append(best)
            top_scores.append((row[best] - normaliser[index]).astype(np.float32))
    return Scores(chosen, rank, top_ids, top_scores, listed_ranks, listed_scores)


def _rank(row: Floats, id_: int) -> int:
    return int(1 + np.count_nonzero(row > row[id_]) + np.count_nonzero(row[:id_] == row[id_]))


def _log_sum_exp(x: Floats) -> NDArray[np.float64]:
    """[n], by the blocks of `draw` and then in float64, in order."""
    top = x.max(axis=1)
    sums = _block_sums(np.exp(x - top[:, None]))
    return top + np.log(np.add.accumulate(sums.astype(np.float64), axis=1)[:, -1])


def _block_sums(w: Floats) -> Floats:
    """Sums [n, nb] of 64 ids each, by halves."""
    missing = -w.shape[1] % BLOCK
    if missing:
        w = np.pad(w, ((0, 0), (0, missing)))
    halves = torch.from_numpy(w).view(len(w), -1, BLOCK)  # torch adds short halves faster than numpy, to the same bits
    while halves.shape[2] > 1:
        middle = halves.shape[2] // 2
        halves = halves[:, :, :middle] + halves[:, :, middle:]
    sums: Floats = halves[:, :, 0].numpy()
    return sums


def _scaled(logits: Floats, columns: SamplingColumns, rows: Ids) -> Floats:
    """(logits - largest) / temperature of some rows; the largest is subtracted first, so that no temperature overflows.
    A greedy row comes out at temperature 1 or less, and is not used."""
    x = logits[rows]
    x -= x.max(axis=1, keepdims=True)
    with np.errstate(over="ignore"):  # -inf is what a tiny temperature means
        x /= np.maximum(columns.temperature[rows], np.float32(TINY))[:, None]
    return x


def _only(values: Floats, ids: Ids, other: float) -> Floats:
    """values [V] at ids, another value elsewhere."""
    result = np.full_like(values, other)
    result[ids] = values[ids]
    return result


def _kept(x: Floats, w: Floats, columns: SamplingColumns, row: int) -> Ids | None:
    return kept(
        x,
        w,
        top_k=int(columns.top_k[row]),
        top_p=float(columns.top_p[row]),
        min_p=float(columns.min_p[row]),
    )
