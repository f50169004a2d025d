"""serving: requests that arrive one by one, at 70 % of what the engine can do: how long each waits for its first token
and for those after it.

64 requests of 512 ids with 256 new tokens, in the shape of Llama-3.1-8B, by a Poisson process. What the engine can do
and how long a step of all 64 is are measured just before, in the same process, with all at once: a step is what a token
took of the one for which it took least, since others had their prompts computed beside them.

The engine has its own settings but for `ENGINE`: random weights, no prefix cache, 2,048 tokens a request.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpu_sections.jobs import ENGINE, LLAMA_8B, Ids, equal_job, settings
from gpu_sections.report import Found, Setup, workload
from perdure import AsyncLLM

COUNT, PROMPT_TOKENS, NEW_TOKENS = 64, 512, 256
SHARE = 0.7  # of what it can do
WARM_UP = 20.0  # requests a second
MOST_TTFT_MS, MOST_TPOT = 250.0, 1.6  # the latter in steps of all 64

Times = NDArray[np.float64]


async def _one(llm: AsyncLLM, prompt: list[int], new_tokens: int, at: float) -> tuple[float, float, float]:
    """When it was submitted, had its first token, and its last."""
    await asyncio.sleep(max(0.0, at - time.perf_counter()))
    submitted, first = time.perf_counter(), 0.0
    async for part in llm.submit(prompt, settings(new_tokens)):
        if not first and part.outputs and part.outputs[0].token_ids:
            first = time.perf_counter()
    return submitted, first, time.perf_counter()


async def _all(llm: AsyncLLM, prompts: Ids, new_tokens: int, a_second: float | None = None) -> tuple[Times, float]:
    """The times of each [n, 3], and the seconds that all took. a_second: arrivals; None = at once."""
    draw, at, arrivals = random.Random(7), 0.0, []
    for _ in prompts:
        arrivals.append(at)
        at += draw.expovariate(a_second) if a_second else 0.0
    begin = time.perf_counter()
    times = await asyncio.gather(*(_one(llm, prompt, new_tokens, begin + at) for prompt, at in zip(prompts, arrivals)))
    return np.array(times), time.perf_counter() - begin


def _a_token(times: Times) -> Times:
    """Seconds from the first token to the last, by token after the first."""
    seconds: Times = (times[:, 2] - times[:, 1]) / (NEW_TOKENS - 1)
    return seconds


async def _measured(folder: str) -> tuple[float, float, Times, str]:
    """Arrivals a second, seconds of a step of all, the times of each, the graphs in words."""
    prompts, _ = equal_job(COUNT, PROMPT_TOKENS, NEW_TOKENS, LLAMA_8B["vocab_size"])
    async with AsyncLLM(folder, **ENGINE, max_num_seqs=COUNT) as llm:
        await _all(llm, prompts, 16)
        await _all(llm, prompts, 16, WARM_UP)
        at_once, whole_s = await _all(llm, prompts, NEW_TOKENS)
        a_second = SHARE * COUNT / whole_s
        times, _ = await _all(llm, prompts, NEW_TOKENS, a_second)
        return a_second, float(_a_token(at_once).min()), times, llm.describe()["cuda_graphs"]


def serving(setup: Setup) -> Found:
    (setup.folder / "config.json").write_text(json.dumps(LLAMA_8B))
    a_second, step_s, times, graphs = asyncio.run(_measured(str(setup.folder)))
    to_first_ms, steps = 1e3 * (times[:, 1] - times[:, 0]), _a_token(times) / step_s
    more = {
        "requests_a_second": round(a_second, 2),
        "ms_a_step_of_64": round(1e3 * step_s, 2),
        "cuda_graphs": graphs,
    }

    def spread(values: Times, unit: str, gate: float) -> dict[str, Any]:
        middle, most = round(float(np.median(values)), 2), round(float(values.max()), 2)
        p99 = round(float(np.percentile(values, 99)), 2)
        return workload(p99, unit, gate=gate, less_is_better=True, median=middle, most=most, **more)

    return {
        "workloads": {
            "serving, TTFT p99": spread(to_first_ms, "ms", MOST_TTFT_MS),
            "serving, TPOT p99": spread(steps, "steps of 64", MOST_TPOT),
        }
    }
