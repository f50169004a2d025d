"""Numbers of 8 bits: roundings beside a table of them all, products beside the slow form, pages beside their values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from perdure.ops import float8
from perdure.ops.attention import FORMS, AttentionRows, CacheShape, LayerAttention, make_attention
from perdure.ops.float8 import E4M3, MOST, Float8Weight, quantised_rows, to_e4m3
from perdure.ops.kernels import choose_kernels
from perdure.ops.kv_write import plan_kv_write
from perdure.ops.native import library

CPU = torch.device("cpu")
PRODUCTS = ["packed", "invariant", "reference", *(["native"] if library() is not None else [])]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def made(form: str, w: Tensor, **options: float) -> tuple[Float8Weight, float8.Product]:
    """A weight as products of this form hold it, and the product."""
    weight = Float8Weight(tuple(w.shape), CPU, library() if form == "native" else None, **options)
    weight.fill(0, w[:5])
    weight.fill(5, w[5:])
    return weight, choose_kernels(form, CPU, torch.float32).linear(weight, None)


def test_rounding_is_to_the_nearest_number_there_is() -> None:
    """Ties go to the even code, what is too large becomes the largest, NaN stays."""
    codes = torch.arange(0x7F, dtype=torch.uint8)  # the positive ones, ascending
    numbers = codes.view(E4M3).double()
    x = torch.cat([10.0 ** (drawn(5000) * 2), (numbers[:-1] + numbers[1:]).float() / 2, numbers.float()])
    x = x[x <= MOST]
    distance = (x.double()[:, None] - numbers).abs() + (codes % 2) * 1e-12  # a tie is lost by the odd one
    assert torch.equal(to_e4m3(x).view(torch.uint8), codes[distance.argmin(1)])
    assert torch.equal(to_e4m3(-x).float(), -to_e4m3(x).float())
    edges = torch.tensor([1e9, torch.inf, -449.0, torch.nan])
    assert to_e4m3(edges).float().nan_to_num(7.0).tolist() == [448.0, 448.0, -448.0, 7.0]


def test_the_largest_of_a_row_becomes_the_largest_number() -> None:
    """By each row alone; zeros stay, and NaN is told by the factor."""
    x = drawn(6, 40) * torch.logspace(-20, 20, 6)[:, None]
    x[1] = 0.0
    codes, factors = quantised_rows(x)
    assert torch.equal(codes.float().abs().amax(1) == MOST, x.abs().amax(1) > 0) and factors[1] == 1.0
    assert ((codes.float() * factors[:, None] - x).abs() <= x.abs() / 16 + factors[:, None] * 2.0**-10).all()
    for row in range(6):
        alone, factor = quantised_rows(x[row : row + 1])
        assert torch.equal(alone.view(torch.uint8)[0], codes.view(torch.uint8)[row]) and factor[0] == factors[row]
    x[2, 3] = torch.nan
    assert quantised_rows(x)[1].isnan().tolist() == [False, False, True, False, False, False]
    bound, factors = quantised_rows(torch.tensor([[8.0, 2.0, -1.0]]), most=2.0)
    assert bound.float().tolist() == [[MOST, MOST, -MOST / 2]] and factors.item() == np.float32(2.0) / np.float32(MOST)


@pytest.mark.parametrize("form", PRODUCTS)
@pytest.mark.parametrize(("num_out", "num_in"), [(48, 64), (21, 300)])
def test_products_beside_the_slow_form_and_a_row_in_any_company(form: str, num_out: int, num_in: int) -> None:
    w, x = drawn(num_out, num_in) / 8, drawn(41, num_in, seed=1)
    weight, product = made(form, w)
    _, oracle = made("reference", w)
    y = product(x)
    torch.testing.assert_close(y, oracle(x), rtol=1e-5, atol=1e-5)
    assert (y - x @ w.T).norm() <= 0.05 * y.norm()
    assert weight.num_bytes >= num_out * num_in and weight.num_bytes <= (num_out + 15) * num_in + 4 * num_out
    for low, high in [(0, 1), (3, 10), (40, 41), (7, 40)]:
        assert torch.equal(product(x[low:high]), y[low:high])
    assert product(x[:0]).shape == (0, num_out)
    with_bias = choose_kernels(form, CPU, torch.float32).linear(weight, torch.arange(num_out, dtype=torch.float32))
    torch.testing.assert_close(with_bias(x), y + torch.arange(num_out), rtol=1e-5, atol=1e-4)
    x[0, 5] = torch.nan
    assert product(x)[0].isnan().all() and torch.equal(product(x)[1:], y[1:])


@pytest.mark.parametrize("form", PRODUCTS)
def test_a_weight_with_nan_gives_nan_in_its_column_alone(form: str) -> None:
    w, x = drawn(20, 32), drawn(3, 32, seed=1)
    w[7, 3] = torch.nan
    y = made(form, w)[1](x)
    assert y[:, 7].isnan().all() and not y[:, :7].isnan().any() and not y[:, 8:].isnan().any()


@pytest.mark.parametrize("form", ["invariant", *PRODUCTS[3:]])
def test_codes_as_stored_elsewhere_and_memory_away_and_back(form: str) -> None:
    w, x = drawn(21, 64), drawn(4, 64, seed=1)
    weight, product = made(form, w, most=1.5)
    y = product(x)
    codes, factors = quantised_rows(w)
    other, same = made(form, torch.zeros_like(w), most=1.5)
    other.fill_codes(0, codes, factors)
    assert torch.equal(same(x), y) and not torch.equal(made(form, w)[1](x), y)
    kept = [memory.clone() for memory in weight.memories()]
    weight.release()
    weight.reserve()
    for memory, copy in zip(weight.memories(), kept, strict=True):
        memory.copy_(copy)
    assert torch.equal(product(x), y)


@pytest.mark.parametrize("form", [form for form in FORMS if form != "native" or library() is not None])
@pytest.mark.parametrize(("window", "page_size"), [(None, 16), (40, 5)])
def test_attention_over_pages_is_that_over_their_values(form: str, window: int | None, page_size: int) -> None:
    """To the bit: one query far on, prompts, and one at position 0, over shuffled pages; what nobody sees is NaN."""
    lengths, starts, heads, dim = np.array([1, 70, 5, 1]), np.array([130, 60, 3, 0]), 2, 24
    offsets, width = np.concatenate([[0], np.cumsum(lengths)]), -(-131 // page_size)
    shape = CacheShape(6, heads, dim, 4 * width + 2, page_size)
    table = torch.randperm(4 * width + 2, generator=torch.Generator().manual_seed(1))[: 4 * width].view(4, width)
    pages = to_e4m3(drawn(2, heads, shape.num_pages, page_size, dim))
    if form in ("native", "reference"):  # the others are promised cleared pages
        unwritten = [page for page in range(shape.num_pages) if page not in table]
        pages.view(torch.uint8)[:, :, unwritten] = 0x7F
    q = drawn(int(offsets[-1]), 6, dim, seed=3)
    made = make_attention(form, shape, LayerAttention(dim**-0.5, window), batch_invariant=form != "plain")
    planned = made.plan(AttentionRows(offsets, starts, table.numpy()))
    narrow = planned.run(q, pages).clone()
    assert torch.equal(narrow, planned.run(q, pages.float())) and not narrow.isnan().any()


def test_keys_and_values_are_rounded_into_pages_and_nothing_else_changes() -> None:
    shape = CacheShape(4, 2, 16, 5, 4)
    keys, values = drawn(3, 2, 16) * 100, drawn(3, 2, 16, seed=1)
    keys[0, 0, 0], keys[1, 1, 2] = 1e6, torch.nan
    cache = to_e4m3(drawn(2, 2, 5, 4, 16, seed=2))
    right = cache.clone().view(torch.uint8)
    slots = np.array([3, 17, 8])
    plan_kv_write(shape, slots, E4M3).run(keys, values, cache)
    for row, slot in enumerate(slots.tolist()):
        for plane, rows in enumerate((keys, values)):
            right[plane, :, slot // 4, slot % 4] = to_e4m3(rows[row]).view(torch.uint8)
    assert torch.equal(cache.view(torch.uint8), right)
