"""Host time of decoding: plan, pack and commit, in microseconds of CPU a row and token, one step at a time and in
bursts; and of the prefix cache, a prompt token.

    python benchmarks/step_cost.py [--rows 256] [--steps 192]

Drives the real scheduler and the real packing with made-up tokens; no model runs. "numbers": writing what a GPU is
sent, where Triton is installed; a CPU needs none. CPU time of the thread, best of 5.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from perdure.api import command as cmd
from perdure.api.config import CoreConfig
from perdure.api.event import Event
from perdure.api.plan import MOST_STEPS, ScoreColumns, StepOutput, StepPlan
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.core.scheduler import Scheduler
from perdure.runner.inputs import Ints, PackedStep, pack
from perdure.runner.row_store import RowStore

PAGE_SIZE = 16
PROMPT = 64


class StepCost:
    """A full batch of decoding rows, timed part by part. burst: steps of a plan; num_steps is a multiple of it."""

    def __init__(self, num_rows: int, num_steps: int, burst: int = 1) -> None:
        self.num_rows = num_rows
        self.num_steps = num_steps
        self.burst = burst
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
        self._numbers = _numbers_for(self.rows, burst) if find_spec("triton") else None
        parts = ("plan", "pack", "commit") if self._numbers is None else ("plan", "pack", "commit", "numbers")
        self.seconds = dict.fromkeys(parts, 0.0)
        for i in range(num_rows):
            prompt = [(7 * i + j) % 49_999 + 1 for j in range(PROMPT)]
            params = SamplingParams(max_tokens=num_steps + PAGE_SIZE - 1)
            self.scheduler.apply(cmd.Submit(Request(i, i, prompt, params)))
        self._step(1)  # the prefill
        self.seconds = dict.fromkeys(self.seconds, 0.0)

    def run(self) -> dict[str, float]:
        """Microseconds of CPU a row and token, by part."""
        for _ in range(self.num_steps // self.burst):
            self._step(self.burst)
        return {part: 1e6 * s / (self.num_steps * self.num_rows) for part, s in self.seconds.items()}

    def _step(self, burst: int) -> None:
        t0 = time.thread_time()
        plan = self.scheduler.plan(burst)
        t1 = time.thread_time()
        assert plan is not None and len(plan.slot) == self.num_rows and plan.num_steps == burst
        self.rows.apply(plan)
        packed = pack(plan, self.rows, PAGE_SIZE)
        padded = packed.padded(-(-len(packed.token_ids) // 8) * 8)
        self.rows.advance(padded.slots, padded.ends + burst - 1)
        t2 = time.thread_time()
        events = self._commit(plan, burst)
        t3 = time.thread_time()
        if self._numbers is not None and not plan.tokens:
            self._numbers(packed, np.array(plan.length))
        t4 = time.thread_time()
        assert not any(hasattr(event, "record") for event in events)
        for part, spent in zip(self.seconds, (t1 - t0, t2 - t1, t3 - t2, t4 - t3)):  # the last may be nobody's
            self.seconds[part] += spent

    def _commit(self, plan: StepPlan, burst: int) -> list[Event]:
        tokens = [(plan.step * 31 + at) % 49_990 + 3 for at in range(burst * self.num_rows)]
        none = ScoreColumns.empty()
        return self.scheduler.commit(plan, StepOutput(plan.step, [burst] * self.num_rows, tokens, none, none, []))


def _numbers_for(rows: RowStore, burst: int) -> Callable[[PackedStep, Ints], None]:
    """What writes the numbers of so many steps, as a GPU is sent them."""
    from perdure.runner.cuda.bursts import Burst, Bursts
    from perdure.runner.cuda.sampler import DeviceSampler, filter_of
    from perdure.runner.cuda.step import StepSize
    from perdure.runner.grammars import Grammars
    from perdure.runner.masks import Masks

    num_rows, vocab_size = len(rows.request), rows.adjustments.vocab_size
    masks = Masks(Grammars(None, vocab_size, ()), vocab_size)
    sampler = DeviceSampler(rows, masks, vocab_size, 1, torch.device("cpu"), filter_of("auto"))
    size = StepSize(num_rows, num_rows, 0, num_rows)
    bursts = Bursts(rows, sampler, PAGE_SIZE, size)
    words = np.zeros((burst, size.num_words), np.int32)
    return lambda step, lengths: bursts.fill(words, size, Burst(step, lengths))


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


def measure(num_rows: int = 256, num_steps: int = 192, repeats: int = 5, burst: int = 1) -> dict[str, float]:
    """The best of some repeats, by total."""
    runs = [StepCost(num_rows, num_steps, burst).run() for _ in range(repeats)]
    return min(runs, key=lambda parts: sum(parts.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--steps", type=int, default=192, help="of each row; a multiple of 16")
    args = parser.parse_args()
    print(f"{args.rows} decoding rows, best of 5, microseconds of CPU a row and token:")
    for burst in (1, 4, MOST_STEPS):
        parts = measure(args.rows, args.steps, burst=burst)
        words = "  ".join(f"{part} {value:.2f}" for part, value in parts.items())
        print(f"  bursts of {burst:2}: {words}  total {sum(parts.values()):.2f}")
    print(f"prefix cache without a hit, microseconds of CPU a prompt token: {measure_prefix():.2f}")


if __name__ == "__main__":
    main()
