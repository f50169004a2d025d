"""Rows graph-* and feat-cuda-graph: the shapes that steps are padded to, as an engine at work takes them.

A GPU replays graphs captured for these shapes; a CPU runs the same padded steps as they are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from perdure import LLM
from perdure.api.output import RequestOutput
from perdure.runner.shapes import Shape
from tests.engine.conftest import DEVICES, Check, MakeLLM
from tests.engine.helpers import Brake, in_thread, prompt, settings, until
from tests.runner.test_shapes import LADDERS
from tests.witness import witness

ROWS: dict[str, Any] = {
    "num_cuda_graphs": 3, "cuda_graph_max_tokens": 16, "cuda_graph_mixed_prefill": 2, "max_num_batched_tokens": 32,
    "max_num_seqs": 8, "batch_invariant": False,
}  # fmt: skip
TARGET, PAIR, LATE = prompt(65), [prompt(4, seed=1), prompt(6, seed=2)], prompt(5, seed=3)


class StepWatch:
    """Of each step: its tokens, rows of prompts, decoding rows, the shape it was given, and how many rows the model
    really computed."""

    def __init__(self, llm: LLM) -> None:
        runner = llm._engine.resolved.runner
        self.captured: list[Shape] = runner.shapes.shapes
        self.steps: list[tuple[int, int, int, Shape | None]] = []
        self.physical: list[int] = []
        runner.shapes.take = partial(self._taken, runner.shapes.take)
        runner._model.forward = partial(self._forward, runner._model.forward)
        if (graphs := getattr(runner, "graphs", None)) is not None:
            graphs.replay = partial(self._replayed, graphs.replay)

    def _taken(self, take: Any, tokens: int, prompts: int, decodes: int, num_steps: int = 1) -> Shape | None:
        shape: Shape | None = take(tokens, prompts, decodes, num_steps)
        self.steps += [(tokens, prompts, decodes, shape)] * num_steps
        return shape

    def _forward(self, forward: Any, ids: Any, *arguments: Any) -> Any:
        self.physical.append(len(ids))
        return forward(ids, *arguments)

    def _replayed(self, replay: Any, shape: Shape) -> Any:
        outputs = replay(shape)
        self.physical.append(len(outputs[0]))
        return outputs

    def check(self) -> None:
        """Every shape that was taken is captured, and is what was computed; a step without one ran as it was."""
        assert len(self.steps) == len(self.physical)
        for (tokens, prompts, decodes, shape), physical in zip(self.steps, self.physical):
            assert physical == (tokens if shape is None else shape.num_tokens)
            assert shape is None or (shape in self.captured and shape.num_rows >= prompts + decodes)

    @property
    def num_padded_rows(self) -> int:
        return sum(shape.num_tokens - tokens for tokens, *_, shape in self.steps if shape is not None)


def mixed_life(llm: LLM) -> list[RequestOutput]:
    """The target of 65 tokens alone; then two that decode when a prompt of 5 tokens joins them."""
    found = llm.generate([TARGET], settings(logprobs=2, prompt_logprobs=1))
    brake = Brake(llm._engine)
    brake.hold(after=3)
    pair = in_thread(lambda: llm.generate(PAIR, settings(logprobs=2)))
    brake.wait_until_held()
    late = in_thread(lambda: llm.generate([LATE], settings(logprobs=2)))
    until(lambda: len(llm._engine._inbox._commands) > 0)
    brake.release()
    return [*found, *pair(), *late()]


@DEVICES
@pytest.mark.parametrize(("sizing", "all_prefills"), LADDERS, ids=str)
def test_graph_rows(sizing: str, all_prefills: bool, make_llm: MakeLLM, check_as_promised: Check) -> None:
    ladder, mixed_tokens = LADDERS[sizing, all_prefills]
    config = {**ROWS, "cuda_graph_sizing": sizing, "cuda_graph_all_prefills": all_prefills}
    llm = make_llm(steps_in_flight=1, enable_prefix_caching=False, **config)
    watch = StepWatch(llm)
    outputs = mixed_life(llm)
    watch.check()
    assert sorted({shape.num_tokens for shape in watch.captured if shape.num_prompts}) == sorted({*ladder} - {1})
    mixed = [shape for tokens, prompts, decodes, shape in watch.steps if (tokens, prompts, decodes) == (7, 1, 2)]
    assert [shape.num_tokens for shape in mixed if shape is not None] == [mixed_tokens]
    prefills = [(tokens, shape) for tokens, prompts, decodes, shape in watch.steps if prompts and not decodes]
    assert [tokens for tokens, _ in prefills][:2] == [32, 32], "the target came in chunks"
    assert any(shape is not None and shape.num_tokens > 16 for _, shape in prefills) == all_prefills

    plain = make_llm(steps_in_flight=1, enable_prefix_caching=False, **{**config, "num_cuda_graphs": 0})
    for output, other in zip(outputs, mixed_life(plain), strict=True):
        check_as_promised(output, other)
    witness(
        f"graph-{sizing}-all{int(all_prefills)}",
        captured=[shape.num_tokens for shape in watch.captured],
        mixed_step=mixed_tokens,
        largest_prefill=max(tokens if shape is None else shape.num_tokens for tokens, shape in prefills),
        num_padded_rows=watch.num_padded_rows,
        num_steps=len(watch.steps),
    )


@DEVICES
@pytest.mark.parametrize("depth", [1, 2])
def test_feat_cuda_graph(depth: int, make_llm: MakeLLM, check_as_promised: Check) -> None:
    """Four graphs of at most 16 tokens: steps that decode are padded, prompts run as they are."""
    config = {"steps_in_flight": depth, "enable_prefix_caching": False, "batch_invariant": False}
    llm = make_llm(num_cuda_graphs=4, cuda_graph_max_tokens=16, cuda_graph_mixed_prefill=0, max_num_seqs=16, **config)
    watch = StepWatch(llm)
    prompts = [prompt(length) for length in (5, 17, 33, 9, 20)]
    outputs = llm.generate(prompts, settings(logprobs=1))
    watch.check()
    decodes = [shape for _, prompts, _, shape in watch.steps if not prompts]
    assert None not in decodes and all(shape is None for _, prompts, _, shape in watch.steps if prompts)
    plain = make_llm(num_cuda_graphs=0, max_num_seqs=16, **config)
    for output, other in zip(outputs, plain.generate(prompts, settings(logprobs=1)), strict=True):
        check_as_promised(output, other)
    witness(
        "feat-cuda-graph",
        captured=[shape.num_tokens for shape in watch.captured],
        num_padded_steps=len(decodes),
        num_padded_rows=watch.num_padded_rows,
    )
