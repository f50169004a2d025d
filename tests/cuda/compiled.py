"""Compiles what a step in bfloat16 over pages of 8 bits launches, for a GPU that need not be here.

    python -m tests.cuda.compiled

- The interpreter has no types to agree and no bfloat16, so what it runs may not compile.
- A driver that is none says which GPU there is; a launch compiles its kernel, and runs nothing.

Prints how many forms of each kernel were compiled, as JSON.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from perdure.api.ending import BAD_LOGITS, NOTHING_LEFT
from perdure.api.plan import StepOutput
from perdure.models.base import Weights, joined_shape
from perdure.models.llama import LlamaModel, parameters
from perdure.ops.attention import CacheShape, LayerAttention
from perdure.ops.attention.paged import PagedRows, TritonPaged
from perdure.ops.float8 import E4M3
from perdure.ops.kernels import triton_kernels
from perdure.ops.rope import Turning
from perdure.ops.triton import attention, few_rows, pages
from perdure.ops.triton import rows as row_kernels
from perdure.ops.triton.float8 import quantised_rows, scaled
from perdure.runner.cuda.runner import CudaRunner
from tests.runner.plans import CONFIG, Driver, Row, prompt, tiny_model

SHARED_MEMORY = 232_448  # bytes that a program can have on an H100 or H200


class NoDriver:
    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def main() -> None:
    driver.set_active(NoDriver())
    for module in (attention, few_rows, pages, row_kernels):
        module.early_launch = lambda device: {"launch_pdl": True}  # as such a GPU has it
    forms: dict[int, tuple[str, Any]] = {}
    run = JITFunction.run

    def compile_only(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> None:
        try:
            form = run(kernel, *arguments, grid=grid, warmup=True, **options)
        except Exception as error:  # a runner would make it the rows' error
            raise SystemExit(f"{kernel.__name__} does not compile: {error} {error.__cause__}") from error
        assert form.metadata.shared <= SHARED_MEMORY, f"{kernel.__name__} takes {form.metadata.shared} bytes"
        forms[id(form)] = kernel.__name__, form

    JITFunction.run = compile_only
    launch_a_life()
    launch_sinks()
    launch_products()
    print(json.dumps(Counter(name for name, _ in forms.values())))


def launch_a_life() -> None:
    """A prompt, a row of one query, a burst; then draws and scores of all kinds. What comes of it means nothing."""
    rows = Driver(tiny_model())
    rows.runner.release()
    weights = {
        name: torch.ones(joined_shape(parts), dtype=torch.bfloat16) for name, parts in parameters(CONFIG).items()
    }
    config = replace(CONFIG, dtype=torch.bfloat16)
    rows.device = CudaRunner(
        LlamaModel(config, Weights(weights), triton_kernels(batch_invariant=False)),
        num_pages=8 * rows.pages_per_slot, page_size=4, max_num_seqs=8, max_model_len=120, max_num_batched_tokens=128,
        device=torch.device("cpu"), dtype=torch.bfloat16, kv_dtype=E4M3,
    )  # fmt: skip
    ids = prompt(6)
    rows.admit(0, 6)
    rows.device.launch(rows.plan(Row(0, ids[:5], sample=False))).wait()
    rows.device.launch(rows.plan(Row(0, ids[5:], 5))).wait()
    rows.device.launch(rows.plan(Row(0, steps=2))).wait()
    rows.device._kv.poison([0])
    rows.admit(1, 6, num_prompt_logprobs=5)
    check(rows.device.launch(rows.plan(Row(1, ids[:5], sample=False, targets=ids[1:5], target_start=1))).wait())
    filters = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    for slot, settings in enumerate(
        ({"num_logprobs": 5}, {"num_logprobs": 2, "processed_logprobs": True, **filters}), 2
    ):
        rows.admit(slot, 6, **settings)
        check(rows.device.launch(rows.plan(Row(slot, ids))).wait())


def check(output: StepOutput) -> None:
    """Nothing was computed, so logits may be unusable; but there is no error of another kind."""
    assert all(why in (BAD_LOGITS, NOTHING_LEFT) for _, why in output.errors), output.errors


def launch_sinks() -> None:
    """Attention with sinks: a row of one query, which is split, rows that are not, prompts, rows turned beside."""
    shape, sinks = CacheShape(4, 2, 64, 4, 16), torch.zeros(4)
    cache = torch.zeros(2, 2, 4, 16, 64, dtype=torch.bfloat16)
    table, blocks = torch.zeros(1, 200, dtype=torch.int32), torch.zeros(1, 4, dtype=torch.int32)
    for window, softcap, invariant in product((None, 5), (None, 5.0), (False, True)):
        kind = LayerAttention(0.125, window, softcap, "learnable")
        form = TritonPaged(shape, kind, torch.bfloat16, batch_invariant=invariant)
        for num_rows in (1, 2 * attention.PROGRAMS):
            q = torch.zeros(num_rows, 4, 64, dtype=torch.bfloat16)
            ints = torch.zeros(num_rows, dtype=torch.int32)
            form.run(q, cache, PagedRows(table, ints, ints, ints, blocks), sinks)
            if not invariant:
                rows = PagedRows(table, ints, ints, ints, blocks[:0])
                form.run_turning(torch.cat((q, q[:, :2]), 1), q[:, :2], Turning(q[:, :1], q[:, :1]), cache, rows, sinks)


def launch_products() -> None:
    x, factors = torch.ones(3, 48, dtype=torch.bfloat16), torch.ones(48)
    for bias in (None, x[0]):
        scaled(torch.ones(3, 48), factors, factors, bias, 40, torch.bfloat16)
    for most in (None, 3.0):
        quantised_rows(x, most)
    cache = torch.zeros(2, 2, 4, 16, 24, dtype=torch.uint8).view(E4M3)
    pages.write_kv(x.view(3, 2, 24), x.view(3, 2, 24), cache, torch.arange(3, dtype=torch.int32))


if __name__ == "__main__":
    main()
