"""sampling: what a step of 256 rows takes by what its rows ask, in the shape of Qwen3-0.6B (151,936 ids).

- A step of decoding: 256 prompts of 128 ids with 49 new tokens, less the same with one, shared out; median of three.
- A function is a logits processor that does nothing: what sampling on the host costs, measured on one step.
- "masks" are those of grammars: bits of every row put on the device and drawn with, without the step before and the
  grammars themselves.
- "draw" is that alone, of logits in bfloat16 that are not in the cache, in a graph: normal ones, with a spread of 3.
- What a step takes of the host is said beside each, prompts' steps counted in; of the dearest, which kernels it takes.
"""

from __future__ import annotations

import json
import statistics
import time
from functools import partial
from typing import Any

import numpy as np
import torch

from gpu_sections.attention import in_graph
from gpu_sections.jobs import ENGINE, QWEN3_06B, HostTime, equal_job, kernels
from gpu_sections.report import Found, Setup, close, workload
from perdure import LLM, SamplingParams

ROWS, NEW_TOKENS = 256, 49
ASKED: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k and top_p": {"top_k": 50, "top_p": 0.95},
    "penalties": {"repetition_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.1},
    "bias of 300 ids": {"logit_bias": {id_: 1.0 for id_ in range(0, 30_000, 100)}},
    "20 bad words of 3 ids": {"bad_words": [[id_, id_ + 1, id_ + 2] for id_ in range(20)]},
    "scores of the token": {"logprobs": 0},
    "scores of the 5 best": {"logprobs": 5},
    "scores of the 20 best": {"logprobs": 20},
    "processed scores of the 5 best": {"logprobs": 5, "logprobs_mode": "processed", "top_p": 0.95},
    "penalties and a function": {"frequency_penalty": 0.1, "logits_processors": [lambda ids, logits: logits]},
}  # fmt: skip
DRAWS: dict[str, dict[str, float]] = {
    "plain": {},
    "top_k and top_p": {"top_k": 50, "top_p": 0.95},
    "top_p": {"top_p": 0.95},
}
PROFILED = ("scores of the 20 best",)


def sampling(setup: Setup) -> Found:
    (setup.folder / "config.json").write_text(json.dumps(QWEN3_06B))
    prompts, _ = equal_job(ROWS, 128, 1, QWEN3_06B["vocab_size"])
    found: dict[str, Any] = {}
    llm = LLM(str(setup.folder), **ENGINE, max_num_seqs=ROWS)
    host = HostTime(llm)
    for name, asked in ASKED.items():
        on_host = "logits_processors" in asked
        new_tokens, repeats = (2, 1) if on_host else (NEW_TOKENS, 3)
        if not on_host:
            run(llm, prompts, 3, asked)  # warm-up
        host.reset()
        steps = [run(llm, prompts, new_tokens, asked) - run(llm, prompts, 1, asked) for _ in range(repeats)]
        more: dict[str, Any] = {"ms_of_host_a_step": host.a_step()}
        if setup.profile and name in PROFILED:
            more["kernels"], _ = kernels(partial(run, llm, prompts, 17, asked))
        value = round(1e3 * statistics.median(steps) / (new_tokens - 1), 3)
        found[f"step, {name}"] = workload(value, "ms", less_is_better=True, **more)
    close(llm)
    found["draw, masks"] = workload(round(masks(), 3), "ms", less_is_better=True)
    for rows in (1, 64, ROWS):
        for name, asked in DRAWS.items():
            found[f"draw, {rows} rows, {name}"] = workload(round(draw(rows, asked), 1), "us", less_is_better=True)
    return {"workloads": found}


def run(llm: LLM, prompts: list[list[int]], new_tokens: int, asked: dict[str, Any]) -> float:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=new_tokens, detokenize=False, **asked)
    begin = time.perf_counter()
    llm.generate(prompts, params)
    return time.perf_counter() - begin


def sample_settings(rows: int, **asked: float) -> Any:
    """Columns on the device of so many rows at temperature 0.6."""
    from perdure.runner.cuda.sample_columns import SampleColumns, num_sample_words

    words = np.zeros(num_sample_words(rows), np.int32)
    columns = SampleColumns.on_host(words, rows)
    columns.pad(rows)
    columns.temperature[:], columns.output_index[:], columns.forced[:] = 0.6, np.arange(rows), -1
    for name, value in asked.items():
        getattr(columns, name)[:] = value
    return SampleColumns.on_device(torch.from_numpy(words).cuda(), rows).settings()


def draw(rows: int, asked: dict[str, float]) -> float:
    """Microseconds."""
    from perdure.ops.triton.sampling import draw_tokens

    size = (rows, QWEN3_06B["vocab_size"])
    inputs = [torch.randn(size, device="cuda").mul_(3).bfloat16() for _ in range(max(2, min(16, ROWS // rows)))]
    settings = sample_settings(rows, **asked)
    tokens, codes, last = (torch.zeros(rows + 1, dtype=torch.int32, device="cuda") for _ in range(3))

    def draw_all() -> None:
        for logits in inputs:
            draw_tokens(logits, settings, tokens, codes, last)

    return in_graph(draw_all, 2) / len(inputs)


def masks() -> float:
    """Milliseconds to put masks of all rows on the device and to draw with them."""
    from perdure.ops.triton.sampling import draw_tokens

    vocab_size = QWEN3_06B["vocab_size"]
    logits = torch.randn(ROWS, vocab_size, device="cuda") * 3
    bits = torch.from_numpy(
        np.random.default_rng(0).integers(-(2**31), 2**31, (ROWS, vocab_size // 32)).astype(np.int32)
    )
    tokens, codes, last = (torch.zeros(ROWS + 1, dtype=torch.int32, device="cuda") for _ in range(3))
    settings = sample_settings(ROWS)
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        placed = bits.pin_memory().to("cuda", non_blocking=True)
        settings.masks.copy_(placed.data_ptr() + torch.arange(ROWS) * placed[0].nbytes)
        draw_tokens(logits, settings, tokens, codes, last)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times[2:])
