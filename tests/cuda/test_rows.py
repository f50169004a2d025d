"""Norms, activations and rotary positions in Triton against torch's forms."""

from __future__ import annotations

import pytest
import torch

from perdure.ops import activation, norm, rope
from perdure.ops.triton import pages, rows
from tests.cuda.helpers import Random, check_close
from tests.witness import witness


@pytest.mark.parametrize("width", [96, 576])
def test_norms(device, dtype, width):
    random = Random(device)
    x, y, w = random(5, width, dtype=dtype), random(5, width, dtype=dtype), random(width, dtype=dtype)
    check_close(rows.rms_norm(x, w, 1e-5), norm.rms_norm(x, w, 1e-5), dtype)
    check_close(rows.rms_norm_once(x, w.float(), 1e-5), norm.rms_norm_once(x, w.float(), 1e-5), dtype)
    total, normed = rows.add_norm(x, y, w, 1e-5)
    assert torch.equal(total, x + y)
    check_close(normed, norm.rms_norm(x + y, w, 1e-5), dtype)


@pytest.mark.parametrize("heads", [1, 6])
def test_norms_of_heads_that_lie_among_others(device, dtype, heads):
    random = Random(device)
    x, w = random(5, 10, 32, dtype=dtype)[:, :heads], random(heads, 32, dtype=dtype)
    check_close(rows.rms_norm(x, w, 1e-6), norm.rms_norm(x, w, 1e-6), dtype)
    check_close(rows.rms_norm(x, w[0], 1e-6), norm.rms_norm(x, w[0], 1e-6), dtype)


def test_activations(device, dtype):
    gate_up = Random(device)(5, 2 * 1100, dtype=dtype) * 3
    check_close(rows.silu_mul(gate_up), activation.silu_mul(gate_up), dtype)
    check_close(rows.gelu_tanh_mul(gate_up), activation.gelu_tanh_mul(gate_up), dtype)


@pytest.mark.parametrize("turning", [32, 24])
def test_rotary_positions_of_a_whole_head_and_of_a_part(device, dtype, turning):
    x = Random(device)(5, 10, 32, dtype=dtype)[:, :6]
    table = rope.rotary_table(rope.inverse_frequencies(turning, 1e4).to(device), 64)
    positions = torch.tensor([3, 0, 9, 60, 5], device=device)
    turn = rope.rotations(table, positions, dtype)
    check_close(rows.rotate(x, *turn), rope.rotate(x, *turn), dtype)
    assert all(map(torch.equal, rows.rotations(table, positions, dtype), turn))


@pytest.mark.parametrize("heads", [(4, 2, 64, 64), (9, 3, 32, 24), (16, 8, 128, 128)], ids=str)
def test_queries_turn_and_keys_are_written_as_by_two_kernels(device, dtype, heads):
    """To the bit; a row that has no page writes nothing. Queries, keys and values lie in one tensor."""
    num_heads, num_kv_heads, dim, turning = heads
    random = Random(device)
    qkv = random(6, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    table = rope.rotary_table(rope.inverse_frequencies(turning, 1e4).to(device), 64)
    turn = rope.rotations(table, torch.tensor([3, 0, 9, 60, 5, 5], device=device), dtype)
    slots = torch.tensor([3, 9, 10, -1, 0, 27], dtype=torch.int32, device=device)
    cache = random(2, num_kv_heads, 7, 4, dim, dtype=dtype)
    right = cache.clone()
    turned = rows.rotate(qk, *turn)
    pages.write_kv(turned[:, num_heads:], v, right, slots)
    assert torch.equal(pages.turn_and_write(qk, v, rope.Turning(*turn), cache, slots), turned[:, :num_heads])
    assert torch.equal(cache, right)
    witness("feat-fused-rope", head_dim=dim, changed=int((cache == right).sum()))


@pytest.mark.parametrize("once", [False, True], ids=["", "once"])
@pytest.mark.parametrize("heads", [(4, 2, 64, 64), (9, 3, 32, 24)], ids=str)
def test_heads_are_normalised_before_they_turn_as_by_two_kernels(device, dtype, heads, once):
    num_heads, num_kv_heads, dim, turning = heads
    random = Random(device)
    qkv, num_all = random(4, num_heads + 2 * num_kv_heads, dim, dtype=dtype), num_heads + num_kv_heads
    qk, v = qkv[:, :num_all], qkv[:, num_all:]
    weight = random(num_all, dim, dtype=torch.float32 if once else dtype)
    table = rope.rotary_table(rope.inverse_frequencies(turning, 1e4).to(device), 64)
    turn = rope.rotations(table, torch.tensor([3, 0, 60, 5], device=device), dtype)
    slots = torch.tensor([3, 9, -1, 27], dtype=torch.int32, device=device)
    cache = random(2, num_kv_heads, 7, 4, dim, dtype=dtype)
    right = cache.clone()
    normed = (rows.rms_norm_once if once else rows.rms_norm)(qk, weight, 1e-6)
    queries = pages.turn_and_write(normed, v, rope.Turning(*turn), right, slots)
    check_close(pages.turn_and_write(qk, v, rope.Turning(*turn, weight, 1e-6, once), cache, slots), queries, dtype)
    check_close(cache, right, dtype)


def test_nothing_is_done_to_no_rows(device):
    none = torch.empty(0, 64, device=device)
    assert rows.rms_norm(none, none.new_ones(64), 1e-5).shape == (0, 64)
    assert rows.silu_mul(none).shape == (0, 32)
    assert rows.rotate(none.view(0, 2, 32), none[:, None, :32], none[:, None, :32]).shape == (0, 2, 32)


def test_pages_are_filled_and_no_other(device, dtype):
    pool = Random(device)(2, 2, 3, 7, 4, 24, dtype=dtype)
    right = pool.clone()
    pages.fill_pages(pool, torch.tensor([1, 5], dtype=torch.int32, device=device), 0.0)
    right[:, :, :, [1, 5]] = 0
    assert torch.equal(pool, right)
    pages.fill_pages(pool, torch.tensor([2], dtype=torch.int32, device=device), torch.nan)
    assert pool[:, :, :, 2].isnan().all() and torch.equal(pool[:, :, :, :2], right[:, :, :, :2])


def test_keys_and_values_go_where_they_belong_and_padding_nowhere(device, dtype):
    random = Random(device)
    qkv, cache = random(5, 10, 24, dtype=dtype), random(2, 3, 7, 4, 24, dtype=dtype)
    keys, values, right = qkv[:, 4:7], qkv[:, 7:], cache.clone()
    slots = [0, 9, -1, 27, 2]
    pages.write_kv(keys, values, cache, torch.tensor(slots, dtype=torch.int32, device=device))
    for row, slot in enumerate(slots):
        if slot >= 0:
            right[0, :, slot // 4, slot % 4], right[1, :, slot // 4, slot % 4] = keys[row], values[row]
    assert torch.equal(cache, right)
