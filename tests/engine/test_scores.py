"""T38 and T41 on M: scores are what the model's logits say, whatever the settings and the chunks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

from perdure import LLM, InvalidValue, SamplingParams
from perdure.api.errors import StepFailed
from perdure.api.output import RequestOutput
from perdure.models.base import Attend, Model, ModelConfig
from tests.engine.conftest import DEVICES, Check, MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    V,
    check_equal,
    check_reference,
    check_scores_equal,
    in_thread,
    prompt,
    run_async,
    settings,
    whole_rows,
)
from tests.engine.reference import Reference
from tests.witness import witness

EPS = 2.0**-23
FILTERS: dict[str, dict[str, Any]] = {
    "top_k": {"temperature": 0.7, "top_k": 4},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 1.5, "min_p": 0.05},
    "joint": {"temperature": 1.3, "top_k": 12, "top_p": 0.9, "min_p": 0.01},
    "none": {"temperature": 2.0},
}


class Watched:
    """The model of an engine, and the logits [n, V] it gave in each step."""

    def __init__(self, llm: LLM) -> None:
        runner = llm._engine.resolved.runner
        self._model: Model = runner._model
        self.config: ModelConfig = self._model.config
        self.logits_seen: list[NDArray[np.float32]] = []
        runner._sampler._model = self

    def forward(self, token_ids: Tensor, positions: Tensor, attend: Attend, rows: Tensor | None) -> Tensor:
        return self._model.forward(token_ids, positions, attend, rows)

    def logits(self, hidden: Tensor) -> Tensor:
        found = self._model.logits(hidden)
        self.logits_seen.append(found.numpy().copy())
        return found


def kept_by(logits: NDArray[np.float64], params: SamplingParams) -> NDArray[np.bool_]:
    """The rule, spelled out in float64: temperature, min_p, top_k, renormalise, top_p over what is left."""
    mass = np.exp((logits - logits.max()) / params.temperature)
    keep: NDArray[np.bool_] = mass >= params.min_p * mass.max()
    if params.top_k:
        keep &= logits >= np.sort(logits)[-params.top_k]
    mass = np.where(keep, mass, 0.0)
    order = np.argsort(-mass, kind="stable")
    before = np.cumsum(mass[order]) - mass[order]
    keep[order[before >= params.top_p * mass.sum()]] = False
    return keep


def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    top = x.max()
    result: NDArray[np.float64] = x - top - np.log(np.exp(x - top).sum())
    return result


def near(found: float, true: float, size: float) -> bool:
    """Within 8 eps of the numbers that enter the subtraction."""
    return abs(found - true) <= 8 * EPS * max(1.0, size)


@pytest.mark.parametrize("name", FILTERS)
def test_T38_the_score_of_a_sampled_token(name: str, make_llm: MakeLLM) -> None:
    """raw = log-softmax of the logits, processed = that of what was drawn from; the ids are the same, and kept ones."""
    llm, ids = make_llm(enable_prefix_caching=False), prompt(20)
    watched = Watched(llm)
    params = settings(**FILTERS[name], seed=7, logprobs=5)
    (raw,) = llm.generate([ids], params)
    rows = [row[0].astype(np.float64) for row in watched.logits_seen]
    (processed,) = llm.generate([ids], settings(**FILTERS[name], seed=7, logprobs=5, logprobs_mode="processed"))
    tokens = raw.outputs[0].token_ids
    assert processed.outputs[0].token_ids == tokens and len(rows) == 16
    differing = 0
    for index, (token, logits) in enumerate(zip(tokens, rows)):
        keep = kept_by(logits, params)
        assert keep[token], f"id {token} at {index} was not kept"
        scaled = np.where(keep, logits, -np.inf) / params.temperature
        check_row(raw, index, log_softmax(logits), np.abs(logits).max())
        check_row(processed, index, log_softmax(scaled), np.abs(logits).max() / min(1.0, params.temperature))
        one, two = raw.outputs[0].selected_logprobs, processed.outputs[0].selected_logprobs
        differing += one is not None and two is not None and one[index] != two[index]
    assert differing == 16, "raw and processed are two different things"


def check_row(output: RequestOutput, index: int, truth: NDArray[np.float64], size: float) -> None:
    """The chosen score, and the five best with theirs, ranks included."""
    logprobs, token = output.outputs[0].logprobs, output.outputs[0].token_ids[index]
    assert logprobs is not None
    entry = logprobs[index]
    assert entry is not None and token in entry
    assert near(logprobs.chosen[index], float(truth[token]), size)
    best = np.argsort(-truth, kind="stable")[:5].tolist()
    assert list(entry)[:5] == best
    for rank, id_ in enumerate(best, start=1):
        assert entry[id_].rank == rank
        assert entry[id_].logprob == truth[id_] or near(entry[id_].logprob, float(truth[id_]), size)


def test_T38_raw_scores_know_nothing_of_temperature(make_llm: MakeLLM, reference: Reference) -> None:
    """Of one context, the whole vocabulary's raw scores are the same bits at every setting, and the reference's."""
    llm, ids = make_llm(), prompt(20)
    params = [settings(max_tokens=1, logprobs=-1, seed=1, **one) for one in ({}, *FILTERS.values())]
    outputs = llm.generate([ids] * len(params), params)
    rows = [whole_rows(output.outputs[0].logprobs)[0] for output in outputs]
    assert all(torch.equal(row, rows[0]) for row in rows)
    assert (rows[0].double() - reference.scores(ids)[-1]).abs().max() < 1e-4
    greedy, *others = llm.generate([ids] * 4, [settings(temperature=0.0, seed=seed) for seed in range(4)])
    for output in others:
        check_equal(output, greedy)


def test_T38_the_engines_mode_is_the_default_of_its_requests(make_llm: MakeLLM) -> None:
    """Processed greedy scores are 0: all mass on the one id. A request may say otherwise."""
    by_default, asked = make_llm(logprobs_mode="processed").generate(
        [[5, 6]] * 2, [settings(), settings(logprobs_mode="raw")]
    )
    assert set(by_default.outputs[0].selected_logprobs or [1.0]) == {0.0}
    assert max(asked.outputs[0].selected_logprobs or [0.0]) < 0.0


# T41


def decoding_beside(llm: LLM, score: Callable[[], list[RequestOutput]], reference: Reference) -> list[RequestOutput]:
    """The same while another request decodes all the time."""
    beside = in_thread(lambda: llm.generate([prompt(3)], settings(max_tokens=None)))
    found = score()
    (other,) = beside()
    check_reference(other, prompt(3), reference)
    witness("T41", tokens_beside=len(other.outputs[0].token_ids))
    return found


@DEVICES
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("budget", [65, 32, 16, 7, 1])
def test_T41_prompt_scores_under_chunking(
    budget: int,
    beside: bool,
    depth: int,
    make_llm: MakeLLM,
    reference: Reference,
    solo: Solo,
    check_as_promised: Check,
) -> None:
    """65 tokens: a leading none and 64 entries with 3 best each, the same for every budget, and the reference's.

    Where prompt scores are not asked there is no row at all.
    """
    llm, ids = make_llm(max_num_batched_tokens=budget, steps_in_flight=depth), prompt(65)
    params = [settings(prompt_logprobs=3, max_tokens=4), settings(max_tokens=4)]

    def score() -> list[RequestOutput]:
        return llm.generate([ids, ids], params)

    asked, not_asked = decoding_beside(llm, score, reference) if beside else score()
    truth = solo(ids, params[0])
    check_as_promised(asked, truth)
    assert not_asked.prompt_logprobs is None
    scores = asked.prompt_logprobs
    assert scores is not None and len(scores) == 65 and scores[0] is None
    assert scores.token_ids.tolist() == ids[1:] and set(scores.num_top) == {3}
    expected = reference.scores(ids)
    for position, entry in enumerate(list(scores)[1:], start=1):
        row = expected[position - 1]
        assert entry is not None and list(entry)[:3] == row.topk(3).indices.tolist()
        assert all(abs(one.logprob - row[id_].item()) < 2e-4 for id_, one in entry.items())
    if budget < 65:
        witness("T41", num_steps=llm.stats().num_steps)


def test_T41_scoring_only_gives_the_same_scores(make_llm: MakeLLM, solo: Solo) -> None:
    """max_tokens=0, `logprobs`, and scores of a continuation given its prompt: one and the same numbers."""
    llm, ids = make_llm(max_num_batched_tokens=16), prompt(65)
    truth = solo(ids, settings(prompt_logprobs=0, max_tokens=4))
    (scored,) = llm.generate([ids], settings(max_tokens=0, prompt_logprobs=0))
    check_scores_equal(scored.prompt_logprobs, truth.prompt_logprobs)
    assert scored.outputs[0].token_ids == [] and scored.outputs[0].finish_reason == "length"
    (whole,) = llm.logprobs([ids])
    check_scores_equal(whole.prompt_logprobs, truth.prompt_logprobs)
    (tail,) = llm.logprobs([ids[:40]], [ids[40:]])
    assert truth.prompt_logprobs is not None
    check_scores_equal(tail.outputs[0].logprobs, truth.prompt_logprobs.cut(39, 64))


def test_logprobs_of_both_faces_are_the_same(make_llm: MakeLLM, make_async: MakeAsync) -> None:
    """Prompts alone and with continuations; what is refused stands in its place, and is raised where it is alone."""
    llm = make_llm()
    prompts: list[list[int]] = [prompt(20), [], prompt(30)]
    tails: list[list[int]] = [prompt(5), prompt(6), []]

    async def main() -> None:
        other = make_async()
        for given in (None, tails):
            for one, two in zip(llm.logprobs(prompts, given), await other.logprobs(prompts, given)):
                assert str(one.error) == str(two.error)
                check_scores_equal(one.prompt_logprobs, two.prompt_logprobs)
                check_scores_equal(one.outputs[0].logprobs, two.outputs[0].logprobs)
                assert one.outputs[0].token_ids == two.outputs[0].token_ids
        (bare,) = await other.logprobs("The text", " goes on")
        assert bare.outputs[0].selected_logprobs == llm.logprobs("The text", " goes on")[0].outputs[0].selected_logprobs
        with pytest.raises(InvalidValue, match="not a token id"):
            await other.logprobs({"prompt_token_ids": [V]})
        with pytest.raises(InvalidValue, match="continuations has 1 entries for 3 prompts"):
            await other.logprobs(prompts, tails[:1])

    run_async(main())


def test_a_continuation_that_is_wrong_is_refused_alone(make_llm: MakeLLM, make_async: MakeAsync) -> None:
    """Each names its continuation; a text in a dictionary is a continuation like any other, without a begin id."""
    llm = make_llm()
    prompts: list[Any] = ["a", "b", [5], "d", "e", {"prompt": [5]}, "f"]
    tails: list[Any] = ["b", [V], None, "\ud800", {"prompt": "b"}, "b", [None]]

    async def main() -> None:
        theirs = await make_async().logprobs(prompts, tails)
        for results in (llm.logprobs(prompts, tails), theirs):
            right = [at for at, result in enumerate(results) if result.error is None]
            assert right == [0, 4]
            for at in (2, 3, 6):
                assert isinstance(results[at].error, InvalidValue)
                assert str(results[at].error).startswith(f"continuations[{at}]: "), results[at].error
            assert str(results[1].error) == f"continuations[1][0]={V} is not a token id of this model: 0 to {V - 1}"
            assert "prompt=[5]" in str(results[5].error)
            assert results[4].outputs[0].token_ids == results[0].outputs[0].token_ids
        first, second = llm.logprobs(["a", "b"], [None, "b"])  # type: ignore[list-item]
        assert str(first.error).startswith("continuations[0]: ") and second.error is None
        for face in (llm.logprobs, make_async().logprobs):
            with pytest.raises(InvalidValue, match=r"continuations\[0\]: "):
                found = face("a", [None])  # type: ignore[operator]
                await found

    run_async(main())


def test_T40_each_request_gets_what_it_asked_for(make_llm: MakeLLM, solo: Solo) -> None:
    """None, chosen only, 5, 20 with prompt scores, all, more than there are: in one batch, equal to each one's solo."""
    asked = [None, 0, 5, 20, -1, V + 9]
    params = [settings(logprobs=count, prompt_logprobs=20 if count == 20 else None) for count in asked]
    prompts = [prompt(9 + index) for index in range(len(asked))]
    for output, ids, one, count in zip(make_llm().generate(prompts, params), prompts, params, asked):
        check_equal(output, solo(ids, one))
        scores = output.outputs[0].logprobs
        assert (scores is None) == (count is None) and (output.prompt_logprobs is None) == (count != 20)
        if scores is not None and count is not None:
            assert set(scores.num_top) == {min(count, V) if count >= 0 else V}


