"""Weights, their inputs and pages in 8 bits: the same promises as without, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import LLM, InvalidValue
from perdure.api.output import RequestOutput
from perdure.models.tiny import make_tiny_llama
from perdure.ops.float8 import E4M3
from tests.engine.conftest import MakeLLM
from tests.engine.helpers import (
    Brake,
    check_empty,
    check_equal,
    halted,
    in_thread,
    pressure,
    prompt,
    settings,
    whole_rows,
)
from tests.witness import witness

FP8: dict[str, Any] = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
PROMPTS = [prompt(length) for length in (5, 17, 33, 48, 16, 31, 64, 9)]
PARAMS = [settings(max_tokens=40, temperature=n % 2 * 0.9, seed=n, logprobs=2, prompt_logprobs=1) for n in range(8)]


@pytest.fixture(scope="session")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As M, hidden 128."""
    return make_tiny_llama(tmp_path_factory.mktemp("wide") / "llama", hidden_size=128)


@pytest.fixture
def make(wide: Path, make_llm: MakeLLM) -> Iterator[MakeLLM]:
    made: list[LLM] = []

    def make(**config: Any) -> LLM:
        made.append(make_llm(**{"model": wide, **FP8, **config}))
        return made[-1]

    yield make
    for llm in made:
        check_empty(llm._engine)


@pytest.fixture(scope="module")
def alone(wide: Path) -> list[RequestOutput]:
    """Each alone, one step at a time, nothing cached."""
    with LLM(str(wide), num_pages=128, steps_in_flight=1, enable_prefix_caching=False, **FP8) as llm:
        return [llm.generate([ids], params)[0] for ids, params in zip(PROMPTS, PARAMS)]


@pytest.mark.parametrize(
    "config",
    [
        {"num_pages": 10, "paused_pages": 2, "max_num_batched_tokens": 32, "poison_free_pages": True},
        {"max_num_batched_tokens": 7, "steps_in_flight": 1, "page_size": 5, "num_pages": 400},
        {"attention_backend": "tiled", "num_pages": 24, "max_num_batched_tokens": 48},
    ],
    ids=["pressure", "chunks of 7 and other pages", "torch's attention"],
)
def test_the_same_bits_whatever_the_schedule(config: dict[str, Any], make: MakeLLM, alone: list[RequestOutput]) -> None:
    """Among each other, under pressure and in chunks; the other form of attention against itself alone."""
    llm = make(**{"enable_prefix_caching": False, **config})
    right = alone
    if "attention_backend" in config:
        solo = make(attention_backend="tiled", enable_prefix_caching=False)
        right = [solo.generate([ids], params)[0] for ids, params in zip(PROMPTS, PARAMS)]
    found = llm.generate(PROMPTS, PARAMS)
    for one, two in zip(found, right, strict=True):
        check_equal(one, two)
    evictions = sum(pressure(one)[0] for one in found)
    assert "paused_pages" not in config or evictions
    witness("fp8-schedules", steps=llm.stats().num_steps, page_bytes=llm._engine.resolved.page_bytes)


def test_a_prefix_hit_and_a_copied_page(make: MakeLLM, alone: list[RequestOutput]) -> None:
    """Pages of 8 bits serve others as they are, also a partial one that samples of one prompt share."""
    llm = make()
    check_equal(llm.generate([PROMPTS[6]], PARAMS[6])[0], alone[6])
    again = llm.generate([PROMPTS[6]], PARAMS[6])[0]
    assert again.num_cached_tokens >= 48 and again.outputs[0].token_ids == alone[6].outputs[0].token_ids
    params = settings(max_tokens=12, temperature=0.9, seed=3, n=3, logprobs=0)
    samples = llm.generate([PROMPTS[3][:45]], params)[0]
    single = llm.generate([PROMPTS[3][:45]], settings(max_tokens=12, temperature=0.9, seed=3, logprobs=0))[0]
    assert samples.outputs[0].token_ids == single.outputs[0].token_ids
    llm.reset_prefix_cache()


@pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
def test_life_offload_fp8(kv: Any, make: MakeLLM, alone: list[RequestOutput]) -> None:
    """The reference's cross row: suspended in the midst of it with steps in flight, weights away too; pages come back
    to the bit."""
    llm = make(enable_prefix_caching=False, num_pages=4000)
    runner, brake = llm._engine.resolved.runner, Brake(llm._engine)
    store = runner._kv
    brake.hold(after=9)
    call = in_thread(lambda: llm.generate(PROMPTS, PARAMS))
    brake.wait_until_held()
    halted(llm, brake, lambda: llm.suspend(kv, weights="offload"))
    pages = [page for state in llm._engine._loop.scheduler.requests.live.values() for page in state.children[0].pages]
    if kv == "offload":
        away, copy = store._away  # type: ignore[misc]
        assert sorted(pages) == away and copy.any()
        llm.resume(tags=["kv"])
        assert torch.equal(store._pool.index_select(3, torch.tensor(away)), copy)
    llm.resume()
    for one, two in zip(call(), alone, strict=True):
        check_equal(one, two)
    witness("life-offload-fp8", kv=kv, dtype=str(store.layers[0].dtype), bytes=store.num_bytes)


def test_other_weights_are_rounded_as_they_come(make: MakeLLM, tmp_path: Path) -> None:
    other = make_tiny_llama(tmp_path / "other", hidden_size=128, seed=7)
    params = settings(max_tokens=12, logprobs=3)
    right = make(model=other).generate(PROMPTS, params)
    llm = make()
    before = llm.generate(PROMPTS, params)
    llm.update_weights(str(other), epoch=1)
    found = llm.generate(PROMPTS, params)
    assert [one.outputs[0].token_ids for one in found] == [one.outputs[0].token_ids for one in right]
    assert [one.outputs[0].token_ids for one in found] != [one.outputs[0].token_ids for one in before]
    llm.reset_prefix_cache()


@pytest.mark.parametrize("changes", [{"kv_cache_dtype": "auto"}, {"quantization": None}])
def test_a_checkpoint_goes_on_and_tells_an_engine_of_other_roundings(
    changes: dict[str, Any], make: MakeLLM, alone: list[RequestOutput]
) -> None:
    llm, same, other = make(), make(), make(**changes)
    brake = Brake(llm._engine)
    brake.hold(after=9)
    call = in_thread(lambda: llm.generate([PROMPTS[3]], PARAMS[3], request_ids=["A"]))
    brake.wait_until_held()
    saved, _ = halted(llm, brake, lambda: llm.checkpoint("A", end=True))
    call()
    resumed, elsewhere = same.generate([saved])[0], other.generate([saved])[0]
    assert resumed.exact and resumed.outputs[0].token_ids == alone[3].outputs[0].token_ids
    assert not elsewhere.exact and len(elsewhere.outputs[0].token_ids) == 40
    for engine in (llm, same, other):
        engine.reset_prefix_cache()


def test_what_it_costs_and_what_it_saves(make: MakeLLM, make_llm: MakeLLM, wide: Path) -> None:
    """Four times the pages in the same memory, and logits near those without."""
    params = settings(max_tokens=1, prompt_logprobs=-1)
    plain = make_llm(wide, num_pages=None, kv_cache_bytes=1 << 20)
    right = whole_rows(plain.generate([prompt(100)], params)[0].prompt_logprobs)
    for config, bound in (
        ({"quantization": None}, 0.1),
        ({"kv_cache_dtype": "auto"}, 0.15),
        ({}, 0.2),
    ):
        llm = make(num_pages=None, kv_cache_bytes=1 << 20, **config)
        factor = 1 if "kv_cache_dtype" in config else 4
        assert llm.stats().num_pages == factor * plain.stats().num_pages
        found = whole_rows(llm.generate([prompt(100)], params)[0].prompt_logprobs)
        assert 1e-3 < (found - right).norm() / right.norm() < bound
        llm.reset_prefix_cache()
    runner = llm._engine.resolved.runner
    assert runner._kv.layers[0].dtype == E4M3 and runner.kv_bytes <= 1 << 20


def test_names_that_are_none(wide: Path) -> None:
    with pytest.raises(InvalidValue, match="kv_cache_dtype='int8' is none of auto, fp8"):
        LLM(str(wide), kv_cache_dtype="int8")
    with pytest.raises(InvalidValue, match="quantization='int4' is none of gguf, fp8"):
        LLM(str(wide), quantization="int4")
