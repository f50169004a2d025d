"""Choosing ids of one row by value: the k largest, and the filters of a distribution.

- Every choice is a function of one row, so a row's result cannot depend on its neighbours.
- Order is always (value descending, id ascending). An id that is excluded already has the value -inf.

Shapes: V = vocabulary. x [V] are fp32 values (for filters: scaled logits, the largest 0), w [V] = exp(x).
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]

TINY = float(np.finfo(np.float32).tiny)
SLICE_VALUES = 1 << 18  # values handled at once: 1 MiB


def row_slices(num_rows: int, vocab_size: int) -> Iterator[slice]:
    """Rows in slices that stay in the cache."""
    step = max(1, SLICE_VALUES // vocab_size)
    return (slice(low, min(low + step, num_rows)) for low in range(0, num_rows, step))


def kth_largest(x: Floats, k: int) -> np.float32:
    """The k-th largest value of x, 1 <= k <= V."""
    at = len(x) - k
    kth: np.float32 = np.partition(x, at)[at]
    return kth


def largest(x: Floats, k: int) -> Ids:
    """Ids of the k largest values, best first, ties to the lower id; 0 <= k <= V."""
    if k == 0:
        return np.empty(0, np.int64)
    border = kth_largest(x, k)
    above, tied = np.flatnonzero(x > border), np.flatnonzero(x == border)
    ids = np.concatenate([above, tied[: k - len(above)]])
    return ids[np.argsort(-x[ids], kind="stable")]  # ids ascend within a value, and stable keeps that


def kept(x: Floats, w: Floats, *, top_k: int, top_p: float, min_p: float) -> Ids | None:
    """Ids that may be drawn, ascending; None = all. x is -inf (and w 0) where an id is excluded already.

    min_p keeps w >= min_p (the largest w is 1). top_k keeps all that tie with the k-th; 0, -1 and >= V are off.
    top_p keeps, of what these two left and in order, the fewest whose mass reaches top_p of its total.
    """
    ids: Ids | None = None
    if min_p > 0.0:
        ids = np.flatnonzero(w >= np.float32(min_p))
        x, w = x[ids], w[ids]
    if 0 < top_k < len(x):  # what min_p left are the largest, so the k-th of them is the k-th of all
        ids = _narrow(ids, best := np.flatnonzero(x >= kth_largest(x, top_k)))
        x, w = x[best], w[best]
    if top_p < 1.0:
        ids = _narrow(ids, _nucleus(x, w, top_p))
    return ids


def _narrow(ids: Ids | None, chosen: Ids) -> Ids:
    """chosen indexes ids, or is ids."""
    return chosen if ids is None else ids[chosen]


def _nucleus(x: Floats, w: Floats, top_p: float) -> Ids:
    """top_p of `kept`, as ascending indices. Sums in float64."""
    total = float(w.sum(dtype=np.float64))
    # Together, what is below this floor has less than the mass that may be missing: only the rest needs to be sorted.
    floor = np.float32(max(0.5 * (1.0 - top_p) * total / len(w), TINY))
    candidates = np.flatnonzero(w >= floor)
    values = x[candidates]
    ordered = np.sort(values)[::-1].copy()  # contiguous, so that exp takes the same path as in place
    mass = np.cumsum(np.exp(ordered), dtype=np.float64)
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(ordered))
    border = ordered[count - 1]
    keep = values > border
    keep[np.flatnonzero(values == border)[: count - int(np.count_nonzero(keep))]] = True
    return candidates[keep]
