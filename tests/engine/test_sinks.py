"""Rows feat-swa-sink and feat-alternating-swa-sink: attention sinks beside windows of 5 (Megatron-core's (4, 0))."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from perdure.api.errors import ModelLoadError
from perdure.models.tiny import make_tiny
from perdure.ops.attention import AttentionForm, LayerAttention, PlannedAttention
from perdure.ops.attention.paged import PagedAttention
from perdure.runner import runner as on_cpu
from perdure.runner.cuda import runner as on_cuda
from tests.engine.conftest import DEVICES, Check, MakeLLM
from tests.engine.helpers import SCORE_TOLERANCE, SINKS, pressure, prompt, settings
from tests.engine.reference import CLEAR_LEAD, Reference
from tests.witness import witness

KINDS = {
    "feat-swa-sink": {"window 5, off-by-one"},
    "feat-alternating-swa-sink": {"window 5, learnable", "window None, learnable"},
}
PROMPTS = [prompt(length) for length in (20, 30, 15, 70)]
PARAMS = settings(max_tokens=20, return_prompt=True)


@dataclass(frozen=True)
class Case:
    """A row, its model, and what the model is in float64."""

    row: str
    model: Path
    reference: Reference


@pytest.fixture(scope="module", params=SINKS)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    family, config = SINKS[request.param]
    model = make_tiny(family, tmp_path_factory.mktemp("sinks") / family, **config)
    return Case(request.param, model, Reference(model))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often layers of each kind attended with sinks; on a GPU, how often that was launched or captured."""
    found: Counter[str] = Counter()

    def note(layer: LayerAttention, sinks: torch.Tensor | None) -> None:
        assert sinks is not None and sinks.dtype == torch.float32
        found[f"window {layer.window}, {layer.sink}"] += 1

    def planning(name: str, shape: Any, layer: LayerAttention, **config: Any) -> AttentionForm:
        form = make_attention(name, shape, layer, **config)
        plan = form.plan

        def planned(rows: Any) -> PlannedAttention:
            return Noted(plan(rows))

        class Noted:
            def __init__(self, inner: PlannedAttention) -> None:
                self._inner = inner

            def run(self, q: torch.Tensor, cache: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
                note(layer, sinks)
                return self._inner.run(q, cache, sinks)

        monkeypatch.setattr(form, "plan", planned)
        return form

    def attending(name: str, shape: Any, layer: LayerAttention, *more: Any, **config: Any) -> PagedAttention:
        form = make_paged(name, shape, layer, *more, **config)
        attend = form.attend

        def noted(*given: Any) -> torch.Tensor:
            note(layer, given[-1])
            return attend(*given)

        monkeypatch.setattr(form, "attend", noted)
        return form

    make_attention, make_paged = on_cpu.make_attention, on_cuda.make_paged
    monkeypatch.setattr(on_cpu, "make_attention", planning)
    monkeypatch.setattr(on_cuda, "make_paged", attending)
    return found


@DEVICES
def test_windows_and_sinks(device: str, case: Case, calls: Counter[str], make_llm: MakeLLM) -> None:
    """Ids, prompt and text are those of a dense forward; without the sinks, or the windows, ids would be others."""
    llm = make_llm(case.model, steps_in_flight=1, enable_prefix_caching=False)
    tokenizer = Tokenizer.from_file(str(case.model / "tokenizer.json"))
    without = [Reference(case.model, **other) for other in ({"softmax_type": "vanilla"}, {"sliding_window": None})]
    changed = [0, 0]
    outputs = llm.generate(PROMPTS, PARAMS)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        found = output.outputs[0]
        truth = case.reference.judge(ids, found.token_ids)
        assert output.error is None and found.finish_reason == "length"
        assert min(truth.leads) > CLEAR_LEAD, "this prompt proves nothing: two logits are nearly equal"
        assert found.token_ids == truth.token_ids and output.prompt_token_ids == ids
        assert found.text == tokenizer.decode(found.token_ids)
        assert found.selected_logprobs == pytest.approx(truth.scores, abs=2 * SCORE_TOLERANCE)
        for index, other in enumerate(without):
            best = other.judge(ids, found.token_ids).token_ids
            changed[index] += sum(a != b for a, b in zip(best, found.token_ids, strict=True))
    assert calls.keys() == KINDS[case.row]
    witness(
        case.row,
        device=device,
        calls=dict(calls),
        changed_by_sinks=changed[0],
        changed_by_windows=changed[1],
        token_ids=outputs[0].outputs[0].token_ids,
    )


@DEVICES
@pytest.mark.parametrize("backend", ["reference", "tiled", "plain"])
def test_other_forms_give_the_same_ids(device: str, backend: str, case: Case, make_llm: MakeLLM) -> None:
    if device == "cuda" and backend != "reference":
        pytest.skip("a form for CPUs")
    config = {"attention_backend": backend, "batch_invariant": device == "cpu" and backend != "plain"}
    outputs = make_llm(case.model, **config).generate(PROMPTS, PARAMS)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        found = output.outputs[0].token_ids
        assert found == case.reference.judge(ids, found).token_ids


@DEVICES
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("budget", [7, 512])
def test_chunks_and_evictions_change_nothing(
    device: str, budget: int, depth: int, case: Case, make_llm: MakeLLM, check_as_promised: Check
) -> None:
    """In too few pages, in chunks, several at once: as alone, in one chunk, one step at a time."""
    alone = make_llm(case.model, steps_in_flight=1, enable_prefix_caching=False)
    llm = make_llm(
        case.model,
        num_pages=7,
        paused_pages=0,
        steps_in_flight=depth,
        max_num_batched_tokens=budget,
        enable_prefix_caching=False,
    )
    outputs = llm.generate(PROMPTS, PARAMS)
    for ids, output in zip(PROMPTS, outputs, strict=True):
        check_as_promised(output, alone.generate([ids], PARAMS)[0])
    num_evictions = sum(pressure(output)[0] for output in outputs)
    chunks = [sum(event.kind == "chunk" for event in output.metrics.events) for output in outputs if output.metrics]
    witness(
        case.row, device=device, budget=budget, depth=depth, num_evictions=num_evictions,
        most_chunks=max(chunks), steps=llm.stats().num_steps,
    )  # fmt: skip


@DEVICES
def test_learned_sinks_follow_the_weights(device: str, make_llm: MakeLLM, tmp_path: Path) -> None:
    """Through an update, away and back, and dropped; a model whose softmax is another is no update."""
    family, config = SINKS["feat-alternating-swa-sink"]
    one, two = (make_tiny(family, tmp_path / str(seed), seed=seed, **config) for seed in (0, 1))
    other = make_tiny(family, tmp_path / "other", **{**config, "softmax_type": "off-by-one"})
    llm = make_llm(one, enable_prefix_caching=False)

    def check_is(model: Path) -> None:
        found = llm.generate([PROMPTS[0]], PARAMS)[0].outputs[0].token_ids
        assert found == Reference(model).judge(PROMPTS[0], found).token_ids

    check_is(one)
    llm.update_weights(two)
    check_is(two)
    llm.suspend(weights="offload")
    llm.resume()
    check_is(two)
    llm.suspend(weights="drop")
    llm.resume(tags=["weights"])
    llm.update_weights(one)
    llm.resume()
    check_is(one)
    with pytest.raises(ModelLoadError, match=r"attention is .*off-by-one.* has .*learnable"):
        llm.update_weights(other)
    check_is(one)
