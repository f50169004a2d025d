"""The random generator against its authors' known answers, and its vectorised form against the plain one."""

import numpy as np
import pytest

from perdure.ops.philox import philox4x32, uniforms

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES, ONES, ONES, ONES), (ONES, ONES), (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers_of_random123(counter, key, words):
    assert philox4x32(counter, key) == words


def test_uniforms_equal_the_plain_form():
    rng = np.random.default_rng(0)
    seeds = rng.integers(0, 2**64, 300, dtype=np.uint64)
    seeds[:3] = [0, 2**64 - 1, 2**32]
    indices = rng.integers(0, 2**32, 300, dtype=np.int64)
    indices[:3] = [0, 2**32 - 1, 1]
    for child in (0, 7):
        plain = [
            philox4x32((index, child, 0, 0), (seed & ONES, seed >> 32))[0] >> 8
            for seed, index in zip(seeds.tolist(), indices.tolist())
        ]
        assert (uniforms(seeds, indices, child).astype(np.float64) * 2**24).tolist() == plain
        assert uniforms(seeds, indices, np.full(300, child)).tolist() == uniforms(seeds, indices, child).tolist()
    mixed = uniforms(seeds, indices, np.arange(300) % 3)
    assert all(mixed[i] == uniforms(seeds[i : i + 1], indices[i : i + 1], i % 3)[0] for i in range(300))


def test_uniforms_lie_in_the_half_open_unit_interval_and_look_uniform():
    u = uniforms(np.full(20_000, 5, np.uint64), np.arange(20_000))
    assert u.dtype == np.float32 and u.min() >= 0.0 and u.max() < 1.0
    counts = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-squared, 19 degrees of freedom, p = 1e-3


def test_each_part_of_the_key_matters():
    seeds, indices = np.array([1, 1 + 2**32, 2], np.uint64), np.zeros(3, np.int64)
    drawn = [*uniforms(seeds, indices), uniforms(seeds, indices + 1)[0], uniforms(seeds, indices, child=1)[0]]
    assert len(set(drawn)) == len(drawn)
