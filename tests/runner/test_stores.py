"""Pages, arena, device rows and packing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from perdure.runner.arena import Arena
from perdure.runner.inputs import pack
from perdure.runner.kv_store import KVStore, kv_bytes_per_page
from perdure.runner.row_store import RowStore
from tests.runner.plans import CONFIG, VOCAB, Driver, Row


def test_arena_keeps_its_address_and_gives_memory_back():
    arena = Arena(1 << 20)
    tensor = arena.tensor(torch.float32)
    address = tensor.data_ptr()
    assert tensor.numel() == 1 << 18 and not tensor.any()
    tensor.fill_(3.0)
    arena.release()
    assert not tensor.any() and arena.tensor(torch.float32).data_ptr() == address
    tensor[5] = 1.0
    assert arena.tensor(torch.float32)[5] == 1.0


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_are_cleared_in_all_layers_and_no_others(page_size):
    store = KVStore(CONFIG, num_pages=7, page_size=page_size)
    assert store.num_bytes == 7 * kv_bytes_per_page(CONFIG, page_size)
    assert kv_bytes_per_page(CONFIG, page_size) == 2 * 2 * 2 * 8 * page_size * 4
    assert [tuple(cache.shape) for cache in store.layers] == [(2, 2, 7, page_size, 8)] * 2
    for cache in store.layers:
        cache.fill_(torch.nan)
    store.clear([5, 0])
    for cache in store.layers:
        assert not cache[:, :, [0, 5]].any() and cache[:, :, [1, 2, 3, 4, 6]].isnan().all()


def test_the_beginning_of_a_page_is_copied_in_all_layers_and_nothing_else():
    store = KVStore(CONFIG, num_pages=6, page_size=4)
    before = [cache.copy_(torch.randn(cache.shape)).clone() for cache in store.layers]
    store.copy([1, 5], [4, 0], [3, 1])
    for cache, old in zip(store.layers, before):
        old[:, :, 4, :3], old[:, :, 0, :1] = old[:, :, 1, :3].clone(), old[:, :, 5, :1].clone()
        assert torch.equal(cache, old)


def test_pack_lays_rows_out_in_the_plans_order(model):
    driver = Driver(model, page_size=4)
    rows = RowStore(8, driver.pages_per_slot, VOCAB)
    driver.admit(2, 9)
    driver.admit(5, 3)
    driver.admit(1, 4)
    scored = Row(2, [11, 12, 13], start=6, targets=[13, 14], target_start=8)
    plan = driver.plan(Row(5), scored, Row(1, [7], sample=False))
    rows.apply(plan)
    rows.advance(np.array([5]), np.array([17]))
    rows.last_token[5] = 42
    step = pack(plan, rows, page_size=4).padded(8)
    assert step.token_ids.tolist() == [42, 11, 12, 13, 7, 0, 0, 0]
    assert step.positions.tolist()[:5] == [17, 6, 7, 8, 0]
    assert step.ends.tolist() == [18, 9, 1]
    assert step.offsets.tolist() == [0, 1, 4, 5] and step.starts.tolist() == [17, 6, 0]
    expected = [rows.block_table[5, 4] * 4 + 1, *(rows.block_table[2, p // 4] * 4 + p % 4 for p in (6, 7, 8))]
    assert step.kv_slots.tolist() == [*expected, rows.block_table[1, 0] * 4]
    assert step.sampled.tolist() == [0, 1] and step.sampled_hidden.tolist() == [0, 3]
    targets = step.targets
    assert targets.row.tolist() == [1, 1] and targets.position.tolist() == [8, 9]
    assert targets.token.tolist() == [13, 14] and targets.hidden_row.tolist() == [2, 3]  # positions 7 and 8
    assert len(pack(plan, rows, page_size=4).token_ids) == 5


def test_settings_survive_their_narrow_types():
    rows = RowStore(4, 1, VOCAB)
    driver_rows = [(0, 1e-300, 10**30, 2**64 - 1), (1, 1e300, -1, 0), (2, 0.0, 1, 5)]
    for slot, temperature, top_k, seed in driver_rows:
        driver = _Init()
        driver.admit(slot, 2, temperature=temperature, top_k=top_k, seed=seed)
        rows.apply(driver.plan())
    slots = np.array([0, 1, 2])
    columns = rows.sampling(slots, rows.output_index(slots, np.array([2, 3, 4])))
    assert (columns.temperature[:2] > 0).all() and np.isfinite(columns.temperature).all()
    assert columns.temperature[2] == 0
    assert columns.top_k[0] >= 2**31 and columns.seed[0] == 2**64 - 1
    assert columns.output_index.tolist() == [0, 1, 2]
    assert rows.adjustments.of(slots, columns.output_index) is None


class _Init(Driver):
    """Only the bookkeeping of a driver."""

    def __init__(self):
        self.pages_per_slot, self.free, self.requests = 1, [0, 1, 2], [-1] * 4
        self.step, self.next_request, self.pending = 0, 0, []
