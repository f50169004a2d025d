"""The prefix cache on M: T42, T53, T60's text half, on equals off under random traffic, pins, and what it gains."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from perdure import LLM, Checkpoint, InvalidValue, SamplingParams, StateError
from perdure.api.output import RequestOutput
from perdure.models.tiny import make_tiny_llama
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import V, check_equal, pressure, prompt, run_async, settings
from tests.witness import witness


def num_computed(output: RequestOutput) -> int:
    """Positions of its prefills."""
    assert output.metrics is not None
    return sum(event.num_tokens for event in output.metrics.events if event.kind == "chunk")


def has_waited(output: RequestOutput) -> bool:
    assert output.metrics is not None
    return any(event.kind == "awaits" for event in output.metrics.events)


# Lengths, scores, salts


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_T53_full_hits_and_boundaries(length: int, cached: int, make_llm: MakeLLM, solo: Solo) -> None:
    """Each prompt twice, then with one token more: same ids and scores, the last token never from the cache, and every
    hit counted once in the result and in the totals."""
    llm, ids = make_llm(), prompt(length)
    longer = [*ids, 7]
    for one, expected in ((ids, 0), (ids, cached), (longer, length // 16 * 16)):
        (output,) = llm.generate([one], settings())
        check_equal(output, solo(one, settings()))
        assert output.num_cached_tokens == expected and num_computed(output) == len(one) - expected
    stats = llm.stats()
    assert stats.num_cached_tokens == cached + length // 16 * 16
    assert stats.num_prompt_tokens == 3 * length + 1
    if cached:
        witness("T53", num_cached_tokens=cached)


@pytest.mark.parametrize("length", [31, 32, 33, 48])
@pytest.mark.parametrize("order", ["1 2 1", "2 1", "1 2 2 1"])
def test_T42_prompt_scores_in_all_orders(length: int, order: str, make_llm: MakeLLM, solo: Solo) -> None:
    """P1 and P2 share 48 tokens: one entry a token, no hole, the bits of a run without a cache; and those that lie with
    the pages are not computed again."""
    shared, llm = prompt(48), make_llm()
    prompts = {"1": shared[:length], "2": shared + prompt(12)}
    params = settings(max_tokens=0, prompt_logprobs=2)
    before: list[str] = []
    for name in order.split():
        ids = prompts[name]
        (output,) = llm.generate([ids], params)
        check_equal(output, solo(ids, params))
        assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == len(ids)
        common = [min(len(prompts[other]) - 1, len(ids)) // 16 for other in before]  # the last token is not computed
        # Of the pages that were there, one stays behind: the score of the first token after it comes with the next.
        assert output.num_cached_tokens == max(0, min(max(common, default=0) - 1, (len(ids) - 2) // 16)) * 16
        before.append(name)
    (output,) = llm.generate([prompts["2"]], settings(prompt_logprobs=1))
    check_equal(output, solo(prompts["2"], settings(prompt_logprobs=1)))
    assert output.num_cached_tokens == 32
    witness("T42", num_cached_tokens=output.num_cached_tokens)


def test_T60_text_with_and_without_a_salt(make_llm: MakeLLM, solo: Solo) -> None:
    """A twin with another salt, or with none, is a miss; a true equal is a hit; a checkpoint takes its salt along."""
    llm, text = make_llm(), "the same words, said twice: the same words, said twice"
    cached: list[int] = []
    for salt in (None, "X", "Y", "X", None):
        given: Any = text if salt is None else {"prompt": text, "cache_salt": salt}
        (output,) = llm.generate([given], settings())
        check_equal(output, solo(text, settings()))
        cached.append(output.num_cached_tokens)
    assert llm.tokenizer is not None
    full = (len(llm.tokenizer.encode(text)) - 1) // 16 * 16
    assert cached == [0, 0, 0, full, full]
    witness("T60-text", num_cached_tokens=cached[3])


WRONG_SALTS = {
    "is not a str": [7, b"x", ["a"]],
    "1 to 256": ["", "x" * 257, "\ud800"],
}


@pytest.mark.parametrize(("message", "salt"), [(text, salt) for text, salts in WRONG_SALTS.items() for salt in salts])
def test_a_salt_that_is_none_is_refused_in_words(message: str, salt: object, make_llm: MakeLLM) -> None:
    llm = make_llm()
    good, bad = llm.generate([[1, 2, 3], {"prompt_token_ids": [1, 2, 3], "cache_salt": salt}], settings())
    assert good.error is None and isinstance(bad.error, InvalidValue)
    assert "cache_salt=" in str(bad.error) and message in str(bad.error)
    with pytest.raises(InvalidValue, match="cache_salt"):
        llm.pin_prefix({"prompt_token_ids": prompt(40), "cache_salt": salt})
    scored = llm.logprobs([{"prompt_token_ids": [1, 2], "cache_salt": salt}], [[3, 4]])
    assert isinstance(scored[0].error, InvalidValue)


def test_a_checkpoint_goes_on_under_its_salt(make_async: MakeAsync) -> None:
    async def main() -> None:
        llm, ids = make_async(), prompt(40)
        handle = llm.submit({"prompt_token_ids": ids, "cache_salt": "X"}, settings(max_tokens=60))
        async for _ in handle:
            break
        checkpoint = Checkpoint.from_bytes((await handle.checkpoint(end=True)).to_bytes())
        assert checkpoint.cache_salt == "X"
        await handle
        plain = await llm.generate(ids, settings())
        again = await llm.submit(checkpoint)
        salted = await llm.generate({"prompt_token_ids": ids, "cache_salt": "X"}, settings())
        assert plain.num_cached_tokens == 0 and salted.num_cached_tokens == 32 and again.error is None

    run_async(main())


# Together


def test_requests_with_one_beginning_compute_it_once(make_llm: MakeLLM, solo: Solo) -> None:
    """8 at once, with one of another beginning among them, in chunks and at a depth: each equal to its solo run."""
    llm, shared = make_llm(max_num_batched_tokens=48), prompt(120)
    prompts = [shared + prompt(5 + number) for number in range(7)]
    prompts.insert(3, prompt(40, seed=5))
    params = [settings(temperature=number % 2, seed=number) for number in range(8)]
    params[6] = settings(prompt_logprobs=1)
    outputs = llm.generate(prompts, params)
    for output, ids, one in zip(outputs, prompts, params, strict=True):
        check_equal(output, solo(ids, one))
    assert [output.num_cached_tokens for output in outputs] == [0, 112, 112, 0, 112, 112, 0, 112]
    waits = sum(map(has_waited, outputs))
    assert waits <= 5, "all but the first, the other one, and one that asks for scores"
    witness("computed-once", num_waits=waits, num_cached_tokens=llm.stats().num_cached_tokens)


TRAFFIC = st.lists(
    st.fixed_dictionaries(
        {
            "shared": st.integers(0, 60),
            "own": st.integers(1, 12),
            "base": st.integers(0, 1),
            "max_tokens": st.integers(1, 24),
            "sampled": st.booleans(),
            "scores": st.sampled_from([None, None, 0, 3]),
            "skip": st.booleans(),
            "salt": st.sampled_from([None, None, "a"]),
        }
    ),
    min_size=3,
    max_size=10,
)


def test_the_cache_on_equals_off_under_random_traffic_with_eviction(make_llm: MakeLLM, soak_factor: int) -> None:
    """Bit for bit, in a pool too small for all, at random depths and budgets."""
    met: dict[str, int] = dict.fromkeys(("num_cached", "num_evictions", "num_waits"), 0)
    off = make_llm(enable_prefix_caching=False)
    engines = [
        make_llm(num_pages=14, steps_in_flight=depth, max_num_batched_tokens=budget, paused_pages=2)
        for depth, budget in ((1, 512), (2, 24), (3, 40))
    ]

    @examples(max_examples=12 * soak_factor, suppress_health_check=list(HealthCheck))
    @given(traffic=TRAFFIC, which=st.integers(0, 2))
    def run(traffic: list[dict[str, Any]], which: int) -> None:
        prompts: list[Any] = []
        params: list[SamplingParams] = []
        for number, one in enumerate(traffic):
            ids = prompt(60, seed=one["base"])[: one["shared"]] + prompt(one["own"], seed=10 + number)
            prompts.append({"prompt_token_ids": ids, "cache_salt": one["salt"]})
            params.append(
                settings(
                    max_tokens=one["max_tokens"],
                    temperature=float(one["sampled"]),
                    seed=number,
                    prompt_logprobs=one["scores"],
                    skip_reading_prefix_cache=one["skip"],
                )
            )
        outputs = engines[which].generate(prompts, params)
        for output, other in zip(outputs, off.generate(prompts, params), strict=True):
            check_equal(output, other)
            assert output.exact
            met["num_cached"] += output.num_cached_tokens
            met["num_evictions"] += pressure(output)[0]
            met["num_waits"] += has_waited(output)

    run()
    witness("prefix-cache-on-equals-off", **met)


# Pins


def test_a_pinned_prefix_serves_a_rollout_over_pressure_and_new_weights(make_llm: MakeLLM, tiny: Path) -> None:
    llm, shared = make_llm(num_pages=32, max_model_len=128), prompt(100)

    def cached() -> int:
        (output,) = llm.generate([shared + prompt(9)], settings())
        return output.num_cached_tokens

    with llm.pin_prefix(shared) as pinned:
        assert pinned.num_tokens == 96 and cached() == 0
        for number in range(6):
            llm.generate([prompt(100, seed=20 + number)], settings())
        assert cached() == 96 and llm.stats().num_pinned_pages == 6
        llm.suspend(kv="offload")
        llm.resume()
        assert cached() == 96
        with pytest.raises(StateError, match="pinned"):
            llm.reset()
        llm.update_weights(str(tiny))
        assert llm.stats().num_pinned_pages == 0 and cached() == 0 and cached() == 96
        witness("pinned", num_pinned_pages=llm.stats().num_pinned_pages)
    assert llm.stats().num_pinned_pages == 0 and llm.stats().num_free_pages == 32
    pinned.release()
    with pytest.raises(InvalidValue, match="page_size=16"):
        llm.pin_prefix([1, 2, 3])
    with pytest.raises(InvalidValue, match="can be pinned"):
        make_llm(num_pages=8, max_model_len=128).pin_prefix(shared)
    left = llm.pin_prefix(shared)
    llm.shutdown()
    left.release()


def test_pins_of_asyncio(make_async: MakeAsync) -> None:
    async def main() -> None:
        llm, shared = make_async(), prompt(70)
        async with await llm.pin_prefix({"prompt_token_ids": shared, "cache_salt": "X"}) as pinned:
            assert pinned.num_tokens == 64
            await llm.generate({"prompt_token_ids": shared, "cache_salt": "X"}, settings())
            assert (await llm.stats()).num_pinned_pages == 4
        assert (await llm.stats()).num_pinned_pages == 0
        with pytest.raises(InvalidValue, match=f"0 to {V - 1}"):
            await llm.pin_prefix([V] * 32)

    run_async(main())


# What it gains


@pytest.mark.alone
def test_a_shared_prefix_of_2000_tokens_multiplies_the_throughput(
    tmp_path: Path, one_thread: None, soak_factor: int
) -> None:
    """Tails of 64, 32 new tokens: 8 requests at least 3 times, in a soak 64 requests 8 times, cache on against off."""
    count, least = (8, 3.0) if soak_factor == 1 else (64, 8.0)
    model = make_tiny_llama(
        tmp_path, num_layers=4, max_position_embeddings=2200, hidden_size=256, intermediate_size=768
    )
    shared = prompt(2000)
    prompts = [shared + prompt(64, seed=1 + number) for number in range(count)]
    seconds, outputs = {}, {}
    for caching in (True, False):
        with LLM(str(model), num_pages=140 * count, enable_prefix_caching=caching) as llm:
            llm.generate([prompt(20)], settings())
            start = time.process_time()  # others use the machine too
            outputs[caching] = llm.generate(prompts, settings(max_tokens=32))
            seconds[caching] = time.process_time() - start
            num_cached = llm.stats().num_cached_tokens
            if caching:
                assert num_cached == 2000 * (count - 1)
                witness("shared-prefix", num_cached_tokens=num_cached, num_requests=count)
    for one, other in zip(outputs[True], outputs[False], strict=True):
        check_equal(one, other)
    gain = seconds[False] / seconds[True]
    witness("shared-prefix-gain", times=round(gain, 2))
    assert gain >= least, seconds
