"""wake: how long an engine with a pool of 8 GB takes to run again after each way of suspending it."""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from gpu_sections.jobs import ENGINE, QWEN3_06B, settings
from gpu_sections.report import Found, Setup, close, workload
from perdure import LLM

POOL_BYTES = 8 << 30
PROMPT_TOKENS = 1008  # whole pages, all of which stay cached
REPEATS = 3


def wake(setup: Setup) -> Found:
    """The pool is full of cached prompts, which `offload` and `persist` keep. What `offload` costs is held to one copy
    of as many bytes from pinned memory."""
    (setup.folder / "config.json").write_text(json.dumps(QWEN3_06B))
    config = {**ENGINE, "enable_prefix_caching": True, "max_num_seqs": 64, "max_num_batched_tokens": 16384}
    llm = LLM(str(setup.folder), kv_cache_bytes=POOL_BYTES, **config)
    prompts, num_pages = _fill(llm)
    page_bytes = llm._engine.resolved.page_bytes
    plain = _plain_copy(num_pages * page_bytes)
    before = llm.generate(prompts[:1], settings(1))[0]

    found: dict[str, Any] = {}
    seconds: dict[str, list[float]] = {"suspend": [], "resume": []}
    for _ in range(REPEATS):
        free = torch.cuda.mem_get_info()[0]
        seconds["suspend"].append(_timed(lambda: llm.suspend(kv="offload")))
        released = torch.cuda.mem_get_info()[0] - free
        seconds["resume"].append(_timed(llm.resume))
    resumed = statistics.median(seconds["resume"])
    after = llm.generate(prompts[:1], settings(1))[0]
    assert after.num_cached_tokens == before.num_cached_tokens > 0
    found["wake from offload"] = workload(
        round(resumed / plain, 3),
        "times a copy from pinned memory",
        floor=1,
        gate=1.3,
        less_is_better=True,
        seconds={name: [round(one, 3) for one in each] for name, each in seconds.items()},
        copy_s=round(plain, 4),
        num_bytes=num_pages * page_bytes,
        bytes_given_to_the_driver=released,
    )
    persisted = []
    for _ in range(REPEATS):
        llm.suspend(kv="persist")
        persisted.append(1e3 * _timed(llm.resume))
    found["wake from persist"] = workload(
        round(statistics.median(persisted), 2), "ms", gate=50, less_is_better=True, ms=[round(x, 2) for x in persisted]
    )
    close(llm)
    return {"workloads": found}


def _fill(llm: LLM) -> tuple[list[list[int]], int]:
    """Prompts that fill the pool but for less than one, and how many pages they take."""
    draw = random.Random(0)
    stats = llm.stats()
    pages = PROMPT_TOKENS // llm._engine.resolved.core.page_size
    count = stats.num_pages // pages - 1
    prompts = [[draw.randrange(1000) for _ in range(PROMPT_TOKENS)] for _ in range(count)]
    llm.generate(prompts, settings(1))
    return prompts, count * pages


def _plain_copy(num_bytes: int) -> float:
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    device.copy_(host)
    return statistics.median(_timed(lambda: device.copy_(host, non_blocking=True)) for _ in range(REPEATS))


def _timed(action: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    action()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
