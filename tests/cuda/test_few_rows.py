"""Products of few rows with what stands about them, against torch's functions one after the other."""

from __future__ import annotations

import pytest
import torch

from perdure.ops import activation, norm
from perdure.ops.kernels import triton_kernels
from perdure.ops.linear import reference
from perdure.ops.residual import Stream
from perdure.ops.triton.few_rows import FewRowsProduct, Tile, few_rows_product
from tests.cuda.conftest import ON_GPU
from tests.cuda.helpers import Random, check_close

SIZES = [(100, 64), (70, 600), (12, 1536)]
LARGE = [(6144, 4096), (4096, 14336), (1024, 3072), (1024, 2048), (576, 1536)]


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("size", SIZES + (LARGE if ON_GPU else []), ids=str)
@pytest.mark.parametrize("rows", [1, 4])
def test_few_rows_times_a_weight(device, dtype, rows, size, bias):
    """Alone, after a norm, gated, and added to a row."""
    random = Random(device)
    columns, depth = size
    x, w, before = random(rows, depth, dtype=dtype), random(*size, dtype=dtype), random(rows, columns, dtype=dtype)
    b, of_norm = random(columns, dtype=dtype) if bias else None, random(depth, dtype=dtype)
    w = w * depth**-0.5
    normed = norm.rms_norm(x, of_norm, 1e-5)
    check_close(few_rows_product(x, w, b), reference(w, b)(x), dtype)
    check_close(few_rows_product(x, w, b, added=before), reference(w, b)(x) + before, dtype)
    check_close(few_rows_product(x, w, b, norm=of_norm, eps=1e-5), reference(w, b)(normed), dtype)
    gated = few_rows_product(x, w, b, norm=of_norm, eps=1e-5, gated=True)
    check_close(gated, activation.silu_mul(reference(w, b)(normed)), dtype)


@pytest.mark.parametrize("tile", [Tile(1, 3, 1), Tile(8, 1, 2), Tile(2, 4, 8)], ids=str)
def test_any_tile_serves(device, dtype, tile):
    random = Random(device)
    x, w = random(2, 600, dtype=dtype), random(2 * 37, 600, dtype=dtype) / 25
    right = activation.silu_mul(reference(w)(x))
    check_close(few_rows_product(x, w, gated=True, tile=tile), right, dtype)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_stream_is_read_and_written_as_by_plain_steps(device, dtype, rows):
    """Whether its sum is made or open, and where a product has no form for few rows."""
    random = Random(device)
    kernels = triton_kernels(batch_invariant=False)
    x, y, inner = random(rows, 48, dtype=dtype), random(rows, 48, dtype=dtype), random(rows, 80, dtype=dtype)
    w, down, of_norm = random(16, 48, dtype=dtype) / 7, random(48, 80, dtype=dtype) / 9, random(48, dtype=dtype)
    product, other = kernels.linear(w, None), kernels.linear(down, None)
    assert isinstance(product, FewRowsProduct)
    for stream, total in ((Stream(x), x), (Stream(x, y), x + y)):
        normed = norm.rms_norm(total, of_norm, 1e-5)
        for of_any in (product, lambda z: product(z)):
            after, found = kernels.reading(of_any, of_norm, 1e-5)(stream)
            assert torch.equal(after.total(), total) and after.more is None
            check_close(found, reference(w)(normed), dtype)
            _, found = kernels.reading(of_any, of_norm, 1e-5, gated=True)(stream)
            check_close(found, activation.silu_mul(reference(w)(normed)), dtype)
        for of_any in (other, lambda z: other(z)):
            written = kernels.writing(of_any)(stream, inner)
            check_close(written.total(), total + reference(down)(inner), dtype)
            assert (written.more is None) == (rows == 2 and of_any is other and stream.more is None)
