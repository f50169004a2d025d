"""Keys and values land where their slots say, and nothing else changes."""

import numpy as np
import pytest
import torch

from perdure.ops.attention import CacheShape
from perdure.ops.kv_write import TorchKVWrite, plan_kv_write


@pytest.mark.parametrize("plan", [plan_kv_write, TorchKVWrite.plan], ids=["the fastest", "torch"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_writes_the_named_slots_and_only_them(page_size, plan):
    shape = CacheShape(num_heads=4, num_kv_heads=2, head_dim=8, num_pages=48 // page_size, page_size=page_size)
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(2, 2, shape.num_pages, page_size, 8, generator=generator)
    before = cache.clone()
    slots = np.array([5, 0, 47, 13, 12])
    both = torch.randn(8, 2, 3, 8, generator=generator)  # strided views, as a model's split gives them
    keys, values = both[:, :, 0], both[:, :, 2]  # three more tokens than slots: padding
    plan(shape, slots).run(keys, values, cache)
    for token, slot in enumerate(slots.tolist()):
        page, inside = divmod(slot, page_size)
        assert torch.equal(cache[0, :, page, inside], keys[token])
        assert torch.equal(cache[1, :, page, inside], values[token])
        before[:, :, page, inside] = cache[:, :, page, inside]
    assert torch.equal(cache, before)
