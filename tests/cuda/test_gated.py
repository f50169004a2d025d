"""Gated products of many rows in one kernel, on Hopper: no interpreter runs it."""

from __future__ import annotations

import pytest
import torch

from perdure.ops import activation, gluon
from perdure.ops.kernels import triton_kernels
from perdure.ops.linear import reference
from perdure.ops.residual import Stream
from tests.cuda.helpers import Random, check_close

HALVES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


@pytest.fixture
def hopper(gpu):
    if reason := gluon.why_not(gpu):
        pytest.skip(reason)
    return gpu


@HALVES
@pytest.mark.parametrize("size", [(1, 128, 64), (640, 200, 136), (300, 7, 8), (4097, 1408, 1024)], ids=str)
def test_a_product_with_its_gate(hopper, dtype, size):
    """One tile and many a program; with rows, columns and a depth that fill none."""
    from perdure.ops.triton.gated import gated_product

    random, (rows, width, depth) = Random(hopper), size
    x, w = random(rows, depth, dtype=dtype), random(2 * width, depth, dtype=dtype) * depth**-0.5
    right = activation.silu_mul(reference(w)(x))
    found = gated_product(x, w)
    check_close(found, right, dtype)
    for _ in range(3):
        assert torch.equal(gated_product(x, w), found)


@HALVES
def test_a_stream_is_read_in_one_where_there_is_work_for_all_processors(hopper, dtype, monkeypatch):
    """And by plain steps where rows are few, or lie where the copy engine cannot fetch."""
    from perdure.ops.triton import gated

    calls = []
    multiply = gated.gated_product
    monkeypatch.setattr(gated, "gated_product", lambda x, w: calls.append(len(x)) or multiply(x, w))
    random, kernels = Random(hopper), triton_kernels(batch_invariant=False)
    x, w, norm = random(4000, 256, dtype=dtype), random(16384, 256, dtype=dtype) / 16, random(256, dtype=dtype)
    bias = random(16384, dtype=dtype)
    for of_any, rows, taken in ((None, 4000, True), (None, 500, False), (bias, 4000, False)):
        read = kernels.reading(kernels.linear(w, of_any), norm, 1e-5, gated=True)
        _, found = read(Stream(x[:rows]))
        right = activation.silu_mul(reference(w, of_any)(kernels.rms_norm(x[:rows], norm, 1e-5)))
        check_close(found, right, dtype)
        assert calls == ([rows] if taken else [])
        calls.clear()
    assert gated.serves(x, w) and not gated.serves(x.float(), w.float())
    odd = torch.empty(x.numel() + 1, dtype=dtype, device=hopper)[1:].view_as(x)
    assert not gated.serves(odd, w)