@DEVICES
@pytest.mark.parametrize("budget", [512, 7])
@pytest.mark.parametrize("by", ["a grammar", "a function"])
def test_T41_prompt_scores_of_a_request_without_a_first_token(
    by: str, budget: int, make_llm: MakeLLM, check_as_promised: Check
) -> None:
    """It fails where it draws; its prompt is scored as any other, whatever the chunks, with and without the cache."""
    if by == "a grammar":
        failing = settings(prompt_logprobs=2, allowed_token_ids=[5], structured_outputs={"choice": ["no"]})
    else:
        failing = settings(prompt_logprobs=2, logits_processors=lambda output_ids, logits: logits[:1])
    llm, ids = make_llm(max_num_batched_tokens=budget), prompt(60)
    first, again = (llm.generate([ids], failing)[0] for _ in range(2))
    (whole,) = llm.generate([ids], settings(prompt_logprobs=2, max_tokens=0))
    for output in (first, again):
        assert isinstance(output.error, StepFailed) and output.outputs[0].token_ids == []
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 60
        check_as_promised(replace(output, error=None), replace(whole, outputs=output.outputs))
    both = llm.generate([ids], replace(failing, n=2))[0]
    assert [one.finish_reason for one in both.outputs] == ["error"] * 2
    assert both.prompt_logprobs is not None and len(both.prompt_logprobs) == 60


def test_T42_prompt_scores_with_the_prefix_cache(make_llm: MakeLLM, solo: Solo) -> None:
    """Prompts that share 48 tokens, in both orders and again, lengths around the page: one entry a token, no hole."""
    shared = prompt(48)
    for length in (31, 33, 48):
        one, two = shared[:length], shared + prompt(12)
        for order in ((one, two, one), (two, one, two)):
            llm = make_llm()
            for ids in order:
                for params in (settings(prompt_logprobs=1), settings(), settings(max_tokens=0, prompt_logprobs=0)):
                    (output,) = llm.generate([ids], params)
                    check_equal(output, solo(ids, params))
            witness("T42", num_cached_tokens=llm.stats().num_cached_tokens)
