"""Host time of one decode step: plan, pack and commit, in microseconds of CPU a row; and of the prefix cache, a prompt
token.

    python benchmarks/step_cost.py [--rows 256] [--steps 200]

Drives the real scheduler and the real packing with made-up tokens; no model runs. CPU time of the thread, best of 5.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from perdure.api import command as cmd
from perdure.api.config import CoreConfig
from perdure.api.event import Event
from perdure.api.plan import ScoreColumns, StepOutput, StepPlan
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.core.scheduler import Scheduler
from perdure.runner.inputs import pack
from perdure.runner.row_store import RowStore

PAGE_SIZE = 16
PROMPT = 64


class StepCost:
    """A full batch of decoding rows, timed part by part."""

    def __init__(self, num_rows: int, num_steps: int) -> None:
        self.num_rows = num_rows
        self.num_steps = num_steps
        max_len = PROMPT + num_steps + PAGE_SIZE
        max_pages = -(-max_len // PAGE_SIZE)
        config = CoreConfig(
            num_pages=num_rows * max_pages,
            page_size=PAGE_SIZE,
            max_model_len=max_len,
            max_num_seqs=num_rows,
            max_num_batched_tokens=num_rows * PROMPT,
            vocab_size=50_000,
            end_token_ids=(2,),
        )
        self.scheduler = Scheduler(config, _no_text)
        self.rows = RowStore(num_rows, max_pages, config.vocab_size)
        self.seconds = {"plan": 0.0, "pack": 0.0, "commit": 0.0}
        for i in range(num_rows):
            prompt = [(7 * i + j) % 49_999 + 1 for j in range(PROMPT)]
            params = SamplingParams(max_tokens=num_steps + PAGE_SIZE - 1)
            self.scheduler.apply(cmd.Submit(Request(i, i, prompt, params)))
        self._step()  # the prefill
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def run(self) -> dict[str, float]:
        """Microseconds of CPU a row, by part."""
        for _ in range(self.num_steps):
            self._step()
        return {part: 1e6 * s / (self.num_steps * self.num_rows) for part, s in self.seconds.items()}

    def _step(self) -> None:
        t0 = time.thread_time()
        plan = self.scheduler.plan()
        t1 = time.thread_time()
        assert plan is not None and len(plan.slot) == self.num_rows
        self.rows.apply(plan)
        packed = pack(plan, self.rows, PAGE_SIZE)
        packed = packed.padded(-(-len(packed.token_ids) // 8) * 8)
        self.rows.advance(packed.slots, packed.ends)
        t2 = time.thread_time()
        events = self._commit(plan)
        t3 = time.thread_time()
        assert not any(hasattr(event, "record") for event in events)
        for part, spent in zip(self.seconds, (t1 - t0, t2 - t1, t3 - t2), strict=True):
            self.seconds[part] += spent

    def _commit(self, plan: StepPlan) -> list[Event]:
        tokens = [(plan.step * 31 + row) % 49_999 + 3 for row in range(self.num_rows)]
        none = ScoreColumns.empty()
        return self.scheduler.commit(plan, StepOutput(plan.step, [1] * self.num_rows, tokens, none, none, []))


class PrefixCost:
    """Prompts that share nothing, in chunks, with every call of the prefix cache timed: to look, to be looked for, to
    publish, to reclaim what others published."""

    CALLS = ("find", "is_coming", "pages", "take_scores", "begin", "publish", "leave")

    def __init__(self, num_prompts: int, length: int) -> None:
        config = CoreConfig(
            num_pages=-(-2 * length // PAGE_SIZE),  # two prompts at once, and pages of those before are reclaimed
            page_size=PAGE_SIZE,
            max_model_len=length + 1,
            max_num_seqs=2,
            max_num_batched_tokens=512,
            vocab_size=50_000,
        )
        self.num_tokens = num_prompts * length
        self.scheduler = Scheduler(config, _no_text)
        self.seconds = 0.0
        cache = self.scheduler.requests.cache
        for name in self.CALLS:
            setattr(cache, name, self._timed(getattr(cache, name)))
        for i in range(num_prompts):
            prompt = [(31 * i + j) % 49_999 for j in range(length)]
            self.scheduler.apply(cmd.Submit(Request(i, i, prompt, SamplingParams(max_tokens=1))))

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            start = time.thread_time()
            try:
                return call(*args)
            finally:
                self.seconds += time.thread_time() - start

        return run

    def run(self) -> float:
        """Microseconds of CPU a prompt token."""
        none = ScoreColumns.empty()
        while (plan := self.scheduler.plan()) is not None:
            output = StepOutput(plan.step, plan.sample, [3] * sum(plan.sample), none, none, [])
            self.scheduler.commit(plan, output)
        counters = self.scheduler.stats()
        assert (
            counters.num_prompt_tokens == self.num_tokens
            and not counters.num_cached_tokens
            and not counters.num_waiting
        )
        return 1e6 * self.seconds / self.num_tokens


def measure_prefix(num_prompts: int = 16, length: int = 2_000, repeats: int = 5) -> float:
    return min(PrefixCost(num_prompts, length).run() for _ in range(repeats))


def _no_text(request: Request) -> object:
    raise AssertionError("no stop strings here")


def measure(num_rows: int = 256, num_steps: int = 200, repeats: int = 5) -> dict[str, float]:
    """The best of some repeats, by total."""
    runs = [StepCost(num_rows, num_steps).run() for _ in range(repeats)]
    return min(runs, key=lambda parts: sum(parts.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    parts = measure(args.rows, args.steps)
    print(f"{args.rows} decoding rows, best of 5, microseconds of CPU a row:")
    for part, value in parts.items():
        print(f"  {part:7} {value:6.2f}")
    print(f"  {'total':7} {sum(parts.values()):6.2f}")
    print(f"prefix cache without a hit, microseconds of CPU a prompt token: {measure_prefix():.2f}")


if __name__ == "__main__":
    main()
