"""T14, T15 and T18 to T23 through the faces: what fits, what is refused, and whose failure it is."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from perdure import InvalidValue, MaxSequenceLengthOverflow, SamplingParams
from perdure.api import command as cmd
from perdure.api.event import Event, Refused
from perdure.api.request import Request
from perdure.engine.llm import Call
from perdure.models.tiny import BOS_ID, make_tiny_llama
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    Brake,
    L,
    V,
    check_equal,
    check_reference,
    in_thread,
    pressure,
    prompt,
    run_async,
    settings,
    until,
)
from tests.engine.reference import Reference
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2])
A_PROMPT = [5, 6, 7, 8]
NAMING_IDS: dict[str, Callable[[int], Any]] = {
    "stop_token_ids": lambda bad: [3, bad],
    "stop_token_sequences": lambda bad: [[1], [2, bad]],
    "logit_bias": lambda bad: {0: 1.0, bad: 1.0} if bad > 0 else {bad: 1.0},
    "allowed_token_ids": lambda bad: [3, bad],
    "bad_words": lambda bad: [[1], [2, bad]],
    "logprob_token_ids": lambda bad: [3, bad],
    "forced_token_ids": lambda bad: [3, bad],
}
"""Settings that name ids, with a wrong one among them."""
OUTSIDE = pytest.mark.parametrize("bad", [-1, V, 2**31, 2**63 - 1])


@pytest.fixture(scope="session")
def without_bos(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M with a tokenizer that adds nothing to a text."""
    directory = tmp_path_factory.mktemp("without-bos") / "model"
    shutil.copytree(tiny, directory)
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    (directory / "tokenizer.json").write_text(json.dumps({**tokenizer, "post_processor": None}))
    return directory


@DEPTHS
def test_T14_no_live_lock(depth: int, make_llm: MakeLLM, reference: Reference, solo: Solo) -> None:
    """12 pages, two requests of 11 each: both end, equal to their solo runs, in a bounded number of steps."""
    llm = make_llm(num_pages=12, steps_in_flight=depth)
    prompts, params = [prompt(16), prompt(16, 1)], settings(max_tokens=160)
    outputs = llm.generate(prompts, params)
    num_evictions = sum(pressure(output)[0] for output in outputs)
    witness("T14", num_evictions=num_evictions)
    for output, ids in zip(outputs, prompts):
        check_reference(output, ids, reference)
        check_equal(output, solo(ids, params))
    assert llm.stats().num_steps <= 2 * 160 + 2 * num_evictions


@DEPTHS
def test_T15_what_can_never_fit_is_refused_and_blocks_nobody(
    depth: int, make_llm: MakeLLM, reference: Reference
) -> None:
    """8 pages are 128 tokens. A (200) is refused within a second, with need and capacity; C is clipped to 28. Twice."""
    llm = make_llm(num_pages=8, steps_in_flight=depth)
    prompts = [prompt(200), prompt(20), prompt(100)]
    for _ in range(2):
        begin = time.monotonic()
        with pytest.raises(InvalidValue, match="201 tokens, the KV pool holds 128"):
            llm.generate(prompts[0], settings())
        assert time.monotonic() - begin < 1
        never, other, clipped = llm.generate(prompts, settings(max_tokens=100))
        assert isinstance(never.error, InvalidValue) and never.outputs[0].finish_reason == "error"
        assert never.outputs[0].token_ids == []
        for output, ids, count in ((other, prompts[1], 100), (clipped, prompts[2], 28)):
            check_reference(output, ids, reference)
            assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (count, "length")


