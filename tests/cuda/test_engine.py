"""Whole requests through the engine on a GPU, in float32, against the engine on a CPU: ids, and scores closely."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from typing import Any

import pytest
import torch

from perdure import LLM, SamplingParams
from perdure.models.tiny import make_tiny, make_tiny_llama
from perdure.ops.attention.paged import TritonPaged
from perdure.ops.triton import pages, rows
from tests.cuda.helpers import check_poisoned
from tests.engine.helpers import num_replays, prompt
from tests.witness import witness

LENGTHS = (5, 17, 33, 48, 16, 31, 64, 9)  # of T11
PROMPTS = [prompt(length) for length in LENGTHS]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


def run(model, device: str, params: SamplingParams | list[SamplingParams], prompts=PROMPTS, **config: Any):
    """Results, and the engine's stats."""
    settings = {
        "dtype": "float32",
        "enable_prefix_caching": False,
        "check_integrity": True,
        "max_num_seqs": 8,
        **config,
    }
    if device == "cuda":
        settings.setdefault("num_pages", 256)
    with LLM(str(model), device=device, **settings) as llm:
        outputs = llm.generate(prompts, params)
        return outputs, llm.stats(), num_replays(llm)


def check_same(found, right) -> None:
    for one, two in zip(found, right, strict=True):
        ours, theirs = one.outputs[0], two.outputs[0]
        assert one.error is None and ours.token_ids == theirs.token_ids
        assert (ours.text, ours.finish_reason, ours.stop_reason) == (
            theirs.text,
            theirs.finish_reason,
            theirs.stop_reason,
        )
        for scores, others in ((ours.logprobs, theirs.logprobs), (one.prompt_logprobs, two.prompt_logprobs)):
            assert (scores is None) == (others is None)
            if scores is not None:
                assert list(scores.num_top) == list(others.num_top) and list(scores.top_ids) == list(others.top_ids)
                assert list(scores.rank) == list(others.rank)
                for name in ("chosen", "top_scores"):
                    ours_scores, their_scores = torch.tensor(getattr(scores, name)), torch.tensor(getattr(others, name))
                    torch.testing.assert_close(ours_scores, their_scores, atol=1e-3, rtol=1e-5, equal_nan=True)


