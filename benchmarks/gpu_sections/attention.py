"""attention: kernels alone, inside a graph, microseconds a layer: decode and prompts over shuffled pages, in bfloat16;
once in float32. Where FlashAttention-4 is installed, that too, without a graph.

Gates are FlashAttention-3's figures, measured on such a machine, and a tenth for decode, 35 % for prompts. Floors are
bytes over the bandwidth of reading, operations over the rate of a large product, both measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from gpu_sections.report import Found, Setup, workload
from perdure.ops.attention import AttentionRows, CacheShape, LayerAttention, flash_attention
from perdure.ops.attention.paged import PagedRows, make_paged

HEAD_DIM = 128
KIND = LayerAttention(HEAD_DIM**-0.5)
READ, PRODUCTS = 4.35e12, 783e12  # bytes and operations a second
DECODE = {(256, 1152, 32, 8): 296.0, (128, 900, 16, 8): 135.0, (64, 700, 32, 8): None, (1, 400, 32, 8): None}
PROMPTS = {(2, 8192, 32, 8): 1551.0, (16, 1024, 32, 8): None}
"""Rows, keys, query and key heads; what FlashAttention-3 takes, in microseconds, where it was measured."""
IN_FLOAT32 = (4, 1024, 32, 8)
BY_FA4 = {(256, 1152, 32, 8): "decode", (2, 8192, 32, 8): "prompts", (16, 1024, 32, 8): "prompts"}


def attention(setup: Setup) -> Found:
    found = {}
    for page_size in (16, 128):
        for invariant in (False, True):
            how = f"pages of {page_size}" + (", invariant" if invariant else "")
            for shape, theirs in DECODE.items():
                rows, length, heads, kv_heads = shape
                us = in_graph(_work(shape, page_size, invariant, prompts=False))
                floor = 4 * rows * length * kv_heads * HEAD_DIM / READ * 1e6
                found[_name("decode", shape, how)] = _figure(us, floor, theirs, 1.1)
            for shape, theirs in PROMPTS.items():
                rows, length, heads, kv_heads = shape
                us = in_graph(_work(shape, page_size, invariant, prompts=True))
                floor = 2 * rows * length**2 * heads * HEAD_DIM / PRODUCTS * 1e6
                gate = None if invariant else theirs
                found[_name("prompts", shape, how)] = _figure(us, floor, gate, 1.35)
    for shape, what in BY_FA4.items() if flash_attention.is_installed() else ():
        us = in_turn(_by_fa4(shape, 128, prompts=what == "prompts"))
        found[_name(what, shape, "pages of 128, fa4")] = workload(round(us, 1), "us")
    us = in_graph(_work(IN_FLOAT32, 16, False, prompts=True, dtype=torch.float32))
    found[_name("prompts", IN_FLOAT32, "float32")] = workload(round(us, 1), "us")
    return {"workloads": found}


def _name(what: str, shape: tuple[int, int, int, int], how: str) -> str:
    rows, length, heads, kv_heads = shape
    return f"{what} {rows} x {length}, {heads}/{kv_heads} heads, {how}"


def _figure(us: float, floor: float, theirs: float | None, most: float) -> dict[str, object]:
    gate = None if theirs is None else round(theirs * most, 1)
    return workload(round(us, 1), "us", floor=round(floor, 1), gate=gate, goal=theirs, less_is_better=True)


def _work(
    shape: tuple[int, int, int, int],
    page_size: int,
    invariant: bool,
    *,
    prompts: bool,
    dtype: torch.dtype = torch.bfloat16,
) -> Callable[[], object]:
    rows, length, *_ = shape
    q, cache, table, sizes = _inputs(shape, page_size, prompts, dtype)
    form = make_paged("auto", sizes, KIND, q.dtype, q.device, batch_invariant=invariant)
    ints = partial(torch.tensor, dtype=torch.int32, device="cuda")
    size = form.block_size
    lows = [(row, low) for low in reversed(range(0, length, size)) for row in range(rows)]
    blocks = ints([(row, row * length + low, low, min(size, length - low)) for row, low in lows] if prompts else [])
    index = ints(range(0 if prompts else rows))
    return lambda: form.run(
        q, cache, PagedRows(table, index, index, torch.full_like(index, length - 1), blocks.view(-1, 4))
    )


def _by_fa4(shape: tuple[int, int, int, int], page_size: int, *, prompts: bool) -> Callable[[], object]:
    rows, length, *_ = shape
    q, cache, table, sizes = _inputs(shape, page_size, prompts, torch.bfloat16)
    form = make_paged("fa4", sizes, KIND, q.dtype, q.device)
    queries = length if prompts else 1
    starts = np.full(rows, length - queries)
    form.plan(AttentionRows(queries * np.arange(rows + 1), starts, table.cpu().numpy().astype(np.int64)))
    none = torch.empty(0, dtype=torch.int32, device="cuda")
    return lambda: form.run(q, cache, PagedRows(table, none, none, none, none.view(-1, 4)))


def _inputs(
    shape: tuple[int, int, int, int], page_size: int, prompts: bool, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, CacheShape]:
    """Queries, pages, a table of them in no order, and sizes."""
    rows, length, heads, kv_heads = shape
    pages = -(-length // page_size)
    cache = torch.randn(2, kv_heads, rows * pages, page_size, HEAD_DIM, device="cuda", dtype=dtype)
    q = torch.randn(rows * (length if prompts else 1), heads, HEAD_DIM, device="cuda", dtype=dtype)
    width = max(pages, 2048 // page_size)  # requests could be longer
    table = torch.zeros(rows, width, dtype=torch.int32, device="cuda")
    table[:, :pages] = torch.randperm(rows * pages, device="cuda").view(rows, pages)
    return q, cache, table, CacheShape(heads, kv_heads, HEAD_DIM, rows * pages, page_size)


def in_turn(work: Callable[[], object], count: int = 20) -> float:
    """Microseconds, of so many one after the other."""
    work()
    return _least_ms(lambda: [work() for _ in range(count)]) * 1e3 / count


def in_graph(work: Callable[[], object], count: int = 5) -> float:
    """Microseconds, in a graph of some."""
    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()
    return _least_ms(graph.replay) * 1e3 / count


def _least_ms(run: Callable[[], object]) -> float:
    """Of four times."""
    begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
    times = []
    for _ in range(4):
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return min(times)
