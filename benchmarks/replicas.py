"""Two replicas on one machine against one engine with all its threads: start, throughput, warm prefixes, shutdown.

python benchmarks/replicas.py [--model M] [--requests 32] [--tokens 64] [--repeat 3] [--json FILE]

Both compute the same requests in turns, in one session: a ratio says something on a busy machine too, a time on the
clock only on an idle one. Prompt tokens that were computed are counted by the engines.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from perdure import LLM, SamplingParams

Traffic = dict[str, float]
NUM_CONVERSATIONS, NUM_TURNS = 8, 10
THOUGHT_S = 0.4
"""Between an answer and the next turn."""


def prompts(count: int, shortest: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(rng.randint(shortest, longest))] for _ in range(count)]


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)


def cpu_seconds(pids: list[int]) -> float:
    """Of these processes so far, and of this one."""
    tasks = [task for pid in pids for task in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return time.process_time() + sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def tokens_a_second(llm: LLM, wanted: list[list[int]], num_tokens: int) -> tuple[float, float]:
    """By the clock, and by CPU time of all processes."""
    fleet = getattr(llm._engine, "fleet", None)
    pids = [] if fleet is None else [child.process.pid for child in fleet.children]
    llm.reset_prefix_cache()
    began, cpu_began = time.perf_counter(), cpu_seconds(pids)
    results = llm.generate(wanted, greedy(num_tokens))
    seconds, cpu_s = time.perf_counter() - began, cpu_seconds(pids) - cpu_began
    assert all(len(result.outputs[0].token_ids) == num_tokens for result in results)
    return len(wanted) * num_tokens / seconds, len(wanted) * num_tokens / cpu_s


def prompt_tokens_computed(llm: LLM, num_new: int, num_answered: int, seed: int = 0) -> int:
    """Conversations that go on by turns, each turn of all together: what of their prompts was not found in a cache."""
    llm.reset_prefix_cache()
    texts = prompts(NUM_CONVERSATIONS, num_new, num_new, llm.vocab_size, seed)
    computed = 0
    for turn in range(NUM_TURNS):
        results = llm.generate(texts, greedy(num_answered))
        computed += sum(len(ids) - result.num_cached_tokens for ids, result in zip(texts, results))
        added = prompts(NUM_CONVERSATIONS, num_new, num_new, llm.vocab_size, seed + turn + 1)
        texts = [[*ids, *result.outputs[0].token_ids, *new] for ids, result, new in zip(texts, results, added)]
        time.sleep(THOUGHT_S)
    return computed


def start_and_stop(model: str | None, num_replicas: int) -> Traffic:
    """From nothing to the first token, and back to nothing; and the CPU time of all children until then."""
    began = time.perf_counter()
    llm = LLM(model, data_parallel_size=num_replicas)
    serves = time.perf_counter()
    llm.generate([[1, 2, 3]], greedy(1))
    answered = time.perf_counter()
    processes = [child.process for child in llm._engine.fleet.children]  # type: ignore[attr-defined]
    cpu_s = cpu_seconds([process.pid for process in processes]) - time.process_time()
    llm.shutdown()
    ended = time.perf_counter()
    assert all(process.returncode is not None for process in processes)
    return {
        "serves_s": serves - began,
        "first_token_s": answered - began,
        "shutdown_s": ended - answered,
        "children_cpu_s": cpu_s,
    }


def middle(rates: list[tuple[float, float]], by: int) -> float:
    return statistics.median(rate[by] for rate in rates)


def measure(model: str | None, num_requests: int, num_tokens: int, repeat: int) -> dict[str, Any]:
    num_threads = len(os.sched_getaffinity(0))
    torch.set_num_threads(num_threads)
    starts = [start_and_stop(model, 2) for _ in range(repeat)]
    one, two = LLM(model), LLM(model, data_parallel_size=2)
    try:
        wanted = prompts(num_requests, 32, 128, one.vocab_size, seed=7)
        rates: dict[str, list[tuple[float, float]]] = {"one": [], "two": []}
        for turn in range(repeat + 1):
            for name, llm in (("one", one), ("two", two)):
                rate = tokens_a_second(llm, wanted, num_tokens)
                if turn:  # the first warms up
                    rates[name].append(rate)
        computed = {name: prompt_tokens_computed(llm, 24, 16) for name, llm in (("one", one), ("two", two))}
    finally:
        two.shutdown()
        one.shutdown()
        gc.collect()
    return {
        "threads": num_threads,
        "starts": starts,
        "tokens_a_second": rates,
        "ratio": middle(rates["two"], 0) / middle(rates["one"], 0),
        "ratio_by_cpu": middle(rates["two"], 1) / middle(rates["one"], 1),
        "prompt_tokens_computed": computed,
        "computed_ratio": computed["two"] / computed["one"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model")
    for name, value in (("requests", 32), ("tokens", 64), ("repeat", 3)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = measure(args.model, args.requests, args.tokens, args.repeat)
    for start in found["starts"]:
        print(
            f"two replicas serve after {start['serves_s']:.1f} s, first token after {start['first_token_s']:.1f}, "
            f"gone within {start['shutdown_s']:.2f}"
        )
    one, two = (middle(found["tokens_a_second"][name], 0) for name in ("one", "two"))
    print(
        f"one engine, {found['threads']} threads: {one:.0f} tokens/s; two replicas: {two:.0f}; times: "
        f"{found['ratio']:.3f} by the clock, {found['ratio_by_cpu']:.3f} by CPU time"
    )
    computed = found["prompt_tokens_computed"]
    print(
        f"{NUM_CONVERSATIONS} conversations of {NUM_TURNS} turns: {computed['one']} prompt tokens computed by one "
        f"engine, {computed['two']} by two replicas: {found['computed_ratio']:.3f}"
    )
    if args.json is not None:
        about = {"date": time.strftime("%Y-%m-%d"), "python": platform.python_version(), "torch": torch.__version__}
        workload = {"model": args.model or "SmolLM2-135M-Instruct", "requests": args.requests, "tokens": args.tokens}
        args.json.write_text(json.dumps({**about, "workload": workload, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
