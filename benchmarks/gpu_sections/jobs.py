"""nano, q1, b1, b64, b256: whole jobs of models with random weights, against what the hardware allows.

- nano: 256 prompts of 100 to 1,024 ids and as many new tokens, in the shape of Qwen3-0.6B. q1: one prompt of 128 ids
  in that shape with 512 new tokens. b1, b64, b256: so many prompts of 128, 512, 1,024 ids in the shape of Llama-3.1-8B,
  with 512, 256, 256 new tokens. A step of decoding is the whole job less the same prompts with one new token, shared
  out.
- b64-fp8: the same with weights of 8 bits; b256-fp8: with pages of 8 bits, too. No floor: what bf16 needs is none.
- All draw at temperature 0.6, do not stop at end ids, read no cached prefix and take and give ids.
- "without bursts": the same one step a plan (`max_burst_ms=0`).
- How long the GPU waits for the host before each step is seen in nano, all of it, by events on its stream.
- "invariant": the same with `batch_invariant`; what that costs is seen beside the others of the same run.
- A start reads no weights, as these are drawn: `benchmarks/start.py` has one that does.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.autograd import DeviceType

from gpu_sections.report import Found, Setup, close, workload
from perdure import LLM, SamplingParams

QWEN3_06B = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072,
    "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "tie_word_embeddings": True, "hidden_act": "silu", "use_sliding_window": False, "dtype": "bfloat16",
}  # fmt: skip
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "vocab_size": 128256, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "tie_word_embeddings": False, "hidden_act": "silu", "dtype": "bfloat16",
}  # fmt: skip
ENGINE: dict[str, Any] = {
    "device": "cuda", "load_format": "dummy", "batch_invariant": False, "enable_prefix_caching": False,
    "max_model_len": 2048, "steps_in_flight": 2,
}  # fmt: skip
OUTPUT, DECODE = "output tokens/s", "decode tokens/s"
FIGURES: dict[str, dict[str, Any]] = {
    "nano": {"unit": OUTPUT, "floor": 36_200, "gate": 24_500, "goal": 28_000},
    "q1": {"unit": DECODE, "floor": 3_455, "gate": 850, "goal": 1_000},
    "b1": {"unit": DECODE, "floor": 284, "gate": 215, "goal": 230},
    "b64": {"unit": OUTPUT, "floor": 9_070, "gate": 6_850, "goal": 7_100},
    "b256": {"unit": OUTPUT, "floor": 8_225, "gate": 6_400, "goal": 6_700},
    "b64-fp8": {"unit": OUTPUT},
    "b256-fp8": {"unit": OUTPUT},
    "prefill": {"unit": "prompt tokens/s", "floor": 55_000, "gate": 45_000, "goal": 47_000},
    "nano without bursts": {"unit": OUTPUT, "floor": 36_200, "gate": 24_500, "goal": 28_000},
    "nano invariant": {"unit": OUTPUT, "floor": 36_200},
    "b64 invariant": {"unit": OUTPUT, "floor": 9_070, "gate": 5_900},
    "b256 invariant": {"unit": OUTPUT, "floor": 8_225},
}
MOST_COST, GOOD_COST = 15.0, 10.0  # percent of b64's and b256's tokens a second that `batch_invariant` may take
MOST_WAITING = 5.0  # percent of a step of nano that the GPU may wait for the host

Ids = list[list[int]]


def settings(new_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=new_tokens, detokenize=False)


def nano_job() -> tuple[Ids, list[int]]:
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    return prompts, [random.randint(100, 1024) for _ in range(256)]


def equal_job(count: int, length: int, new_tokens: int, vocab_size: int) -> tuple[Ids, list[int]]:
    draw = random.Random(count)
    return [[draw.randrange(vocab_size) for _ in range(length)] for _ in range(count)], [new_tokens] * count


JOBS: dict[str, tuple[dict[str, Any], Callable[[], tuple[Ids, list[int]]], dict[str, Any]]] = {
    "nano": (QWEN3_06B, nano_job, {"max_num_seqs": 256, "max_num_batched_tokens": 16384}),
    "q1": (QWEN3_06B, lambda: equal_job(1, 128, 512, 151936), {"max_num_seqs": 1}),
    "b1": (LLAMA_8B, lambda: equal_job(1, 128, 512, 128256), {"max_num_seqs": 1}),
    "b64": (LLAMA_8B, lambda: equal_job(64, 512, 256, 128256), {"max_num_seqs": 64}),
    "b256": (LLAMA_8B, lambda: equal_job(256, 1024, 256, 128256), {"max_num_seqs": 256}),
    "b64-fp8": (LLAMA_8B, lambda: equal_job(64, 512, 256, 128256), {"max_num_seqs": 64, "quantization": "fp8"}),
    "b256-fp8": (
        LLAMA_8B,
        lambda: equal_job(256, 1024, 256, 128256),
        {"max_num_seqs": 256, "quantization": "fp8", "kv_cache_dtype": "fp8"},
    ),
}
JOBS |= {
    f"{name} invariant": (shape, make, config | {"batch_invariant": True})
    for name, (shape, make, config) in JOBS.items()
    if name in ("nano", "b64", "b256")
}
JOBS["nano without bursts"] = (QWEN3_06B, nano_job, JOBS["nano"][2] | {"max_burst_ms": 0})
A_STEP: dict[str, dict[str, float]] = {
    "b64": {"floor": 4.77, "gate": 6.5, "goal": 6.2},
    "b256": {"floor": 12.6, "gate": 17.3, "goal": 16.5},
}
"""Milliseconds of a step of decoding."""
PROFILED = ("nano", "b64", "b256", "b256 invariant")
WATCHED = ("nano", "nano without bursts")  # how long they wait for the host


class HostTime:
    """Seconds that the loop's thread spends planning, launching, waiting and committing; steps of the device, and how
    many plans they came in."""

    def __init__(self, llm: LLM) -> None:
        engine = llm._engine
        self.seconds = dict.fromkeys(("plan", "launch", "wait", "commit"), 0.0)
        self.steps = self.plans = 0
        loop, runner = engine._loop, engine.resolved.runner
        loop.scheduler.plan = self._timed("plan", loop.scheduler.plan)
        loop.scheduler.commit = self._timed("commit", loop.scheduler.commit)
        launch = self._timed("launch", runner.launch)

        def launched(plan: Any) -> Any:
            self.steps += plan.num_steps
            self.plans += 1
            ticket = launch(plan)
            ticket.wait = self._timed("wait", ticket.wait)
            return ticket

        runner.launch = launched

    def _timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments)
            finally:
                self.seconds[name] += time.perf_counter() - begin

        return timed

    def reset(self) -> None:
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        self.steps = self.plans = 0

    def a_step(self) -> dict[str, float]:
        """Milliseconds."""
        return {name: round(1e3 * seconds / max(1, self.steps), 3) for name, seconds in self.seconds.items()}


def run_job(llm: LLM, prompts: Ids, new_tokens: list[int]) -> float:
    begin = time.perf_counter()
    outputs = llm.generate(prompts, [settings(count) for count in new_tokens])
    seconds = time.perf_counter() - begin
    assert [len(output.outputs[0].token_ids) for output in outputs] == new_tokens
    return seconds


def watched(run: Callable[[], object]) -> list[Any]:
    """What the GPU did meanwhile, as the profiler's events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
    return [one for one in profile.profiler.kineto_results.events() if one.device_type() == DeviceType.CUDA]


