"""Numbers of 8 bits in Triton: pages that hold them.

The interpreter rounds to them wrongly (its subnormal numbers, carries and NaN), so what rounds is shown on a GPU alone.
"""

from __future__ import annotations

import pytest
import torch

from perdure.ops.attention import CacheShape, LayerAttention
from perdure.ops.attention.paged import PagedRows, make_paged
from perdure.ops.float8 import E4M3, to_e4m3
from perdure.ops.triton.pages import write_kv
from tests.cuda.helpers import Random, check_close

KINDS = {"plain": (None, None), "window": (40, None), "cap": (None, 3.0)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dim", [32, 24])
def test_attention_over_pages_of_8_bits_is_that_over_their_values(device, dtype, dim, kind):
    """Rows of one query, a prompt of 70 and one of 5."""
    if dtype == torch.float16 and (dim, kind) != (32, "plain"):
        pytest.skip("float16 with one size and kind")
    random = Random(device)
    pages = to_e4m3(random(2, 2, 40, 16, dim))
    q = random(78, 4, dim, dtype=dtype)
    columns = (
        random.order(40).view(4, 10).tolist(), [0, 76, 77], [0, 3, 1], [130, 64, -1],
        [(1, 1, 60, 70), (2, 71, 3, 5), (0, 0, 0, 0)],
    )  # fmt: skip
    rows = PagedRows(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))
    form = make_paged("triton", CacheShape(4, 2, dim, 40, 16), LayerAttention(dim**-0.5, *KINDS[kind]))
    check_close(form.run(q, pages, rows)[:77], form.run(q.float(), pages.float(), rows)[:77], dtype)


def test_keys_and_values_are_rounded_as_on_a_cpu(gpu, dtype):
    """Over all magnitudes there are, beyond the largest, and NaN."""
    random = Random(gpu)
    keys = (random(64, 3, 80) * torch.logspace(-4, 4, 80, device=gpu)).to(dtype)
    keys[0, 0, 0], keys[1, 0, 0], keys[2, 0, 0] = torch.nan, torch.inf, -1e4
    values = keys.flip(2).contiguous()
    cache = torch.zeros(2, 3, 4, 16, 80, dtype=E4M3, device=gpu)
    write_kv(keys, values, cache, torch.arange(64, dtype=torch.int32, device=gpu).flip(0))
    written = cache.view(torch.uint8).view(2, 3, 64, 80).flip(2).transpose(1, 2).cpu()
    for found, right in zip(written, (keys, values), strict=True):
        right = to_e4m3(right.cpu())
        assert torch.equal(found, right.view(torch.uint8)) or torch.equal(
            found.view(E4M3).float().nan_to_num(7e7), right.float().nan_to_num(7e7)
        )
