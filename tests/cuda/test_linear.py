"""Products in Triton against the reference, and their bits among any number of rows."""

from __future__ import annotations

import pytest
import torch

from perdure.ops.linear import reference
from perdure.ops.triton.linear import choose_tile, invariant
from tests.cuda.conftest import ON_GPU
from tests.cuda.helpers import Random, check_close
from tests.witness import witness

SIZES = [(96, 64), (100, 72), (70, 33), (64, 1100)]
LARGE = [(6144, 4096), (4096, 14336), (1024, 3072), (576, 1536)]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", SIZES + (LARGE if ON_GPU else []), ids=str)
def test_products(device, dtype, size, bias):
    random = Random(device)
    w, b = random(*size, dtype=dtype), random(size[0], dtype=dtype) if bias else None
    for rows in (3, 70) if ON_GPU else (3,):
        x = random(rows, size[1], dtype=dtype)
        check_close(invariant(w, b)(x), reference(w, b)(x), dtype)
    assert invariant(w, b)(x[:0]).shape == (0, size[0])


@pytest.mark.parametrize("size", SIZES + LARGE, ids=str)
def test_a_row_has_the_same_bits_among_any_number(gpu, dtype, size):
    """First, last and amid others, in tiles of all sizes."""
    random = Random(gpu)
    w, b, x = random(*size, dtype=dtype), random(size[0], dtype=dtype), random(3000, size[1], dtype=dtype)
    product = invariant(w, b)
    whole = product(x)
    counts = (1, 2, 17, 63, 64, 65, 128, 129, 256, 600, 1500)
    for count in counts:
        for first in (0, 777, 3000 - count):
            part = slice(first, first + count)
            assert torch.equal(product(x[part].contiguous()), whole[part]), f"rows {part} of {count}"
    witness("invariant-products", tiles=len({choose_tile(count, size[0]) for count in counts}))
