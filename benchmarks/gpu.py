"""The engine on a GPU: whole jobs of models with random weights, against what the hardware allows, and where time goes.

    python benchmarks/gpu.py [--only tests,parity,nano,b1,b64,b256] [--profile] [--json FILE]

- nano: 256 prompts of 100 to 1,024 ids and as many new tokens, in the shape of Qwen3-0.6B. b1, b64, b256: so many
  prompts of 128, 512, 1,024 ids in the shape of Llama-3.1-8B, with 512, 256, 256 new tokens; a step of decoding is the
  whole job less the same prompts with one new token, shared out.
- All draw at temperature 0.6, do not stop at end ids, read no cached prefix and take and give ids.
- tests: what tests/cuda shows, a row or case a line. parity: logits of a small model in float32 and bfloat16 against
  transformers on the same device.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton

from perdure import LLM, SamplingParams
from perdure.models.tiny import make_tiny

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
FLOORS = {"nano": 36200.0, "b1": 284.0, "b64": 9070.0, "b256": 8225.0}
GATES = {"nano": 18000.0, "b1": 190.0, "b64": 6200.0, "b256": 5700.0}
UNITS = {"nano": "output tokens/s", "b1": "decode tokens/s", "b64": "output tokens/s", "b256": "output tokens/s"}

ROOT = Path(__file__).parents[1]

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
    "b1": (LLAMA_8B, lambda: equal_job(1, 128, 512, 128256), {"max_num_seqs": 1}),
    "b64": (LLAMA_8B, lambda: equal_job(64, 512, 256, 128256), {"max_num_seqs": 64}),
    "b256": (LLAMA_8B, lambda: equal_job(256, 1024, 256, 128256), {"max_num_seqs": 256}),
}


class HostTime:
    """Seconds that the loop's thread spends planning, launching, waiting and committing."""

    def __init__(self, llm: LLM) -> None:
        engine = llm._engine
        self.seconds = dict.fromkeys(("plan", "launch", "wait", "commit"), 0.0)
        self.steps = 0
        loop, runner = engine._loop, engine.resolved.runner
        loop.scheduler.plan = self._timed("plan", loop.scheduler.plan)
        loop.scheduler.commit = self._timed("commit", loop.scheduler.commit)
        launch = self._timed("launch", runner.launch)

        def launched(plan: Any) -> Any:
            self.steps += 1
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
        self.steps = 0

    def a_step(self) -> dict[str, float]:
        """Milliseconds."""
        return {name: round(1e3 * seconds / max(1, self.steps), 3) for name, seconds in self.seconds.items()}


def run_job(llm: LLM, prompts: Ids, new_tokens: list[int]) -> float:
    begin = time.perf_counter()
    outputs = llm.generate(prompts, [settings(count) for count in new_tokens])
    seconds = time.perf_counter() - begin
    assert [len(output.outputs[0].token_ids) for output in outputs] == new_tokens
    return seconds


def kernels(llm: LLM, prompts: Ids, steps: int) -> list[str]:
    """Where a GPU's time goes in a step of decoding: microseconds a step, calls a step, name."""
    found: dict[str, list[float]] = {}
    for sign, new_tokens in ((1, steps + 1), (-1, 1)):  # the same with the prompts alone is taken off
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            run_job(llm, prompts, [new_tokens] * len(prompts))
        for one in profile.key_averages():
            total = found.setdefault(one.key, [0.0, 0.0])
            total[0] += sign * one.self_device_time_total / steps
            total[1] += sign * one.count / steps
    ranked = sorted(found.items(), key=lambda item: -item[1][0])[:20]
    busy = sum(max(0.0, us) for us, _ in found.values())
    return [f"{busy:9.1f}        all kernels", *(f"{us:9.1f} {count:6.1f} {name[:90]}" for name, (us, count) in ranked)]


