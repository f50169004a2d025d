"""Philox4x32-10, the counter-based generator behind every random draw.

- A draw is a function of (seed, child, output index) alone; there is no generator state to carry, save or share.
- `philox4x32` is the plain form and the oracle; `uniforms` is the vectorised one that sampling uses.

Source: Salmon, Moraes, Dror, Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011; constants and known answers
from the authors' Random123 library.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
_LOW = 0xFFFFFFFF

Counter = tuple[int, int, int, int]


def philox4x32(counter: Counter, key: tuple[int, int]) -> Counter:
    """Four random 32-bit words for one counter and key, in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        first, second = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (second >> 32) ^ c1 ^ k0, second & _LOW, (first >> 32) ^ c3 ^ k1, first & _LOW
        k0, k1 = (k0 + WEYL[0]) & _LOW, (k1 + WEYL[1]) & _LOW
    return c0, c1, c2, c3


def uniforms(
    seeds: NDArray[np.uint64], output_indices: NDArray[np.int64], child: NDArray[np.int64] | int = 0
) -> NDArray[np.float32]:
    """u in [0, 1) for each (seed, child, output index): the top 24 bits of the first word, exact in fp32.

    The key is the seed (low word first), the counter (output index, child, 0, 0). The arrays are [n].
    """
    low, shift = np.uint64(_LOW), np.uint64(32)
    k0, k1 = seeds & low, seeds >> shift
    c0 = output_indices.astype(np.uint64) & low
    c1 = np.broadcast_to(np.asarray(child), c0.shape).astype(np.uint64) & low
    c2, c3 = np.zeros_like(c0), np.zeros_like(c0)
    for _ in range(ROUNDS):
        first, second = c0 * np.uint64(MULTIPLIERS[0]), c2 * np.uint64(MULTIPLIERS[1])
        c0, c1, c2, c3 = (second >> shift) ^ c1 ^ k0, second & low, (first >> shift) ^ c3 ^ k1, first & low
        k0, k1 = (k0 + np.uint64(WEYL[0])) & low, (k1 + np.uint64(WEYL[1])) & low
    return (c0 >> np.uint64(8)).astype(np.float32) * np.float32(2.0**-24)
