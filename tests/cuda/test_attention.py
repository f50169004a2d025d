"""Attention over pages in Triton against the reference."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import triton

from perdure.ops.attention import AttentionRows, CacheShape, LayerAttention
from perdure.ops.attention.paged import PagedRows, TritonPaged, make_paged
from perdure.ops.attention.reference import ReferenceAttention
from perdure.ops.rope import Turning, inverse_frequencies, rotary_table, rotations
from perdure.ops.triton import attention
from perdure.ops.triton.pages import turn_and_write
from tests.cuda.conftest import ON_GPU
from tests.cuda.helpers import Random, check_close, sinks_of

LENGTHS, STARTS = [1, 1, 1, 70, 5, 1], [130, 0, 64, 60, 3, 17]
HEADS = [(4, 2, 32), (6, 2, 24), (4, 4, 16)] + ([(16, 8, 128), (8, 1, 256), (32, 8, 80)] if ON_GPU else [])
MOST_HEADS = HEADS[ON_GPU * 3]  # those that have all kinds, types and pages
KINDS: dict[str, tuple[Any, ...]] = {"plain": (None, None), "window": (40, None), "cap": (None, 3.0), "both": (33, 5.0)}
KINDS |= {"sinks": (None, None, "learnable"), "all": (33, 5.0, "learnable"), "off-by-one": (5, None, "off-by-one")}


def blocks_of(offsets, starts, rows, size):
    """One entry a block, and one of padding."""
    found = [(0, 0, 0, 0)]
    for row in rows:
        for low in range(0, LENGTHS[row], size):
            found.append((row, offsets[row] + low, starts[row] + low, min(size, LENGTHS[row] - low)))
    return found


@pytest.mark.parametrize(
    ("page_size", "kind"), [(16, kind) for kind in KINDS] + [(4, "plain"), (5, "both"), (256, "plain")]
)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_against_the_reference(device, dtype, heads, page_size, kind, invariant):
    """Rows of one query and prompts in one batch, over shuffled pages; what is not seen is NaN. The reference computes
    on the CPU: what watches the kernels of a GPU (compute-sanitizer) then sees few others."""
    if heads != MOST_HEADS and (dtype != torch.float32 or page_size != 16 or kind != "both"):
        pytest.skip("other types, pages and kinds with one size of heads")
    if dtype == torch.float32 and (kind in ("window", "sinks", "off-by-one") or page_size == 4):
        pytest.skip("it takes longest to compile, and has what the others have")
    if not ON_GPU and (kind not in ("both", "plain", "sinks", "all") or page_size == 4 or heads == (4, 4, 16) or (
        dtype == torch.float16 and (kind, page_size) != ("both", 16)
    )):  # fmt: skip
        pytest.skip("the interpreter takes seconds for each")
    num_heads, num_kv_heads, dim = heads
    width = -(-max(s + n for s, n in zip(STARTS, LENGTHS)) // page_size)
    num_rows, num_pages = len(LENGTHS), len(LENGTHS) * width + 3
    random = Random(device)
    shape = CacheShape(num_heads, num_kv_heads, dim, num_pages, page_size)
    table = random.order(num_pages)[: num_rows * width].view(num_rows, width)
    cache = random(2, num_kv_heads, num_pages, page_size, dim, dtype=dtype)
    starts, offsets = np.array(STARTS), np.concatenate([[0], np.cumsum(LENGTHS)])
    for row, (start, length) in enumerate(zip(STARTS, LENGTHS)):
        hidden = torch.arange(start + length, width * page_size)
        cache[:, :, table[row, hidden // page_size], hidden % page_size] = torch.nan
    q = random(int(offsets[-1]), num_heads, dim, dtype=dtype)
    layer = LayerAttention(dim**-0.5, *KINDS[kind])
    sinks = sinks_of(layer, num_heads, random)
    planned = ReferenceAttention(shape, layer).plan(AttentionRows(offsets, starts, table.numpy()))
    right = planned.run(q.cpu(), cache.cpu(), None if sinks is None else sinks.cpu()).to(device)

    form = make_paged("triton", shape, layer, dtype, device, batch_invariant=invariant)
    ones = [row for row in range(num_rows) if LENGTHS[row] == 1]
    prompts = [row for row in range(num_rows) if LENGTHS[row] > 1]
    rows = PagedRows(
        table.to(device, torch.int32),
        *(torch.tensor(x, dtype=torch.int32, device=device) for x in (
            [*offsets[ones], 0], [*ones, 0], [*starts[ones], -1], blocks_of(offsets, starts, prompts, form.block_size),
        )),
    )  # fmt: skip
    check_close(form.run(q, cache, rows, sinks), right, dtype)


@pytest.mark.parametrize("num_rows", [3, 300] if ON_GPU else [3])
@pytest.mark.parametrize(
    ("head_norm", "sink"), [(None, None), ("norm", None), ("once", None), (None, "learnable")], ids=str
)
def test_rows_that_turn_where_they_attend(device, dtype, head_norm, sink, num_rows):
    """As after the kernel that turns and writes, in one range or in many; padding writes nothing."""
    if not ON_GPU and head_norm == "once" and dtype != torch.float32:
        pytest.skip("the interpreter takes seconds for each")
    num_heads, num_kv_heads, dim, page_size = 6, 2, 24, 4
    random, width = Random(device), 40
    shape = CacheShape(num_heads, num_kv_heads, dim, num_rows * width, page_size)
    positions = ([130, -1, 63, 0] + 2 * random.order(150).tolist())[:num_rows]
    table = random.order(num_rows * width).view(num_rows, width).to(device, torch.int32)
    cache = random(2, num_kv_heads, num_rows * width, page_size, dim, dtype=dtype)
    qkv = random(num_rows, num_heads + 2 * num_kv_heads, dim, dtype=dtype)
    qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    once = head_norm == "once"
    weight = random(num_heads + num_kv_heads, dim, dtype=torch.float32 if once else dtype) if head_norm else None
    at = torch.tensor(positions, dtype=torch.int32, device=device)
    turn = rotations(rotary_table(inverse_frequencies(16, 1e4).to(device), 160), at.clamp(min=0).long(), dtype)
    turning = Turning(*turn, weight, 1e-6, once)
    index = torch.arange(num_rows, dtype=torch.int32, device=device)
    rows = PagedRows(table, index, index, at, index[:0].view(0, 4))
    pages = table.gather(1, (at.clamp(min=0) // page_size).long()[:, None])[:, 0]
    slots = torch.where(at < 0, -1, pages * page_size + at % page_size).int()
    layer = LayerAttention(dim**-0.5, sink=sink)
    sinks = sinks_of(layer, num_heads, random)
    form = make_paged("triton", shape, layer, dtype, device)
    written = cache.clone()
    right = form.run(turn_and_write(qk, v, turning, written, slots), written, rows, sinks)
    assert isinstance(form, TritonPaged)
    found = form.run_turning(qk, v, turning, cache, rows, sinks)
    check_close(found[at >= 0], right[at >= 0], dtype)
    check_close(cache, written, dtype)


@pytest.mark.parametrize("num_rows", [1, 40, 200])
def test_splits_of_long_rows(gpu, num_rows):
    """Alone a row is split into many parts, among many not at all."""
    random, dim, page_size, length = Random(gpu), 128, 16, 3000
    width = -(-length // page_size)
    shape = CacheShape(16, 8, dim, 4 * width, page_size)
    cache = random(2, 8, 4 * width, page_size, dim, dtype=torch.bfloat16)
    table = random.order(4 * width).view(4, width)
    positions = [length - 1 - 37 * row % length for row in range(num_rows)]
    slots = [row % 4 for row in range(num_rows)]
    q, layer = random(num_rows, 16, dim, dtype=torch.bfloat16), LayerAttention(dim**-0.5)
    index = list(range(num_rows))
    on_gpu = [torch.tensor(x, dtype=torch.int32, device=gpu) for x in (index, slots, positions)]
    rows = PagedRows(table.to(gpu, torch.int32), *on_gpu, torch.empty(0, 4, dtype=torch.int32, device=gpu))
    found = make_paged("triton", shape, layer, torch.bfloat16, gpu).run(q, cache, rows)
    right = make_paged("reference", shape, layer, torch.bfloat16, gpu).run(q[:8], cache, PagedRows(
        rows.table, rows.index[:8], rows.slots[:8], rows.positions[:8], rows.blocks
    ))  # fmt: skip
    check_close(found[:8], right, torch.bfloat16)
    assert found.isfinite().all()


@pytest.mark.parametrize("sink", [None, "learnable"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "invariant"])
def test_ranges_are_joined_and_pages_fetched(device, monkeypatch, invariant, sink):
    """A row of one query and a prompt over more than one range at absolute positions, in pages of whole blocks.
    In one program or in many, ranges give the same, to the bit where they are absolute; a sink enters once."""
    random, dtype, dim, page_size, starts, lengths = Random(device), torch.float16, 64, 64, [2100, 1000], [1, 70]
    table = random.order(70)[:68].view(2, 34)
    cache = random(2, 2, 70, page_size, dim, dtype=dtype)
    for row, end in enumerate(start + length for start, length in zip(starts, lengths)):
        hidden = torch.arange(end, 34 * page_size)
        cache[:, :, table[row, hidden // page_size], hidden % page_size] = torch.nan
    q = random(71, 4, dim, dtype=dtype)
    shape, layer = CacheShape(4, 2, dim, 70, page_size), LayerAttention(dim**-0.5, sink=sink)
    sinks = sinks_of(layer, 4, random)
    of_all = AttentionRows(np.array([0, 1, 71]), np.array(starts), table.numpy())
    planned = ReferenceAttention(shape, layer).plan(of_all)
    right = planned.run(q.cpu(), cache.cpu(), None if sinks is None else sinks.cpu()).to(device)

    form = make_paged("triton", shape, layer, dtype, device, batch_invariant=invariant)
    size = form.block_size
    blocks = [(1, 1 + low, 1000 + low, min(size, 70 - low)) for low in range(0, 70, size)]
    columns = table.tolist(), [0], [0], [2100], blocks
    rows = PagedRows(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))
    found = form.run(q, cache, rows, sinks)
    check_close(found, right, dtype)
    monkeypatch.setattr(attention, "PROGRAMS", 1)
    alone = form.run(q, cache, rows, sinks)
    check_close(alone, right, dtype)
    assert not invariant or torch.equal(alone, found)


def test_the_reference_over_pages_is_that_over_rows(device):
    random, dim = Random(device), 16
    table, cache, q = random.order(8).view(2, 4), random(2, 2, 8, 16, dim), random(6, 4, dim)
    starts, offsets = np.array([40, 9]), np.array([0, 5, 6])
    shape, layer = CacheShape(4, 2, dim, 8, 16), LayerAttention(0.3, 20, 5.0, "learnable")
    sinks = sinks_of(layer, 4, random)
    right = ReferenceAttention(shape, layer).plan(AttentionRows(offsets, starts, table.numpy())).run(q, cache, sinks)
    columns = [5], [1], [9], [(0, 0, 40, 5)]
    rows = (torch.tensor(column, dtype=torch.int32, device=device) for column in columns)
    paged = PagedRows(table.to(device, torch.int32), *rows)
    form = make_paged("reference", shape, layer, torch.float32, device)
    assert torch.equal(form.run(q, cache, paged, sinks), right)


def check_prompts(gpu, heads, dtype, page_size, lengths, starts, *, times=1):
    """Prompts and parts of prompts in the form for Hopper, those that end last first, with blocks of padding around;
    what is not seen is NaN."""
    if torch.cuda.get_device_capability(gpu)[0] != 9:
        pytest.skip("no Hopper here")
    num_heads, kv_heads, dim = heads
    num_rows, ends = len(lengths), [start + length for start, length in zip(starts, lengths)]
    width = -(-max(ends) // page_size)
    shape = CacheShape(num_heads, kv_heads, dim, num_rows * width + 3, page_size)
    random, layer = Random(gpu), LayerAttention(dim**-0.5)
    table = random.order(shape.num_pages)[: num_rows * width].view(num_rows, width)
    cache = random(2, kv_heads, shape.num_pages, page_size, dim, dtype=dtype)
    for row, end in enumerate(ends):
        hidden = torch.arange(end, width * page_size)
        cache[:, :, table[row, hidden // page_size], hidden % page_size] = torch.nan
    q = random(sum(lengths), num_heads, dim, dtype=dtype)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    planned = ReferenceAttention(shape, layer).plan(AttentionRows(offsets, np.array(starts), table.numpy()))
    right = planned.run(q.cpu(), cache.cpu())

    form = make_paged("hopper", shape, layer, dtype, gpu)
    blocks = [
        (row, int(offsets[row]) + low, starts[row] + low, min(form.block_size, lengths[row] - low))
        for row in range(num_rows)
        for low in range(0, lengths[row], form.block_size)
    ]
    blocks = [(0, 0, 0, 0), *sorted(blocks, key=lambda block: -block[2]), (0, 0, 0, 0)]
    none = torch.empty(0, dtype=torch.int32, device=gpu)
    rows = PagedRows(table.to(gpu, torch.int32), none, none, none, torch.tensor(blocks, dtype=torch.int32, device=gpu))
    for _ in range(times):
        check_close(form.run(q, cache, rows).cpu(), right, dtype)


@pytest.mark.parametrize(
    ("dtype", "dim", "page_size"),
    [(torch.bfloat16, 128, 16), (torch.bfloat16, 128, 48), (torch.bfloat16, 128, 256), (torch.float16, 64, 64)],
)
def test_long_prompts(gpu, dtype, dim, page_size):
    """More blocks than a GPU has processors, of rows that begin and end anywhere."""
    lengths, starts = [1500, 333, 1, 128, 700, 64, 5], [0, 1000, 129, 5, 128, 255, 3]
    check_prompts(gpu, (32, 8, dim), dtype, page_size, lengths, starts, times=3)


@pytest.mark.parametrize(("dtype", "dim", "page_size"), [(torch.bfloat16, 128, 16), (torch.bfloat16, 64, 64)])
def test_short_prompts(gpu, dtype, dim, page_size):
    check_prompts(gpu, (4, 2, dim), dtype, page_size, [300, 17, 1, 129], [0, 250, 64, 40])


@pytest.mark.parametrize(
    ("dim", "page_size", "kind", "config", "reason"),
    [
        (128, 16, {}, {}, None),
        (64, 48, {}, {"kv_dtype": torch.bfloat16}, None),
        (80, 16, {}, {}, "does not serve here: it has heads of 64 and 128, not of 80"),
        (128, 24, {}, {}, "does not serve here: it has pages of a multiple of 16, not of 24"),
        (128, 16, {"window": 40}, {}, "does not serve here: it has no windows"),
        (128, 16, {"sink": "off-by-one"}, {}, "does not serve here: it has no sinks"),
        (
            128,
            16,
            {},
            {"kv_dtype": torch.float8_e4m3fn},
            "does not serve here: it computes in .* in the same type",
        ),
        (128, 16, {}, {"batch_invariant": True}, "is not batch invariant on CUDA"),
    ],
)
def test_auto_takes_the_form_for_hopper_where_it_serves(monkeypatch, dim, page_size, kind, config, reason):
    """And by name it is refused elsewhere. No GPU is asked: it is made, not run."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    given = CacheShape(32, 8, dim, 8, page_size), LayerAttention(0.1, **kind), torch.bfloat16, torch.device("cuda")
    assert make_paged("auto", *given, **config).name == ("triton" if reason else "hopper")
    if reason:
        with pytest.raises(ValueError, match=f"attention_backend='hopper' {reason}"):
            make_paged("hopper", *given, **config)
    monkeypatch.setattr(triton, "__version__", "3.9.0")
    assert make_paged("auto", *given, **config).name == "triton"
