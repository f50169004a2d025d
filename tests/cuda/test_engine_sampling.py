"""What requests ask of logits and scores, through the engine on a GPU: rows sample-*, T38, T41, and a CPU's results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from perdure import LLM, InvalidValue, SamplingParams, StructuredOutputsParams
from perdure.core.admission import derived_seed
from perdure.models.tiny import make_tiny_llama
from perdure.ops import sampling_reference as oracle
from perdure.ops.philox import uniforms
from perdure.runner.cuda.sampler import of_outputs
from tests.cuda.test_engine import check_same, run
from tests.engine.helpers import flatter_model, num_replays, prompt
from tests.witness import witness

EPS = 2.0**-23


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama")


@pytest.fixture(scope="module")
def flatter(model, tmp_path_factory):
    return flatter_model(model, tmp_path_factory.mktemp("flatter") / "model")


@pytest.mark.parametrize("depth", [1, 2])
def test_samples_of_one_prompt_with_penalties(nothing_on_host, model, depth):
    """Each has a history of its own, from the same prompt on."""
    params = SamplingParams(
        n=3, max_tokens=30, ignore_eos=True, temperature=0.9, seed=4, repetition_penalty=1.3, frequency_penalty=0.4,
        logprobs=2, bad_words=[[9, 9], [17, 3, 5]],
    )  # fmt: skip
    right, _, _ = run(model, "cpu", params)
    found, _, _ = run(model, "cuda", params, steps_in_flight=depth)
    for one, two in zip(found, right, strict=True):
        assert [sample.token_ids for sample in one.outputs] == [sample.token_ids for sample in two.outputs]
    assert len({tuple(sample.token_ids) for sample in found[0].outputs}) == 3


def test_structured_outputs(nothing_on_host, model):
    """Beside rows that are held to nothing; some with penalties, too."""
    held = StructuredOutputsParams(regex="(?:[a-z ]{1,6},){12}")
    params = [
        SamplingParams(max_tokens=60, temperature=0.9, seed=i, logprobs=2, structured_outputs=held if i % 2 else None,
                       frequency_penalty=0.5 if i % 3 else 0.0)
        for i in range(8)
    ]  # fmt: skip
    right, _, _ = run(model, "cpu", params)
    found, _, replays = run(model, "cuda", params)
    check_same(found, right)
    witness("structured-cuda", replays=replays, text=found[1].outputs[0].text)


def test_functions_and_whole_vocabularies_on_the_host(gpu, model):
    """Beside rows that the device samples."""

    def only_even(ids, logits):
        logits[1::2] = -torch.inf
        return logits

    asked = [{"logits_processors": [only_even], "frequency_penalty": 0.5}, {"logprobs": -1}, {"presence_penalty": 0.7}]
    params = [SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.8, seed=i, **asked[i % 3]) for i in range(8)]
    right, _, _ = run(model, "cpu", params)
    found, _, _ = run(model, "cuda", params)
    for one, two in zip(found, right, strict=True):
        assert one.outputs[0].token_ids == two.outputs[0].token_ids
    assert not any(id_ % 2 for id_ in found[0].outputs[0].token_ids)


def logits_seen(runner) -> list[torch.Tensor]:
    """Of the first row of each step from now on, also of one in a graph: as they are before anything is asked of
    them."""
    seen, compute = list[torch.Tensor](), runner._compute_words

    def computed(*arguments: Any) -> tuple[torch.Tensor, ...]:
        outputs = compute(*arguments)
        seen.append(of_outputs(outputs[1:])[0].logits[0].clone())
        return outputs

    runner._compute_words = computed
    return seen


SAMPLE_FILTERS = {"top-k": {"top_k": 4}, "top-p": {"top_p": 0.7}, "joint": {"top_k": 4, "top_p": 0.7}}


@pytest.mark.parametrize("mode", ["raw", "processed"])
@pytest.mark.parametrize("policy", ["shared", "per_replica"])
@pytest.mark.parametrize("name", SAMPLE_FILTERS)
@pytest.mark.parametrize("backend", ["torch", "flashinfer"])
def test_sample(gpu, flatter, monkeypatch, backend, name, policy, mode):
    """Rows sample-torch-* and sample-flashinfer-*: one token at temperature 0.7, drawn from the ids that the rule keeps
    of the first step's logits by the seed of the policy; its score is the mode's."""
    row = f"sample-{backend}-{name}-{policy}-{mode}"
    calls: list[str] = []
    if backend == "flashinfer":
        filters = pytest.importorskip("flashinfer.sampling")
        for called in ("top_k_mask_logits", "top_p_renorm_probs"):
            real = getattr(filters, called)
            monkeypatch.setattr(filters, called, lambda *a, n=called, f=real: (calls.append(n), f(*a))[1])
    asked = {"temperature": 0.7, **SAMPLE_FILTERS[name]}
    params = SamplingParams(max_tokens=1, logprobs=0, logprobs_mode=mode, **asked)
    config = {"device": "cuda", "dtype": "float32", "num_pages": 64, "max_num_seqs": 4}
    with LLM(str(flatter), seed=7, seed_policy=policy, replica=1, sampling_backend=backend, **config) as llm:
        seen = logits_seen(llm._engine.resolved.runner)
        (output,) = llm.generate([prompt(20)], params)
        assert llm.describe()["sampling_backend"] == backend
        replays = num_replays(llm)
    logits = seen[0].cpu().numpy()
    kept = oracle.kept_ids(logits, **asked)
    mass = np.exp((logits[kept].astype(np.float64) - logits.max()) / 0.7)
    seeds = {which: derived_seed(7, replica, 0) for which, replica in (("shared", 0), ("per_replica", 1))}
    drawn = {}
    for which, seed in seeds.items():
        u = float(uniforms(np.array([seed], np.uint64), np.array([0]))[0])
        drawn[which] = kept[int(np.searchsorted(np.cumsum(mass) / mass.sum(), u, side="right"))]
    assert drawn["shared"] != drawn["per_replica"], "the draw would not say by which seed it was"
    token = drawn[policy]
    assert output.outputs[0].token_ids == [token]
    raw = logits.astype(np.float64) - np.logaddexp.reduce(logits.astype(np.float64))
    scores = {"raw": raw[token], "processed": oracle.processed(logits, **asked)[token]}
    found = output.outputs[0].selected_logprobs[0]
    assert abs(found - scores[mode]) <= 8 * 2**-23 * max(1.0, float(np.abs(logits).max()) / 0.7)
    assert scores["raw"] != scores["processed"] and 1 < len(kept) < len(logits)
    assert backend == "torch" or {*calls} == {"top_k_mask_logits", "top_p_renorm_probs"}
    count = {"calls": len(calls)} if backend == "flashinfer" else {}
    witness(row, seed=seeds[policy], num_kept=len(kept), token=int(token) + 1, device="cuda", replays=replays, **count)


def test_a_sampling_backend_that_is_not_here(gpu, model, monkeypatch):
    from perdure.ops import flashinfer_filters

    monkeypatch.setattr(flashinfer_filters, "why_not", lambda: "the package flashinfer-python is not installed")
    with pytest.raises(InvalidValue, match="sampling_backend='flashinfer' is not here: the package flashinfer-python"):
        LLM(str(model), device="cuda", num_pages=64, sampling_backend="flashinfer")


ASKED: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "joint": {"top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "penalties": {"top_k": 6, "repetition_penalty": 1.4, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "bias": {"top_k": 6, "logit_bias": {9: 4.0, 30: -3.0}, "bad_words": [[9, 9], [9, 30, 9]]},
}


@pytest.mark.parametrize("graphs", [{}, {"num_cuda_graphs": 0}], ids=["graphs", "eager"])
@pytest.mark.parametrize("name", ASKED)
def test_T38_the_score_of_a_sampled_token(nothing_on_host, flatter, name, graphs):
    """raw = log-softmax of the logits, whatever the temperature, processed = that of what was drawn from, by rules read
    from the whole history; the ids are the same, and kept ones."""
    ids, asked = prompt(20), ASKED[name]
    filters = {key: asked[key] for key in ("top_k", "top_p", "min_p") if key in asked}
    rules = {key: value for key, value in asked.items() if key not in filters}
    config = {"device": "cuda", "dtype": "float32", "num_pages": 64, "max_num_seqs": 4, **graphs}
    with LLM(str(flatter), enable_prefix_caching=False, **config) as llm:
        seen = logits_seen(llm._engine.resolved.runner)
        common = {"temperature": 0.7, "max_tokens": 16, "ignore_eos": True, "seed": 7, "logprobs": 5, **asked}
        (raw,) = llm.generate([ids], SamplingParams(**common))
        (processed,) = llm.generate([ids], SamplingParams(**common, logprobs_mode="processed"))
        given = {**common, "temperature": 1.9, "forced_token_ids": tuple(raw.outputs[0].token_ids)}
        (warmer,) = llm.generate([ids], SamplingParams(**given))
        replays = num_replays(llm)
    tokens = raw.outputs[0].token_ids
    assert processed.outputs[0].token_ids == warmer.outputs[0].token_ids == tokens and len(seen) == 48
    assert len({*tokens}) > 1 and (replays == 48) == (not graphs)
    num_kept = []
    for index, (token, logits) in enumerate(zip(tokens, (x.cpu().numpy() for x in seen))):
        adjusted = oracle.adjusted(logits, ids, tokens[:index], **rules)
        kept = oracle.kept_ids(adjusted, temperature=0.7, **filters)
        assert token in kept
        num_kept.append(len(kept))
        truths = oracle.log_softmax(logits), oracle.processed(adjusted, temperature=0.7, **filters)
        size = 8 * EPS * max(1.0, float(np.abs(adjusted[np.isfinite(adjusted)]).max()) / 0.7)
        for output, truth in ((raw, truths[0]), (warmer, truths[0]), (processed, truths[1])):
            scores = output.outputs[0].logprobs
            assert abs(scores.chosen[index] - truth[token]) <= size
            assert scores.rank[index] == oracle.rank(truth, token)
            assert list(scores[index])[:5] == oracle.order(truth)[:5]
        assert truths[0][token] != truths[1][token]
    assert max(num_kept) > 1
    replayed = {} if graphs else {"replays": replays}
    witness("T38", tokens=len(tokens), num_kept=max(num_kept), kind=name, device="cuda", **replayed)


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside"])
def test_T41_prompt_scores_under_chunking(gpu, model, beside):
    """64 scores of a prompt of 65, the same for every budget."""
    ids = prompt(65)
    params = [SamplingParams(max_tokens=4, ignore_eos=True, temperature=0.0, prompt_logprobs=3)]
    prompts = [ids]
    if beside:
        params, prompts = [SamplingParams(max_tokens=90, ignore_eos=True, seed=1), *params], [prompt(9), ids]
    right, _, _ = run(model, "cpu", params[-1], prompts=[ids])
    steps, num_replayed = [], 0
    for budget in (65, 32, 16, 7, 2):
        found, stats, replays = run(model, "cuda", params, prompts=prompts, max_num_batched_tokens=budget)
        check_same(found[-1:], right)
        scores = found[-1].prompt_logprobs
        assert len(scores) == 65 and scores[0] is None and set(scores.num_top) == {3}
        steps.append(stats.num_steps)
        num_replayed += replays
    witness("T41", steps=steps, replays=num_replayed, device="cuda")