def test_T18_each_call_gets_its_own_failures(make_llm: MakeLLM, reference: Reference) -> None:
    """Two threads, one with an invalid prompt: each gets its own results, in its order; the other hears nothing."""
    llm = make_llm()
    brake = Brake(llm._engine)
    for round_ in range(5):
        brake.hold(after=2)
        mine, yours = [[V], A_PROMPT], [prompt(6, round_), prompt(7, round_)]
        one = in_thread(lambda: llm.generate(mine, settings(), request_ids=[9, 10]))  # noqa: B023
        two = in_thread(lambda: llm.generate(yours, settings(), request_ids=[0, 1]))  # noqa: B023
        brake.release()
        bad, good = one()
        assert (bad.request_id, good.request_id) == (9, 10)
        assert bad.outputs[0].finish_reason == "error" and bad.outputs[0].token_ids == []
        assert "prompt_token_ids[0]=512" in str(bad.error)
        check_reference(good, A_PROMPT, reference)
        others = two()
        assert [output.request_id for output in others] == [0, 1]
        for output, ids in zip(others, yours):
            check_reference(output, ids, reference)

    num_steps = llm.stats().num_steps
    outputs = llm.generate([[-1], [], [V, 1]], settings())
    assert all(output.outputs[0].finish_reason == "error" for output in outputs)
    assert llm.stats().num_steps == num_steps, "a call with nothing valid reached the device"