def table(events: list[Any], parts: int) -> list[str]:
    """Where a GPU's time goes: microseconds of one of so many parts, calls, name."""
    found: dict[str, tuple[float, int]] = {}
    for one in events:
        us, count = found.get(one.name(), (0.0, 0))
        found[one.name()] = us + one.duration_ns() / 1e3, count + 1
    ranked = sorted(found.items(), key=lambda item: -item[1][0])
    busy = sum(us for us, _ in found.values())
    rows = [f"{us / parts:9.1f} {count / parts:6.1f} {name[:90]}" for name, (us, count) in ranked[:20]]
    return [f"{busy / parts:9.1f}        all kernels", *rows]


def kernels(run: Callable[[], object]) -> tuple[list[str], list[str]]:
    """Of a job's steps after the last with prompts, one of them on average, and of all before."""
    events = sorted(watched(run), key=lambda one: one.start_ns())
    last_prompt = max(at for at, one in enumerate(events) if "_prompt_kernel" in one.name())
    draws = [at for at, one in enumerate(events) if one.name() == "_draw_kernel" and at > last_prompt]
    first, last = draws[0] + 1, draws[-1] + 1
    return table(events[first:last], len(draws) - 1), table(events[:first], 1)


class HostClock:
    """When events of the device were reached, in seconds of `time.perf_counter`: at the earliest, by some 20 us."""

    def __init__(self) -> None:
        self._first, self._begin = self._now()

    @staticmethod
    def _now() -> tuple[torch.cuda.Event, float]:
        torch.cuda.synchronize()
        event, begin = torch.cuda.Event(enable_timing=True), time.perf_counter()
        event.record()
        event.synchronize()
        return event, begin

    def end(self) -> None:
        """Nothing more will be asked about than what was recorded by now."""
        last, end = self._now()
        self._pace = (end - self._begin) / self._first.elapsed_time(last)

    def __call__(self, event: torch.cuda.Event) -> float:
        return self._begin + self._first.elapsed_time(event) * self._pace


