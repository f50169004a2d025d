"""Running a workload and timing it, through the public interface.

- Each run begins with an empty prefix cache, so that one run leaves nothing for the next.
- Beside the time on the clock stands the CPU time of the process: on a shared machine only both mean something.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

from perdure import LLM, SamplingParams
from perdure.cli.bench.report import Run
from perdure.cli.bench.workloads import Workload


@dataclass(frozen=True)
class Measured:
    """A run's numbers and what it generated."""

    run: Run
    ids: list[list[int]]


def measure(llm: LLM, workload: Workload) -> Measured:
    """One run. A request that fails raises its error."""
    params = [
        SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        for count in workload.new_tokens
    ]
    llm.reset_prefix_cache()
    cpu_start, start = time.process_time(), time.perf_counter()
    results = llm.generate(list(workload.prompts), params)
    seconds, cpu_seconds = time.perf_counter() - start, time.process_time() - cpu_start
    waits: list[float] = []
    for result in results:
        if result.error is not None:
            raise result.error
        times = result.metrics
        assert times is not None and times.first_token_time is not None
        waits.append(times.first_token_time - times.arrival_time)
    run = Run(
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        first_token_s=statistics.median(waits),
        last_first_token_s=max(waits),
        cached_prompt_tokens=sum(result.num_cached_tokens for result in results),
    )
    return Measured(run, [result.outputs[0].token_ids for result in results])
