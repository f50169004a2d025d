"""Forms of attention agree with the reference; the invariant ones give a query the same bits whatever comes with it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from perdure.ops.attention import AttentionRows, CacheShape, LayerAttention, make_attention
from perdure.ops.native import library

HEADS = [(9, 3, 64), (4, 4, 16), (8, 1, 80)]  # query heads, key heads, head size
PAGE_SIZES = [1, 4, 16, 64]
KINDS = {
    "window 1": {"window": 1},
    "window 5": {"window": 5},
    "window 64": {"window": 64},
    "window 100": {"window": 100},
    "soft cap": {"softcap": 3.0},
    "all": {"window": 70, "softcap": 2.0, "scale": 0.5},
    "off by one": {"window": 5, "sink": "off-by-one"},
    "sinks": {"sink": "learnable"},
    "all and sinks": {"window": 70, "softcap": 2.0, "scale": 0.5, "sink": "learnable"},
}


@pytest.fixture(params=[1], autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """One thread unless a test asks for both: on a busy machine every barrier of two costs milliseconds."""
    before, native = torch.get_num_threads(), library()
    torch.set_num_threads(request.param)
    if native is not None:
        native.follow_torch()
    yield request.param
    torch.set_num_threads(before)
    if native is not None:
        native.follow_torch()


@pytest.fixture(params=["native", "tiled"])
def form(request: pytest.FixtureRequest) -> str:
    """The invariant forms."""
    return request.param


class Pool:
    """Requests of given lengths with their keys in shuffled pages; the rest of each last page is cleared."""

    def __init__(
        self,
        heads: tuple[int, int, int],
        page_size: int,
        lengths: list[int],
        *,
        scale: float | None = None,
        **kind: Any,
    ) -> None:
        num_heads, num_kv_heads, head_dim = heads
        self.layer = LayerAttention(head_dim**-0.5 if scale is None else scale, **kind)
        counts = [-(-length // page_size) for length in lengths]
        self.shape = CacheShape(num_heads, num_kv_heads, head_dim, sum(counts) + 3, page_size)
        rng = np.random.default_rng(1)
        order = rng.permutation(self.shape.num_pages)
        self.generator = torch.Generator().manual_seed(2)
        # Pages of nobody hold NaN: reading one shows.
        self.cache = torch.full((2, num_kv_heads, self.shape.num_pages, page_size, head_dim), float("nan"))
        self.table = np.full((len(lengths), max(counts)), order[-1], np.int64)
        self.queries = []
        for row, (length, count) in enumerate(zip(lengths, counts)):
            pages = self.table[row, :count] = order[sum(counts[:row]) : sum(counts[: row + 1])]
            keys = torch.randn(2, num_kv_heads, length, head_dim, generator=self.generator)
            padded = torch.zeros(2, num_kv_heads, count * page_size, head_dim)
            padded[:, :, :length] = keys
            self.cache[:, :, pages] = padded.unflatten(2, (count, page_size))
            self.queries.append(torch.randn(length, num_heads, head_dim, generator=self.generator))
        self.sinks: torch.Tensor | None = None
        if self.layer.sink is not None:
            self.sinks = 2.0 * torch.randn(num_heads, generator=self.generator) * (self.layer.sink == "learnable")

    def run(self, form: str, spans: list[tuple[int, int, int]], padding: int = 0) -> list[torch.Tensor]:
        """Outputs [length, Hq, D] of spans (request, start, length), computed in one step."""
        q = torch.cat([self.queries[request][start : start + length] for request, start, length in spans])
        q = torch.cat([q, torch.randn(padding, *q.shape[1:], generator=self.generator)])
        rows = AttentionRows(
            offsets=np.cumsum([0, *(length for _, _, length in spans)]),
            starts=np.array([start for _, start, _ in spans]),
            block_table=self.table[[request for request, _, _ in spans]],
        )
        planned = make_attention(form, self.shape, self.layer, batch_invariant=False).plan(rows)
        out = planned.run(q, self.cache, self.sinks)
        assert out.shape == q.shape
        assert not out[len(out) - padding :].any()
        return list(out.clone()[: len(out) - padding].split([length for _, _, length in spans]))


def in_chunks(pool: Pool, form: str, request: int, length: int, size: int) -> torch.Tensor:
    """One request alone, chunk by chunk."""
    spans = [(request, start, min(size, length - start)) for start in range(0, length, size)]
    return torch.cat([pool.run(form, [span])[0] for span in spans])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("form", ["native", "tiled", "plain"])
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_equals_the_reference(form, heads, page_size):
    pool = Pool(heads, page_size, [70, 1, 64, 9, 130])
    spans = [(0, 69, 1), (1, 0, 1), (2, 60, 4), (3, 0, 9), (4, 129, 1), (4, 64, 2)]
    for ours, expected in zip(pool.run(form, spans, padding=3), pool.run("reference", spans, padding=3)):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "kind",
    [{}, {"window": 9, "softcap": 2.0}, {"window": 9, "sink": "learnable"}],
    ids=["all before", "window and soft cap", "window and sinks"],
)
@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 16])
@pytest.mark.parametrize("head_dim", [8, 40, 256])
def test_groups_and_heads_of_any_size(form, group, head_dim, kind):
    """Whole tiles of query rows and of vectors, and what is left beside them: the reference's values, and the bits of
    each query alone."""
    pool = Pool((2 * group, 2, head_dim), 4, [21], **kind)
    whole = pool.run(form, [(0, 0, 21)])[0]
    torch.testing.assert_close(whole, pool.run("reference", [(0, 0, 21)])[0], atol=1e-5, rtol=1e-5)
    for start, length in ((0, 1), (19, 2), (20, 1), (5, 4)):
        assert torch.equal(pool.run(form, [(0, start, length)])[0], whole[start : start + length])


@pytest.mark.parametrize("window", [1, 2, 7, 8, 9, 15, 16, 17, 63, 64, 65, 150, 1000])
def test_windows_at_the_edges_of_lanes_pages_and_tiles(form, window):
    """Every query alone, and all of them at once."""
    pool = Pool((4, 2, 16), 8, [150], window=window)
    whole = pool.run(form, [(0, 0, 150)])[0]
    torch.testing.assert_close(whole, pool.run("reference", [(0, 0, 150)])[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(torch.cat(pool.run(form, [(0, position, 1) for position in range(150)])), whole)
    if window == 1:
        values = pool.cache[1][:, pool.table[0]].flatten(1, 2)[:, :150]  # each sees itself alone
        assert torch.equal(whole, values.transpose(0, 1).repeat_interleave(2, dim=1))


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
def test_a_query_that_is_no_number_stays_alone(form):
    """Also among the queries of its own chunk, which share a tile with it."""
    pool = Pool((6, 2, 16), 16, [40])
    clean = pool.run(form, [(0, 20, 20)])[0]
    pool.queries[0][27] = float("nan")
    ours = pool.run(form, [(0, 20, 20)])[0]
    others = torch.arange(20) != 7
    assert ours[7].isnan().all() and torch.equal(ours[others], clean[others])


@pytest.mark.parametrize("softcap", [None, 5.0])
def test_vast_scores_choose_one_key_and_overflow_nothing(form, softcap):
    """Scores of 1e5 and more: exponentials of their differences are 0 or 1, soft caps are at their ends."""
    pool = Pool((4, 2, 16), 16, [60], scale=1e5, softcap=softcap)
    spans = [(0, 0, 60)]
    ours, expected = pool.run(form, spans)[0], pool.run("reference", spans)[0]
    assert ours.isfinite().all()
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_bits_do_not_depend_on_the_chunking(form, heads, page_size):
    pool = Pool(heads, page_size, [150])
    whole = pool.run(form, [(0, 0, 150)])[0]
    for size in (7, 32, 64):
        assert torch.equal(in_chunks(pool, form, 0, 150, size), whole), f"chunks of {size}"
    decoded = pool.run(form, [(0, position, 1) for position in range(150)])
    assert torch.equal(torch.cat(decoded), whole)
    for position in (0, 1, 63, 64, 149):
        assert torch.equal(pool.run(form, [(0, position, 1)])[0], whole[position : position + 1])


def test_bits_do_not_depend_on_blocks_of_a_long_prompt(form):
    pool = Pool((9, 3, 64), 16, [1100])
    whole = pool.run(form, [(0, 0, 1100)])[0]
    for start in (0, 63, 511, 777, 1023, 1099):
        assert torch.equal(pool.run(form, [(0, start, 1)])[0], whole[start : start + 1])
    assert torch.equal(pool.run(form, [(0, 500, 600)])[0], whole[500:])


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
def test_bits_do_not_depend_on_the_neighbours(form):
    lengths = [150, 3, 64, 65, 700, 128, 20, 149]
    pool = Pool((9, 3, 64), 16, lengths)
    alone = [pool.run(form, [(request, length - 1, 1)])[0] for request, length in enumerate(lengths)]
    decode = [(request, length - 1, 1) for request, length in enumerate(lengths)]
    for ours, expected in zip(pool.run(form, decode), alone):
        assert torch.equal(ours, expected)
    mixed = [(4, 600, 100), *decode[:3], (5, 100, 28), *decode[6:]]
    together = pool.run(form, mixed, padding=5)
    assert all(torch.equal(ours[-1:], alone[span[0]]) for ours, span in zip(together, mixed))
    many = [(request % 8, lengths[request % 8] - 1, 1) for request in range(40)]
    assert all(torch.equal(ours, alone[span[0]]) for ours, span in zip(pool.run(form, many), many))


def test_bits_do_not_depend_on_the_page_size_within_a_tile(form):
    """Pages of 1 to 64 share a tile of 64 positions."""
    whole = [Pool((9, 3, 64), page_size, [150]).run(form, [(0, 0, 150)])[0] for page_size in PAGE_SIZES]
    assert all(torch.equal(other, whole[0]) for other in whole)


def test_pages_of_any_size_give_the_native_form_the_same_bits():
    whole = [Pool((9, 3, 64), page_size, [150]).run("native", [(0, 0, 150)])[0] for page_size in (1, 7, 16, 100, 256)]
    assert all(torch.equal(other, whole[0]) for other in whole)


def test_a_page_size_that_divides_no_tile_is_exact_too(form):
    pool = Pool((4, 2, 16), 7, [150])
    whole = pool.run(form, [(0, 0, 150)])[0]
    torch.testing.assert_close(whole, pool.run("reference", [(0, 0, 150)])[0], atol=1e-5, rtol=1e-5)
    assert torch.equal(in_chunks(pool, form, 0, 150, 11), whole)


def test_a_neighbours_nan_stays_with_it(form):
    pool = Pool((4, 2, 16), 16, [100, 40])
    spans = [(0, 99, 1), (1, 39, 1)]
    clean = pool.run(form, spans)[1]
    pool.cache[:, :, pool.table[0, 0]] = float("nan")
    poisoned = pool.run(form, spans)
    assert poisoned[0].isnan().all() and torch.equal(poisoned[1], clean)


def test_the_past_alone_counts(form):
    """Changing what lies after a query changes no bit of it."""
    pool = Pool((4, 2, 16), 16, [100])
    before = pool.run(form, [(0, 0, 80)])[0]
    pool.cache[:, :, pool.table[0, 5]] = 1e3  # positions 80 to 95
    assert torch.equal(pool.run(form, [(0, 0, 80)])[0], before)


@pytest.mark.parametrize(
    ("form", "kind"),
    [(form, kind) for form in ("native", "tiled") for kind in KINDS]
    + [("plain", kind) for kind in KINDS if "softcap" not in KINDS[kind]],
)
@pytest.mark.parametrize("page_size", [1, 7, 16, 64])
def test_windows_and_soft_caps_equal_the_reference(form, page_size, kind):
    pool = Pool((9, 3, 64), page_size, [70, 1, 64, 9, 330], **KINDS[kind])
    spans = [(0, 69, 1), (1, 0, 1), (2, 60, 4), (3, 0, 9), (4, 329, 1), (4, 250, 80), (4, 0, 200), (4, 0, 330)]
    for ours, expected in zip(pool.run(form, spans, padding=3), pool.run("reference", spans, padding=3)):
        torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("heads", "page_size"), [(HEADS[0], 16), (HEADS[1], 3), (HEADS[2], 1)])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_do_not_depend_on_the_chunking_with_windows_and_soft_caps(form, heads, page_size, kind):
    pool = Pool(heads, page_size, [333], **KINDS[kind])
    whole = pool.run(form, [(0, 0, 333)])[0]
    for size in (7, 32, 64):
        assert torch.equal(in_chunks(pool, form, 0, 333, size), whole), f"chunks of {size}"
    for start in (1, 63, 65, 130, 200):
        assert torch.equal(pool.run(form, [(0, start, 333 - start)])[0], whole[start:]), f"from {start}"
    decoded = pool.run(form, [(0, position, 1) for position in range(333)])
    assert torch.equal(torch.cat(decoded), whole)
    for position in (0, 1, 63, 64, 191, 332):
        assert torch.equal(pool.run(form, [(0, position, 1)])[0], whole[position : position + 1])


def test_what_a_window_left_behind_is_not_read(form):
    """Pages wholly before the tile that the window begins in may hold anything, even NaN."""
    pool = Pool((4, 2, 16), 16, [400], window=50)
    before = [pool.run(form, [span])[0] for span in ((0, 399, 1), (0, 330, 70))]
    pool.cache[:, :, pool.table[0, :16]] = float("nan")  # the window of 330 begins at 281, in the tile from 256 on
    after = [pool.run(form, [span])[0] for span in ((0, 399, 1), (0, 330, 70))]
    assert all(torch.equal(ours, expected) for ours, expected in zip(after, before))


@pytest.mark.parametrize("form", ["native", "tiled", "plain", "reference"])
@pytest.mark.parametrize("window", [None, 5])
def test_a_sink_is_a_column_without_a_value(form, window):
    """The formula written out: all scores of a dense row, and the sink's beside them, which no value belongs to."""
    pool = Pool((6, 2, 16), 8, [40], window=window, sink="learnable")
    keys, values = pool.cache[:, :, pool.table[0, :5]].flatten(2, 3).repeat_interleave(3, dim=1)  # [Hq, 40, D]
    scores = pool.queries[0].transpose(0, 1) @ keys.transpose(1, 2) * 16**-0.5
    distance = torch.arange(40)[:, None] - torch.arange(40)
    hidden = (distance < 0) | (distance >= (window or 40))
    assert pool.sinks is not None
    beside = torch.cat((scores.masked_fill(hidden, -torch.inf), pool.sinks[:, None, None].expand(-1, 40, 1)), -1)
    exponentials = (beside - beside.amax(-1, keepdim=True)).exp()
    weights = exponentials / exponentials.sum(-1, keepdim=True)
    right = (weights[..., :40] @ values).transpose(0, 1)
    torch.testing.assert_close(pool.run(form, [(0, 0, 40)])[0], right, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(pool.run(form, [(0, 39, 1)])[0], right[39:], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("form", ["native", "tiled", "plain", "reference"])
def test_vast_sinks_take_all_weight_or_none(form):
    """Of one head each: as if there was nothing to see, and as if there was no sink; neither overflows."""
    pool = Pool((2, 2, 16), 16, [60], sink="learnable")
    bare = Pool((2, 2, 16), 16, [60])
    pool.sinks = torch.tensor([1e5, -1e5])
    ours, without = pool.run(form, [(0, 0, 60)])[0], bare.run(form, [(0, 0, 60)])[0]
    assert not ours[:, 0].any()
    torch.testing.assert_close(ours[:, 1], without[:, 1], atol=1e-6, rtol=1e-6)


def test_heads_the_kernel_cannot_take_are_attended_otherwise():
    shape, layer = CacheShape(4, 2, 20, 4, 16), LayerAttention(0.25)
    assert make_attention("auto", shape, layer, batch_invariant=True).name == "tiled"
    with pytest.raises(ValueError, match="'native' needs a head size that is a multiple of 8, not 20"):
        make_attention("native", shape, layer, batch_invariant=True)


def test_an_unknown_or_unfit_backend_is_refused():
    shape, layer = CacheShape(4, 2, 16, 4, 16), LayerAttention(0.25)
    with pytest.raises(ValueError, match="attention_backend='flash' is none of auto, native, tiled, plain, reference"):
        make_attention("flash", shape, layer, batch_invariant=True)
    with pytest.raises(ValueError, match="'plain' is not batch invariant"):
        make_attention("plain", shape, layer, batch_invariant=True)
    assert make_attention("auto", shape, layer, batch_invariant=True).batch_invariant
    with pytest.raises(ValueError, match=r"'plain' has no soft cap \(softcap=50.0\)"):
        make_attention("plain", shape, LayerAttention(0.25, softcap=50.0), batch_invariant=False)