class Steps:
    """When parts of steps were launched, and when the device was done with them: a step in a graph is one part, of
    others each layer's attention begins one. In a part, the device may have waited for the host from the end of the
    part before until this one was launched whole: not at all where that came first."""

    def __init__(self, llm: LLM, most: int) -> None:
        """most: parts there may be. Their events are made before, which takes the driver milliseconds at a time."""
        self._runner = llm._engine.resolved.runner
        self._forms = {*self._runner._forms.values()}
        self._compute = self._runner._compute_words
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(most)]
        for event in self._events:
            event.record()
        self._parts: list[tuple[torch.cuda.Event, float]] = []
        self._ends: list[int] = []

    def __enter__(self) -> Steps:
        self._clock = HostClock()
        self._runner._compute_words = self._computed
        for form in self._forms:
            form.attend = partial(self._attended, form.attend)
        return self

    def __exit__(self, *_: object) -> None:
        self._clock.end()
        del self._runner._compute_words
        for form in self._forms:
            del form.attend

    def _mark(self) -> None:
        """The end of a part."""
        event = self._events.pop()
        event.record()
        self._parts.append((event, time.perf_counter()))

    def _attended(self, attend: Callable[..., Any], *arguments: Any) -> Any:
        self._mark()
        return attend(*arguments)

    def _computed(self, size: Any, *arguments: Any) -> Any:
        self._mark()  # what is copied there before is a part, too
        outputs = self._compute(size, *arguments)
        self._mark()
        self._ends.append(len(self._parts) - 1)
        return outputs

    def waits(self) -> list[tuple[float, float, float]]:
        """Of each step, in milliseconds: what it may have waited, how long it took from the end of the one before (of
        the first: from its own begin), and by how much it was launched whole before it could begin (negative: later).
        """
        reached = [self._clock(event) for event, _ in self._parts]
        launched = [when for _, when in self._parts]
        parts = [
            max(0.0, min(at, when) - before)
            for before, at, when in zip(reached, reached[1:], launched[1:], strict=False)
        ]
        return [
            (1e3 * sum(parts[low:high]), 1e3 * (reached[high] - reached[low]), 1e3 * (reached[low] - launched[high]))
            for low, high in pairwise([0, *self._ends])
        ]


def waiting_for_host(llm: LLM, run: Callable[[], object], most_parts: int, gate: float | None) -> dict[str, Any]:
    """The most percent of a step in which the GPU had nothing to do but to wait for the host. Beside it: of all steps
    but the first how many waited longer than MOST_WAITING percent; of the first 50 that waited at all their number,
    milliseconds that they waited, those from the end of the step before to its own; by how many milliseconds a step
    was launched before it could begin, at least. The first step is apart: nothing can have been launched before it, so
    it waits for its own first kernels."""
    with Steps(llm, most_parts) as steps:
        run()
    (first_wait, first_whole, _), *others = steps.waits()
    percents = [100 * wait / whole for wait, whole, _ in others]
    return workload(
        round(max(percents), 2),
        "percent of a step, at most",
        gate=gate,
        less_is_better=True,
        of_all=round(100 * sum(wait for wait, *_ in others) / sum(whole for _, whole, _ in others), 3),
        steps=len(others),
        steps_over_5_percent=sum(percent > MOST_WAITING for percent in percents),
        steps_that_wait=[[at, round(wait, 3), round(whole, 3)] for at, (wait, whole, _) in enumerate(others) if wait][
            :50
        ],
        least_lead_ms=round(min(lead for *_, lead in others), 3),
        first_step=[round(first_wait, 3), round(first_whole, 3)],
    )