def test_T18_a_live_id_fails_in_the_call_that_came_second(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    brake = Brake(llm._engine)
    brake.hold(after=2)
    first = in_thread(lambda: llm.generate([A_PROMPT], settings(), request_ids=[3]))
    brake.wait_until_held()
    second = in_thread(lambda: llm.generate([prompt(5), prompt(6)], settings(), request_ids=[3, 4]))
    brake.release()
    (kept,), (refused, other) = first(), second()
    check_reference(kept, A_PROMPT, reference)
    check_reference(other, prompt(6), reference)
    assert "request_id=3 is live" in str(refused.error)


def test_T19_an_empty_text_is_bos_where_the_tokenizer_has_one(make_llm: MakeLLM, reference: Reference) -> None:
    llm = make_llm()
    (output,) = llm.generate("", settings(return_prompt=True))
    assert output.prompt_token_ids == [BOS_ID]
    check_reference(output, [BOS_ID], reference)
    texts = ["a", "", "b"]
    for output, text in zip(llm.generate(texts, settings(return_prompt=True)), texts):
        assert output.prompt_token_ids is not None and output.prompt_token_ids[0] == BOS_ID
        check_reference(output, output.prompt_token_ids, reference)
        assert output.prompt == text


def test_T19_an_empty_prompt_is_refused_alone(
    without_bos: Path, make_llm: MakeLLM, make_async: MakeAsync, reference: Reference
) -> None:
    """A text without BOS, and no ids: an error of that item only; as a bare prompt it is raised. [] is no prompt."""
    llm = make_llm(tokenizer=str(without_bos))
    empties: tuple[str | list[int], ...] = ("", [])
    for empty in empties:
        outputs = llm.generate(["a", empty, "b"], settings(return_prompt=True))
        assert [output.outputs[0].finish_reason for output in outputs] == ["length", "error", "length"]
        assert isinstance(outputs[1].error, InvalidValue) and "empty" in str(outputs[1].error)
        for output in (outputs[0], outputs[2]):
            assert output.prompt_token_ids is not None and BOS_ID not in output.prompt_token_ids
            check_reference(output, output.prompt_token_ids, reference)
    assert llm.generate([], settings()) == []
    with pytest.raises(InvalidValue, match="empty"):
        llm.generate("", settings())
    with pytest.raises(InvalidValue, match="empty"):
        llm.generate({"prompt_token_ids": []}, settings())

    async def main() -> None:
        handle = make_async().submit([], settings())
        with pytest.raises(InvalidValue, match="empty"):
            await handle
        with pytest.raises(InvalidValue, match="empty"):
            [part async for part in handle]

    run_async(main())


@OUTSIDE
@pytest.mark.parametrize("field", ["prompt_token_ids", *NAMING_IDS])
def test_T20_an_id_out_of_range_is_refused_beside_a_neighbour(
    field: str, bad: int, make_llm: MakeLLM, solo: Solo
) -> None:
    """The error names field and value; a neighbour submitted with it is bit-identical to its solo run."""
    ids = [4, bad] if field == "prompt_token_ids" else [4, 5]
    params = settings(**{field: NAMING_IDS[field](bad)}) if field in NAMING_IDS else settings()
    neighbour = settings(logprobs=5, prompt_logprobs=2)
    refused, beside = make_llm().generate([ids, prompt(20)], [params, neighbour])
    assert isinstance(refused.error, InvalidValue)
    assert field in str(refused.error) and f"={bad} " in str(refused.error)
    check_equal(beside, solo(prompt(20), neighbour))


def test_T20_keys_that_are_strings_are_ids_too(make_llm: MakeLLM, solo: Solo) -> None:
    refused, valid = make_llm().generate([[4, 5]] * 2, [settings(logit_bias={key: 2}) for key in (str(V), "0")])
    assert isinstance(refused.error, InvalidValue) and f"logit_bias: id={V} " in str(refused.error)
    check_equal(valid, solo([4, 5], settings(logit_bias={0: 2})))


def test_T20_an_id_between_tokenizer_and_logits_is_valid(
    make_llm: MakeLLM, reference: Reference, tmp_path: Path
) -> None:
    """The width of the logits is the limit: what the tokenizer has no text for may be given, stopped at, and scored."""
    llm = make_llm(tokenizer=str(make_tiny_llama(tmp_path, vocab_size=300)))
    assert llm.tokenizer is not None
    size, last = llm.tokenizer.vocab_size, llm.vocab_size - 1
    assert size == 300 and last == V - 1
    output, scored = llm.generate(
        [[5, size, last]] * 2,
        [
            settings(stop_token_ids=[last], stop_token_sequences=[[size, size]]),
            settings(max_tokens=0, prompt_logprobs=V),
        ],
    )
    check_reference(output, [5, size, last], reference)
    assert scored.prompt_logprobs is not None and scored.prompt_logprobs.token_ids.tolist() == [size, last]


@pytest.mark.parametrize("length", [255, 256, 257])
@pytest.mark.parametrize("max_tokens", [None, 1, 5])
def test_T21_the_length_limit(
    length: int, max_tokens: int | None, make_llm: MakeLLM, make_async: MakeAsync, reference: Reference
) -> None:
    """255: exactly one token. 256 and 257: refused with limit and length, without a forward. The next one works."""
    llm = make_llm()
    ids, params = prompt(length), settings(max_tokens=max_tokens)
    if length == 255:
        (output,) = llm.generate(ids, params)
        assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (1, "length")
        check_reference(output, ids, reference)
        return
    with pytest.raises(MaxSequenceLengthOverflow, match=f"the prompt has {length} tokens, max_model_len is {L}"):
        llm.generate(ids, params)
    assert llm.stats().num_steps == 0

    async def main() -> None:
        with pytest.raises(MaxSequenceLengthOverflow):
            await make_async().generate(ids, params)

    run_async(main())
    (after,) = llm.generate([A_PROMPT], settings())
    check_reference(after, A_PROMPT, reference)


def test_T21_scoring_may_fill_the_limit_and_tokens_are_clipped_to_it(
    make_llm: MakeLLM, make_async: MakeAsync, reference: Reference
) -> None:
    """256 with max_tokens=0 is allowed, 257 is not; 250 + 100 gives 6 tokens, reason length, on every face."""
    llm = make_llm()
    scored, refused, clipped = llm.generate(
        [prompt(256), prompt(257), prompt(250)],
        [settings(max_tokens=0, prompt_logprobs=0)] * 2 + [settings(max_tokens=100)],
    )
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == L
    assert isinstance(refused.error, MaxSequenceLengthOverflow)

    async def main() -> None:
        output = await make_async().generate(prompt(250), settings(max_tokens=100))
        check_equal(output, clipped)

    run_async(main())
    assert (len(clipped.outputs[0].token_ids), clipped.outputs[0].finish_reason) == (6, "length")
    check_reference(clipped, prompt(250), reference)


@pytest.mark.parametrize(("max_tokens", "count"), [(None, 236), (0, 0), (1, 1), (2**31, 236)])
def test_T22_max_tokens(max_tokens: int | None, count: int, make_llm: MakeLLM, reference: Reference) -> None:
    """None is up to the limit, 0 scores the prompt only, too much is clipped; the reason is always length."""
    llm, ids = make_llm(), prompt(20)
    (output,) = llm.generate([ids], settings(max_tokens=max_tokens, prompt_logprobs=0))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (count, "length")
    assert output.prompt_logprobs is not None and len(output.prompt_logprobs) == 20
    check_reference(output, ids, reference)


@pytest.mark.parametrize("value", [-1, "5", 1.5, True])
def test_T22_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidValue, match="max_tokens"):
        SamplingParams(max_tokens=value)


