"""attention: kernels alone, inside a graph, microseconds a layer: decode and prompts over shuffled pages, in bfloat16;
once in float32.

Gates are FlashAttention-3's figures, measured on such a machine, and a tenth for decode, 35 % for prompts. Floors are
bytes over the bandwidth of reading, operations over the rate of a large product, both measured.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from gpu_sections.report import Found, Setup, workload
from perdure.ops.attention import CacheShape, LayerAttention
from perdure.ops.attention.paged import PagedRows, make_paged

HEAD_DIM = 128
READ, PRODUCTS = 4.35e12, 783e12  # bytes and operations a second
DECODE = {(256, 1152, 32, 8): 296.0, (128, 900, 16, 8): 135.0, (64, 700, 32, 8): None, (1, 400, 32, 8): None}
PROMPTS = {(2, 8192, 32, 8): 1551.0, (16, 1024, 32, 8): None}
"""Rows, keys, query and key heads; what FlashAttention-3 takes, in microseconds, where it was measured."""
IN_FLOAT32 = (4, 1024, 32, 8)


def attention(setup: Setup) -> Found:
    found = {}
    for page_size in (16, 128):
        for invariant in (False, True):
            how = f"pages of {page_size}" + (", invariant" if invariant else "")
            for shape, theirs in DECODE.items():
                rows, length, heads, kv_heads = shape
                us = in_graph(_work(shape, page_size, invariant, prompts=False))
                floor = 4 * rows * length * kv_heads * HEAD_DIM / READ * 1e6
                found[f"decode {rows} x {length}, {heads}/{kv_heads} heads, {how}"] = _figure(us, floor, theirs, 1.1)
            for shape, theirs in PROMPTS.items():
                rows, length, heads, kv_heads = shape
                us = in_graph(_work(shape, page_size, invariant, prompts=True))
                floor = 2 * rows * length**2 * heads * HEAD_DIM / PRODUCTS * 1e6
                gate = None if invariant else theirs
                found[f"prompts {rows} x {length}, {heads}/{kv_heads} heads, {how}"] = _figure(us, floor, gate, 1.35)
    rows, length, heads, kv_heads = shape = IN_FLOAT32
    us = in_graph(_work(shape, 16, False, prompts=True, dtype=torch.float32))
    found[f"prompts {rows} x {length}, {heads}/{kv_heads} heads, float32"] = workload(round(us, 1), "us")
    return {"workloads": found}


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
    rows, length, heads, kv_heads = shape
    pages = -(-length // page_size)
    cache = torch.randn(2, kv_heads, rows * pages, page_size, HEAD_DIM, device="cuda", dtype=dtype)
    q = torch.randn(rows * (length if prompts else 1), heads, HEAD_DIM, device="cuda", dtype=dtype)
    width = max(pages, 2048 // page_size)  # requests could be longer
    table = torch.zeros(rows, width, dtype=torch.int32, device="cuda")
    table[:, :pages] = torch.randperm(rows * pages, device="cuda").view(rows, pages)
    sizes = CacheShape(heads, kv_heads, HEAD_DIM, rows * pages, page_size)
    kind = LayerAttention(HEAD_DIM**-0.5)
    form = make_paged("auto", sizes, kind, q.dtype, q.device, batch_invariant=invariant)
    ints = partial(torch.tensor, dtype=torch.int32, device="cuda")
    size = form.block_size
    lows = [(row, low) for low in reversed(range(0, length, size)) for row in range(rows)]
    blocks = ints([(row, row * length + low, low, min(size, length - low)) for row, low in lows] if prompts else [])
    index = ints(range(0 if prompts else rows))
    return lambda: form.run(
        q, cache, PagedRows(table, index, index, torch.full_like(index, length - 1), blocks.view(-1, 4))
    )


def in_graph(work: Callable[[], object], count: int = 5) -> float:
    """Microseconds, in a graph of some."""
    work()
    graph, begin, end = torch.cuda.CUDAGraph(), torch.cuda.Event(True), torch.cuda.Event(True)
    with torch.cuda.graph(graph):
        for _ in range(count):
            work()
    times = []
    for _ in range(4):
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return 1e3 * min(times) / count
