"""A request's ids and logits have the same bits whatever happens to it on the way.

Logits are seen as scores of the whole vocabulary on the tiny model; on SmolLM2 ids and chosen scores are compared.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import LLM, SamplingParams
from perdure.api.output import RequestOutput
from perdure.core.state import RequestState
from tests.engine.conftest import MakeLLM, Solo
from tests.engine.helpers import V, check_empty, check_equal, check_reference, pressure, prompt, settings
from tests.engine.reference import Reference
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
BUDGETS = pytest.mark.parametrize("budget", [7, 32, 512])
X = prompt(50)
MODES: dict[str, SamplingParams] = {
    "greedy": settings(max_tokens=32, logprobs=-1),
    "drawn": settings(max_tokens=32, logprobs=-1, temperature=0.9, top_p=0.95, seed=12),
}
OTHERS = [prompt(length, seed=4) for length in (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 64, 80, 5, 9, 100)]


@pytest.fixture(params=MODES)
def params(request: pytest.FixtureRequest) -> SamplingParams:
    found: SamplingParams = MODES[request.param]
    return found


class Evictions:
    """How many output tokens each evicted request had, by its prompt's length."""

    def __init__(self, llm: LLM) -> None:
        requests = llm._engine._loop.scheduler.requests
        self.num_output: dict[int, list[int]] = {}
        self._evict = requests.evict
        requests.evict = self._noted  # type: ignore[method-assign]

    def _noted(self, state: RequestState) -> None:
        self.num_output.setdefault(state.prompt_length, []).append(state.num_output)
        self._evict(state)


def among(
    llm: LLM, ids: list[int], params: SamplingParams, others: list[list[int]], place: int, max_tokens: int = 40
) -> RequestOutput:
    """The request's result with these others in the same call, itself in that place; they have settings of all kinds
    and end at different times, after at most so many tokens."""
    prompts = [*others[:place], ids, *others[place:]]
    every = [
        settings(max_tokens=1 + 5 * n % max_tokens, temperature=n % 3 / 2, seed=n, logprobs=n % 4)
        for n in range(len(others))
    ]
    outputs = llm.generate(prompts, [*every[:place], params, *every[place:]])
    assert all(output.error is None for output in outputs)
    return outputs[place]


@DEPTHS
@pytest.mark.parametrize(("budget", "place"), [(7, 0), (32, 15), (512, 7)])
def test_alone_and_among_15_others(
    budget: int, place: int, depth: int, params: SamplingParams, make_llm: MakeLLM, solo: Solo, reference: Reference
) -> None:
    """Alone, and first, in the middle or last of 16, its prompt scored over the whole vocabulary too."""
    truth = solo(X, replaced(params, prompt_logprobs=-1))
    assert truth.outputs[0].logprobs is not None and set(truth.outputs[0].logprobs.num_top) == {V}
    if params.temperature == 0:
        check_reference(truth, X, reference)
    llm = make_llm(steps_in_flight=depth, max_num_batched_tokens=budget, enable_prefix_caching=False)
    check_equal(llm.generate(X, replaced(params, prompt_logprobs=-1))[0], truth)
    check_equal(among(llm, X, replaced(params, prompt_logprobs=-1), OTHERS, place), truth)


@DEPTHS
@BUDGETS
def test_with_a_prefix_hit(budget: int, depth: int, params: SamplingParams, make_llm: MakeLLM, solo: Solo) -> None:
    """The same prompt again, and one that shares 48 of its tokens: most of it comes from the cache."""
    llm = make_llm(steps_in_flight=depth, max_num_batched_tokens=budget)
    branch = [*X[:48], *prompt(9)]
    for ids, num_cached in ((X, 0), (X, 48), (branch, 48)):
        (output,) = llm.generate([ids], params)
        assert output.num_cached_tokens == num_cached
        check_equal(output, solo(ids, params))
        if num_cached:
            witness("bitwise-prefix-hit", num_cached_tokens=output.num_cached_tokens)
    check_equal(among(llm, X, params, OTHERS, 7), solo(X, params))


@DEPTHS
@BUDGETS
@pytest.mark.parametrize("caching", [False, True])
def test_with_an_eviction_in_the_middle(
    caching: bool, budget: int, depth: int, params: SamplingParams, make_llm: MakeLLM, solo: Solo
) -> None:
    """An older request takes the page X needs when it has some tokens: they are computed again, as a prefill."""
    llm = make_llm(
        num_pages=7,
        paused_pages=0,
        steps_in_flight=depth,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
    )
    evictions = Evictions(llm)
    older = settings(max_tokens=30, temperature=1.0, seed=1)
    first, output = llm.generate([prompt(33), X], [older, params])
    witness("bitwise-eviction", num_evictions=pressure(output)[0], num_output_then=evictions.num_output[len(X)])
    assert all(0 < count < 32 for count in evictions.num_output[len(X)])
    check_equal(output, solo(X, params))
    check_equal(first, solo(prompt(33), older))