SETTINGS = {
    "greedy": {"temperature": 0.0, "logprobs": 3, "prompt_logprobs": 2},
    "seeded": {"temperature": 0.9, "seed": 42, "top_p": 0.95, "top_k": 40, "logprobs": 0},
    "everything": {"temperature": 0.8, "seed": 3, "repetition_penalty": 1.2, "presence_penalty": 0.3, "min_p": 0.01,
                   "frequency_penalty": 0.2, "logit_bias": {5: 3.0, 77: -5.0}, "bad_words": [], "min_tokens": 9,
                   "logprobs": 2, "logprob_token_ids": [3, 9]},
    "processed": {"temperature": 0.7, "seed": 3, "top_k": 4, "logprobs": 4, "logprobs_mode": "processed"},
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("depth", [1, 2])
def test_T11_under_pressure(nothing_on_host, model, name, depth):
    """Eight requests in a pool of ten pages and in a roomy one; on a CPU roomy."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, **SETTINGS[name])
    right, _, _ = run(model, "cpu", params)
    found, stats, _ = run(
        model, "cuda", params, num_pages=10, paused_pages=2, max_num_batched_tokens=32, steps_in_flight=depth
    )
    check_same(found, right)
    roomy, _, replays = run(model, "cuda", params, steps_in_flight=depth)
    check_same(roomy, right)
    witness("T11", evictions=stats.num_evictions, pauses=stats.num_pauses, replays=replays, device="cuda")


@pytest.mark.parametrize(
    "graphs", [{"num_cuda_graphs": 0}, {"cuda_graph_mixed_prefill": 4, "cuda_graph_max_tokens": 128}]
)
def test_eager_and_mixed_graphs(gpu, model, graphs):
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.9, seed=1, logprobs=0, prompt_logprobs=0)
    right, _, _ = run(model, "cpu", params, max_num_batched_tokens=48)
    found, _, replays = run(model, "cuda", params, max_num_batched_tokens=48, **graphs)
    check_same(found, right)
    assert (replays > 0) == ("num_cuda_graphs" not in graphs)


def test_mixed_graphs_with_the_form_for_hopper(gpu, tmp_path):
    """Scores of ids that are given, of prompts and rows that decode in one captured step, against steps as they are."""
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    model = make_tiny_llama(tmp_path, hidden_size=256, dtype="bfloat16")  # heads of 64
    given = tuple(prompt(24, seed=9))
    params = SamplingParams(max_tokens=24, forced_token_ids=given, logprobs=0, prompt_logprobs=0)
    config = {"dtype": "bfloat16", "attention_backend": "hopper", "max_num_batched_tokens": 48}
    right, _, _ = run(model, "cuda", params, **config, num_cuda_graphs=0)
    found, stats, replays = run(model, "cuda", params, **config)
    assert replays == stats.num_steps
    for one, two in zip(found, right, strict=True):
        for ours, theirs in (
            (one.outputs[0].logprobs, two.outputs[0].logprobs),
            (one.prompt_logprobs, two.prompt_logprobs),
        ):
            chosen = [torch.tensor(scores.chosen) for scores in (ours, theirs)]
            torch.testing.assert_close(*chosen, atol=1.5, rtol=0.05, equal_nan=True)  # of logits of size 30


PLAIN = {"linear_backend": "reference", "attention_backend": "reference"}


@pytest.fixture
def fused(monkeypatch) -> Counter[str]:
    """How often functions of several layers' modules in one were called; in a graph, once."""
    ran: Counter[str] = Counter()

    def counted(name: str, function: Any) -> Any:
        def run_it(*arguments: Any) -> Any:
            ran[name] += 1
            return function(*arguments)

        return run_it

    for module, name in (
        (rows, "add_norm"), (rows, "silu_mul"), (pages, "turn_and_write"), (TritonPaged, "run_turning")
    ):  # fmt: skip
        monkeypatch.setattr(module, name, counted(name, getattr(module, name)))
    return ran


def test_back_optimized(gpu, model, fused):
    """Fused layer modules against plain ones on the same device, where theirs is the forward that runs."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=1)
    right, _, _ = run(model, "cuda", params, **PLAIN)
    assert not fused
    found, _, replays = run(model, "cuda", params)
    check_same(found, right)
    assert [one.prompt_token_ids for one in found] == [one.prompt_token_ids for one in right]
    witness("back-optimized", replays=replays, **fused)


def test_feat_fused_rope(gpu, tmp_path, fused):
    """Heads of 64 in 256 channels: queries and keys turn in the kernel that writes keys, or in that of attention where
    rows are few; step by step and in graphs."""
    model = make_tiny_llama(tmp_path / "llama", hidden_size=256)
    sizes = json.loads((model / "config.json").read_text())
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=1)
    right, _, _ = run(model, "cuda", params, **PLAIN)
    assert not fused
    (alone,), _, _ = run(model, "cuda", params, num_cuda_graphs=0, prompts=PROMPTS[:1])
    eager, _, _ = run(model, "cuda", params, num_cuda_graphs=0)
    calls = {name: fused[name] for name in ("turn_and_write", "run_turning")}
    found, _, replays = run(model, "cuda", params)
    check_same([alone], right[:1])
    for others in (eager, found):
        check_same(others, right)
        assert [one.prompt_token_ids for one in others] == [one.prompt_token_ids for one in right]
    witness(
        "feat-fused-rope",
        head_dim=sizes["head_dim"],
        hidden=sizes["hidden_size"],
        **calls,
        replays=replays,
        text=found[0].outputs[0].text,
    )


@pytest.mark.parametrize("backend", ["triton", "hopper"])
def test_T58_poisoned_pages(gpu, half, backend):
    if backend == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("not a Hopper GPU")
    check_poisoned(half, backend)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma3"])
def test_families(gpu, tmp_path, family):
    model = make_tiny(family, tmp_path / family)
    params = SamplingParams(max_tokens=40, ignore_eos=True, temperature=0.0, logprobs=0)
    right, _, _ = run(model, "cpu", params)
    found, _, replays = run(model, "cuda", params)
    check_same(found, right)
    assert replays > 0


@pytest.mark.parametrize("mode", ["persist", "offload", "recompute"])
def test_T61_suspend(gpu, model, mode):
    """Suspended in the midst of it; the pool's memory is away meanwhile, and a graph replays after."""
    params = SamplingParams(max_tokens=120, ignore_eos=True, temperature=0.9, seed=5, logprobs=0, prompt_logprobs=1)
    right, _, _ = run(model, "cpu", params)
    with LLM(str(model), device="cuda", dtype="float32", num_pages=20000, max_num_seqs=8, check_integrity=True) as llm:
        call = llm._engine
        runner = call.resolved.runner
        at = runner._kv.layers[0].data_ptr()
        done: list[Any] = []
        thread = threading.Thread(target=lambda: done.extend(llm.generate(PROMPTS, params)))
        thread.start()
        while llm.stats().num_generated_tokens < 100:
            time.sleep(0.001)
        llm.suspend(kv=mode)
        assert runner._kv.is_here == (mode == "persist")
        before = num_replays(llm)
        llm.resume()
        thread.join()
        assert runner._kv.layers[0].data_ptr() == at
        check_same(done, right)
        witness("T61", mode=mode, pool=runner.kv_bytes, replays=num_replays(llm) - before)


@pytest.mark.parametrize("weights", ["offload", "drop"])
def test_weights_go_away_and_come_back(gpu, model, weights):
    """Memory is the driver's meanwhile; graphs are captured anew and give the same."""
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=0)
    with LLM(str(model), device="cuda", dtype="float32", num_pages=256, max_num_seqs=8, check_integrity=True) as llm:
        right = llm.generate(PROMPTS, params)
        llm.suspend(kv="recompute", weights=weights)
        if weights == "drop":
            llm.resume(tags=["weights"])
            llm.update_weights(str(model), epoch=1)
        llm.resume()
        check_same(llm.generate(PROMPTS, params), right)


def test_other_weights_are_written_in_place(gpu, model, tmp_path):
    other = make_tiny_llama(tmp_path / "other", seed=5)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=0.0, logprobs=0)
    right, _, _ = run(other, "cpu", params)
    with LLM(str(model), device="cuda", dtype="float32", num_pages=256, max_num_seqs=8, check_integrity=True) as llm:
        llm.generate(PROMPTS, params)
        llm.update_weights(str(other), epoch=1)
        check_same(llm.generate(PROMPTS, params), right)