def workload(name: str, model: Path, profile: bool) -> dict[str, Any]:
    shape, make, config = JOBS[name]
    prompts, new_tokens = make()
    (model / "config.json").write_text(json.dumps(shape))
    begin = time.perf_counter()
    llm = LLM(str(model), **ENGINE, **config)
    ready = time.perf_counter() - begin
    host = HostTime(llm)
    run_job(llm, prompts, [min(count, 16) for count in new_tokens])  # warm-up
    host.reset()
    seconds = run_job(llm, prompts, new_tokens)
    host_ms = host.a_step()
    result = {"workload": name, "unit": UNITS[name], "floor": FLOORS[name], "gate": GATES[name]}
    result |= {"seconds": round(seconds, 3), "steps": host.steps, "start_to_ready_s": round(ready, 1)}
    result["ms_of_host_a_step"] = host_ms
    if name == "nano":
        result["value"] = round(sum(new_tokens) / seconds, 1)
    else:
        prefill = statistics.median(run_job(llm, prompts, [1] * len(prompts)) for _ in range(3))
        step = (seconds - prefill) / (new_tokens[0] - 1)
        result |= {"prefill_tokens_per_s": round(sum(map(len, prompts)) / prefill), "ms_a_step": round(1e3 * step, 3)}
        result["value"] = round(1 / step if name == "b1" else sum(new_tokens) / seconds, 1)
    result["description"] = {k: v for k, v in llm.describe().items() if k in ("cuda_graphs", "pool", "kernels")}
    if profile:
        result["kernels"] = kernels(llm, prompts, 32)
    llm.shutdown()
    del llm, host
    gc.collect()
    torch.cuda.empty_cache()
    return result


def parity(folder: Path) -> dict[str, Any]:
    """Relative errors of log-probabilities against transformers in float32: ours and theirs, by type."""
    from transformers import AutoModelForCausalLM

    found: dict[str, Any] = {"workload": "parity"}
    generator = torch.Generator().manual_seed(0)
    for family in ("llama", "qwen3"):
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
                 "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
        model = make_tiny(family, folder / family, vocab_size=1024, max_position_embeddings=1024, **sizes)
        ids = torch.randint(0, 1024, (300,), generator=generator)

        def theirs(dtype: torch.dtype, model: Path = model, ids: torch.Tensor = ids) -> torch.Tensor:
            net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).cuda().eval()
            with torch.inference_mode():
                return net(ids[None].cuda()).logits[0].double().log_softmax(-1).cpu()

        right = theirs(torch.float32)
        for dtype in ("float32", "bfloat16"):
            llm = LLM(str(model), device="cuda", dtype=dtype, num_pages=64, enable_prefix_caching=False)
            params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
            scores = llm.generate([ids.tolist()], params)[0].prompt_logprobs
            llm.shutdown()
            ours = torch.empty(299, 1024, dtype=torch.float64)
            top = torch.tensor(scores.top_ids).view(-1, 1024)[-299:]
            ours.scatter_(1, top, torch.tensor(scores.top_scores).double().view(-1, 1024)[-299:])
            error = float((ours - right[:-1]).norm() / right[:-1].norm())
            other = theirs(getattr(torch, dtype))[:-1]
            found[f"{family}, {dtype}"] = {
                "ours": error,
                "transformers": float((other - right[:-1]).norm() / right[:-1].norm()),
                "argmax_equal": int((ours.argmax(1) == right[:-1].argmax(1)).sum()),
            }
    return found


def tests() -> dict[str, Any]:
    """What tests/cuda passes here, and the rows and cases that it witnessed."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "witnessed"
        workers = ["-n", "14"] if find_spec("xdist") else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", *workers, "tests/cuda"]
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | {"PERDURE_WITNESS": str(file)}, capture_output=True, text=True
        )
        rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    if failed:
        print(done.stdout[-20_000:])
    summary = next((line for line in reversed(done.stdout.splitlines()) if " passed" in line or " failed" in line), "")
    return {"workload": "tests", "summary": summary, "failed": failed, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="tests,parity,nano,b1,b64,b256")
    parser.add_argument("--profile", action="store_true", help="a table of kernels for each workload")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = {
        "command": "python benchmarks/gpu.py",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "device": torch.cuda.get_device_name(),
        "versions": f"torch {torch.__version__}, triton {triton.__version__}, Python {platform.python_version()}",
        "workloads": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        for name in args.only.split(","):
            if name == "tests":
                result = tests()
            else:
                result = parity(Path(folder)) if name == "parity" else workload(name, Path(folder), args.profile)
            report["workloads"].append(result)
            print(json.dumps({k: v for k, v in result.items() if k not in ("kernels", "rows")}), flush=True)
            print(*result.get("kernels", ()), sep="\n", flush=True)
            if args.json:
                args.json.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