def test_compiled_kernels_give_the_same_bits_on_any_number_of_threads_and_pages_of_any_size(
    params: SamplingParams, make_llm: MakeLLM
) -> None:
    """One engine after another, among 15 others each time."""
    outputs = []
    for threads, page_size in ((1, 16), (2, 16), (3, 1), (1, 7), (2, 100)):
        torch.set_num_threads(threads)  # `one_thread` puts it back
        llm = make_llm(linear_backend="native", page_size=page_size, num_pages=2048 // page_size)
        about = llm.describe()
        assert (about["threads"], about["page_size"], about["attention_backend"]) == (threads, page_size, "native")
        outputs.append(among(llm, X, params, OTHERS, 7))
        llm.shutdown()
    for output in outputs[1:]:
        check_equal(output, outputs[0])
    witness("bitwise-threads", num_engines=len(outputs), num_tokens=len(outputs[0].outputs[0].token_ids))


def test_two_engines_at_once_do_not_disturb_each_other(params: SamplingParams, make_llm: MakeLLM, solo: Solo) -> None:
    """They share the kernels' threads: whoever finds them taken works alone."""
    truth = solo(X, params)
    torch.set_num_threads(2)  # before the engines' threads are made, which take it over
    first, second = make_llm(), make_llm(max_num_batched_tokens=32)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            for one in pool.map(lambda llm: among(llm, X, params, OTHERS, 7), (first, second)):
                check_equal(one, truth)


def replaced(params: SamplingParams, **changes: Any) -> SamplingParams:
    return settings(**{**{name: getattr(params, name) for name in params.__struct_fields__}, **changes})


@pytest.mark.parametrize("form", ["plain", "reference"])
def test_other_forms_agree_within_the_tolerance(form: str, make_llm: MakeLLM, reference: Reference) -> None:
    """The selectable forms of products and attention, which promise no bits: ids where the best logit leads clearly,
    scores to 1e-4, among others, in chunks, with an eviction and a prefix hit."""
    llm = make_llm(
        batch_invariant=False,
        linear_backend=form,
        attention_backend=form,
        num_pages=12,
        paused_pages=0,
        max_num_batched_tokens=32,
    )
    prompts = [X, *OTHERS[:6]]
    outputs = llm.generate(prompts, settings(max_tokens=40)) + llm.generate(prompts, settings(max_tokens=40))
    for output, ids in zip(outputs, [*prompts, *prompts]):
        check_reference(output, ids, reference)
    stats = llm.stats()
    witness("forms", num_evictions=stats.num_evictions, num_cached_tokens=stats.num_cached_tokens)


# SmolLM2

TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps in the shade of a very old tree near the river."
SHORT = settings(max_tokens=10)


def smollm2(path: Path, **config: Any) -> LLM:
    return LLM(str(path), **{"num_pages": 40, "max_model_len": 256, "max_num_seqs": 16, **config})


@pytest.fixture(scope="module")
def alone(smollm2_path: Path) -> RequestOutput:
    with smollm2(smollm2_path, steps_in_flight=1, enable_prefix_caching=False) as llm:
        (output,) = llm.generate(TEXT, SHORT)
        return output


@pytest.mark.parametrize(("depth", "budget"), [(1, 512), (2, 7)])
def test_smollm2_among_15_others_in_chunks_and_with_a_prefix_hit(
    depth: int, budget: int, smollm2_path: Path, alone: RequestOutput
) -> None:
    with smollm2(smollm2_path, steps_in_flight=depth, max_num_batched_tokens=budget) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(TEXT)
        others = [ids[n : n + 2 + n % 5] for n in range(15)]
        check_equal(among(llm, ids, SHORT, others, 7, max_tokens=6), alone)
        (again,) = llm.generate([ids], SHORT)
        check_empty(llm._engine)
        witness("bitwise-smollm2", num_cached_tokens=again.num_cached_tokens)
        check_equal(again, alone)


def test_smollm2_with_an_eviction_in_the_middle(smollm2_path: Path, alone: RequestOutput) -> None:
    with smollm2(smollm2_path, max_num_batched_tokens=32, num_pages=4, paused_pages=0) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(TEXT)
        evictions = Evictions(llm)
        _, output = llm.generate([ids[1:18], ids], [settings(max_tokens=14), SHORT])
        witness("bitwise-smollm2", num_evictions=pressure(output)[0], num_output_then=evictions.num_output[len(ids)])
        check_empty(llm._engine)
        assert all(0 < count < 10 for count in evictions.num_output[len(ids)])
        check_equal(output, alone)