def costs(workloads: dict[str, Any]) -> dict[str, Any]:
    """What `batch_invariant` takes of b64's and b256's tokens a second, both of one run."""
    found = {}
    for name in ("b64", "b256"):
        one, other = workloads.get(name), workloads.get(f"{name} invariant")
        if one and other:
            percent = round(100 * (1 - other["value"] / one["value"]), 1)
            found[f"{name}, cost of invariance"] = workload(
                percent, "percent", gate=MOST_COST, goal=GOOD_COST, less_is_better=True
            )
    return found


def job(name: str, setup: Setup) -> Found:
    """One of `JOBS`; b256 gives `prefill`, too."""
    shape, make, config = JOBS[name]
    prompts, new_tokens = make()
    (setup.folder / "config.json").write_text(json.dumps(shape))
    begin = time.perf_counter()
    llm = LLM(str(setup.folder), **(ENGINE | config))
    ready = time.perf_counter() - begin
    host = HostTime(llm)
    run_job(llm, prompts, [min(count, 16) for count in new_tokens])  # warm-up
    host.reset()
    seconds = run_job(llm, prompts, new_tokens)
    more: dict[str, Any] = {
        "seconds": round(seconds, 3),
        "steps": host.steps,
        "plans": host.plans,
        "ms_of_host_a_step": host.a_step(),
    }
    value = sum(new_tokens) / seconds
    prefill_rate = 0.0
    if not name.startswith("nano"):
        repeats = 1 if len(prompts) == 256 else 3  # the longest takes seconds
        prefill = statistics.median(run_job(llm, prompts, [1] * len(prompts)) for _ in range(repeats))
        step, prefill_rate = (seconds - prefill) / (new_tokens[0] - 1), sum(map(len, prompts)) / prefill
        more |= {"prefill_tokens_per_s": round(prefill_rate), "ms_a_step": round(1e3 * step, 3)}
        value = 1 / step if FIGURES[name]["unit"] == DECODE else value
    more["description"] = {k: v for k, v in llm.describe().items() if k in ("cuda_graphs", "pool", "kernels")}
    found = {}
    of_prompts: dict[str, list[str]] = {}
    if setup.profile and name in WATCHED:  # before a profiler was there, which slows launches down ever after
        # Without bursts a step of few rows takes the GPU no longer than the host needs for one.
        gate = None if config.get("max_burst_ms") == 0 else MOST_WAITING
        found[f"{name}, waiting for the host"] = waiting_for_host(
            llm, lambda: run_job(llm, prompts, new_tokens), 4 * max(new_tokens), gate
        )
    if setup.profile and name in PROFILED:
        more["kernels"], of_prompts["kernels"] = kernels(lambda: run_job(llm, prompts, [33] * len(prompts)))
    close(llm)
    more["job"] = {
        "shape": shape["architectures"][0], "prompts": len(prompts), "prompt_tokens": sum(map(len, prompts)),
        "output_tokens": sum(new_tokens), "temperature": settings(1).temperature, **ENGINE, **config,
    }  # fmt: skip
    found[name] = workload(round(value, 1), **FIGURES[name], **more)
    if name == "b256":
        found["prefill"] = workload(round(prefill_rate), **FIGURES["prefill"], **of_prompts)
    if name in A_STEP:
        found[f"{name}, a step"] = workload(more["ms_a_step"], "ms", less_is_better=True, **A_STEP[name])
    found[f"start {name}"] = workload(round(ready, 1), "s to ready", gate=40, goal=30, less_is_better=True)
    return {"workloads": found}