def test_T23_omitted_settings_are_fresh_defaults(make_llm: MakeLLM) -> None:
    """Without settings: temperature 1, no scores, up to the limit or an end id. Two calls differ: no seed is shared."""
    llm = make_llm(max_model_len=32)
    outputs = llm.generate([A_PROMPT] * 2) + llm.generate([A_PROMPT] * 2)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 4
    for output in outputs:
        assert output.outputs[0].logprobs is None and output.prompt_logprobs is None
        assert output.outputs[0].finish_reason == ("stop" if len(output.outputs[0].token_ids) < 28 else "length")


def test_T23_a_shared_object_is_never_changed(make_llm: MakeLLM, reference: Reference) -> None:
    """One object for four requests, with lists the caller keeps and changes afterwards."""
    llm = make_llm()
    prompts = [prompt(5, seed) for seed in range(4)]
    truth = reference(prompts[0], 24).token_ids
    stops, sequences = [truth[20]], [[401, 402]]
    params = settings(stop_token_ids=stops, stop_token_sequences=sequences, max_tokens=24, min_tokens=2)
    twin = settings(stop_token_ids=[truth[20]], stop_token_sequences=[[401, 402]], max_tokens=24, min_tokens=2)
    brake = Brake(llm._engine)
    brake.hold(after=3)
    call = in_thread(lambda: llm.generate(prompts, params))
    brake.wait_until_held()
    stops.clear()
    sequences[0].append(1)
    brake.release()
    outputs = call()
    assert params == twin
    with pytest.raises(AttributeError):
        params.temperature = 1.0  # type: ignore[misc]
    again = llm.generate(prompts, twin)
    for output, other, ids in zip(outputs, again, prompts):
        check_equal(output, other)
        check_reference(output, ids, reference)
    assert outputs[0].outputs[0].finish_reason == "stop", "the cleared list did not count"


def test_T23_a_list_of_another_length_is_refused(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidValue, match="sampling_params has 2 entries for 3 prompts"):
        llm.generate([[1], [2], [3]], [settings()] * 2)
    with pytest.raises(InvalidValue, match="sampling_params='x' is neither a SamplingParams nor a list of them"):
        llm.generate([[1], [2]], "x")  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="request_ids has 1 entries for 2 prompts"):
        llm.generate([[1], [2]], settings(), request_ids=["one"])


def test_an_id_that_can_be_none_is_refused_alone(make_llm: MakeLLM) -> None:
    llm = make_llm()
    given: list[Any] = ["a", 1.5, None, True, 10**5000]
    results = llm.generate([A_PROMPT] * 5, settings(max_tokens=2), request_ids=given)
    assert [len(result.outputs[0].token_ids) for result in results] == [2, 0, 2, 0, 0]
    for result, shown in zip(results, (None, "1.5", None, "True", "<int of 16610 bits>"), strict=True):
        message = f"request_id={shown} is neither" if shown != "<int of 16610 bits>" else f"request_id={shown} fits"
        assert (result.error is None) == (shown is None) and (shown is None or message in str(result.error))
    assert results[0].request_id == "a" and len({result.request_id for result in results}) == 5
    with pytest.raises(InvalidValue, match=r"request_id=1\.5 is neither"):
        llm.generate("a", settings(), request_ids=[1.5])  # type: ignore[list-item]


