"""Choosing ids of one row by value: the k largest, and the filters of a distribution.

- Every choice is a function of one row, so a row's result cannot depend on its neighbours.
- Order is always (value descending, id ascending).

Shapes: V = vocabulary. x [V] are fp32 values (for filters: scaled logits, the largest 0), w [V] = exp(x).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


def kth_largest(x: Floats, k: int) -> np.float32:
    """The k-th largest value of x, 1 <= k <= V."""
    at = len(x) - k
    kth: np.float32 = np.partition(x, at)[at]
    return kth


def largest(x: Floats, k: int) -> NDArray[np.int64]:
    """Ids of the k largest values, best first, ties to the lower id; 0 <= k <= V."""
    if k == 0:
        return np.empty(0, np.int64)
    border = kth_largest(x, k)
    above, tied = np.flatnonzero(x > border), np.flatnonzero(x == border)
    ids = np.concatenate([above, tied[: k - len(above)]])
    return ids[np.argsort(-x[ids], kind="stable")]  # ids ascend within a value, and stable keeps that


def kept(x: Floats, w: Floats, *, top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_] | None:
    """Which ids may be drawn, as bool [V]; None = all. x has -inf where an id is excluded already (w = 0 there).

    min_p keeps w >= min_p (the largest w is 1). top_k keeps all that tie with the k-th; 0, -1 and >= V are off.
    top_p keeps, of what these two left and in order, the fewest whose mass reaches top_p of its total.
    """
    keep: NDArray[np.bool_] | None = None
    if min_p > 0.0:
        keep = w >= np.float32(min_p)
    if 0 < top_k < len(x):
        best = x >= kth_largest(x, top_k)
        keep = best if keep is None else keep & best
    if top_p < 1.0:
        return _nucleus(x, w if keep is None else np.where(keep, w, np.float32(0.0)), top_p)
    return keep


def _nucleus(x: Floats, w: Floats, top_p: float) -> NDArray[np.bool_]:
    """top_p of `kept`; w is 0 where an id was dropped before. Sums in float64."""
    total = float(w.sum(dtype=np.float64))
    # Together, ids below this floor have less than the mass that may be missing: only the others need to be sorted.
    floor = np.float32(0.5 * (1.0 - top_p) * total / len(w))
    candidates = (w >= floor) & (w > 0.0)
    ordered = np.sort(x[candidates])[::-1].copy()  # contiguous, so that exp takes the same path as in place
    mass = np.cumsum(np.exp(ordered), dtype=np.float64)
    count = min(int(np.searchsorted(mass, top_p * total)) + 1, len(ordered))
    border = ordered[count - 1]
    keep = candidates & (x > border)
    tied = np.flatnonzero(candidates & (x == border))
    keep[tied[: count - int(np.count_nonzero(ordered > border))]] = True
    return keep