@DEPTHS
@pytest.mark.parametrize("wrong", ["too long", "never fits", "out of range", "live id", "suspended"])
def test_s12_an_invalid_request_gets_one_reply_and_leaves_no_entry(
    wrong: str, depth: int, make_llm: MakeLLM, solo: Solo
) -> None:
    """The reply comes by itself: the engine takes no step for it, then or later, and counts it nowhere."""
    llm = make_llm(num_pages=8, steps_in_flight=depth)
    engine, params = llm._engine, settings(temperature=1.0, max_tokens=6)
    scheduler, loop = engine._loop.scheduler, engine._loop
    others = 0
    if wrong == "live id":
        llm.pause()  # nobody steps for the live one either
        call = in_thread(lambda: llm.generate([A_PROMPT], params, request_ids=["A"]))
        until(lambda: scheduler.num_live == 1)
        others = 1
    elif wrong == "suspended":
        llm.suspend()
    told: list[Event] = []
    publish = loop._publish
    loop._publish = lambda events, time: (told.extend(events), publish(events, time))[1]
    ids = {"too long": prompt(L + 1), "never fits": prompt(200), "out of range": [1, V]}.get(wrong, A_PROMPT)
    wanted = cmd.Submit(Request("A", engine.ticket(), ids, params))
    waiting = Call()
    engine.submit([(wanted, waiting.receiver(wanted))])
    end = waiting.wait(1)[wanted.request.ticket]
    stats = llm.stats()
    replies = [event for event in told if event.ticket == wanted.request.ticket]
    assert replies == [end] and isinstance(end, Refused) and end.request_id == "A"
    entries = (
        len(scheduler.requests.states),
        len(scheduler.requests.live),
        len(scheduler.requests.waiting),
        len(engine._receivers),
    )
    assert entries == (others,) * 4
    assert (stats.num_steps, stats.num_requests, stats.num_free_pages) == (0, others, stats.num_pages)
    witness("s12", num_replies=len(replies), error=end.failure.kind, message=end.failure.message)
    llm.resume()
    (output,) = call() if others else llm.generate([A_PROMPT], params, request_ids=["A"])
    check_equal(output, solo(A_PROMPT, params))  # which is the first of its engine: its seed is that of arrival 0
    assert llm.stats().num_requests == 1 and waiting.wait(1) == {wanted.request.ticket: end}


def test_an_integer_too_long_to_be_written_is_refused_like_any_other(make_llm: MakeLLM) -> None:
    """Python has no text of 10,000 digits: the message says how many bits it has. Its neighbours run."""
    llm, huge = make_llm(), 10**5000
    prompts: list[Any] = [
        [huge],
        [1],
        {"prompt": huge},
        {"prompt_token_ids": huge},
        {huge: 1},
        {"prompt_token_ids": [huge]},
    ]
    results = llm.generate(prompts, settings(max_tokens=1))
    assert [result.error is None for result in results] == [False, True, False, False, False, False]
    assert all(isinstance(result.error, InvalidValue) for result in results if result.error is not None)
    assert "prompt_token_ids[0]=<int of 16610 bits>" in str(results[0].error)
    for call in (
        lambda: llm.generate("a", request_ids=[huge]),
        lambda: llm.generate([[1]], request_ids={huge}),  # type: ignore[arg-type]
        lambda: llm.generate(huge),  # type: ignore[arg-type]
        lambda: llm.abort(huge),
        lambda: llm.checkpoint(huge),
        lambda: llm.update_weights(None, epoch=huge),
    ):
        with pytest.raises(InvalidValue, match=r"<(int of 16610 bits|set)>"):
            call()
