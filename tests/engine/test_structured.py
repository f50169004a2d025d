"""Structured outputs through the faces: what was asked is what comes, whatever happens to the request on its way."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import LLM, InvalidValue, NothingToSample, SamplingParams, StructuredOutputsParams
from perdure.api import event as ev
from perdure.api.output import RequestOutput
from perdure.api.request import Request
from perdure.core.journal import replay
from perdure.core.stopping import TextCursor
from perdure.models.tiny import EOS_ID, make_tiny_llama
from perdure.runner.grammars import Grammars
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    SCORE_TOLERANCE,
    Brake,
    V,
    check_empty,
    check_equal,
    halted,
    in_thread,
    pressure,
    prompt,
    run_async,
    settings,
    until_stats,
    whole_rows,
)
from tests.engine.reference import Reference
from tests.engine.test_checkpoint import taken
from tests.structures import satisfies
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
LONG = "(?:[a-z ]{1,6},){12}"
"""Some fifty tokens of the tiny model."""
ASKED: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA, "disable_any_whitespace": True},
    "regex": {"regex": LONG},
    "choice": {"choice": ["the red one, please", "the green one, please", "none"]},
    "grammar": {"grammar": 'root ::= ("left " | "right " | "around ")+ "stop"'},
}


def asking(asked: dict[str, Any], **changes: Any) -> SamplingParams:
    """Drawn, scored, and ended by the model's end id; `settings` ignores it where a grammar goes on."""
    return settings(
        **{"temperature": 1.0, "seed": 3, "max_tokens": 120, "logprobs": 2, "ignore_eos": False, **changes},
        structured_outputs=asked,
    )


def check_asked(output: RequestOutput, asked: dict[str, Any]) -> None:
    """It ended as its grammar does, and its text is what was asked."""
    one = output.outputs[0]
    assert output.error is None and (one.finish_reason, one.stop_reason) == ("stop", None)
    assert one.token_ids[-1] == EOS_ID
    if "grammar" in asked:
        assert re.fullmatch("(left |right |around )+stop", one.text)
    else:
        assert satisfies(one.text, asked)


# Whatever happens


@DEPTHS
def test_structured_in_a_crowd_put_aside_and_computed_again(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """All four kinds beside free requests, in a pool that holds a few of them, in small chunks."""
    llm = make_llm(steps_in_flight=depth, num_pages=14, paused_pages=2, max_num_batched_tokens=24)
    cases = [
        (prompt(20 + at, seed=at), asked, asking(asked, temperature=temperature, seed=at))
        for at, (asked, temperature) in enumerate((a, t) for a in ASKED.values() for t in (0.0, 1.0))
    ]
    free = [(prompt(30, seed=50), settings(max_tokens=60)), (prompt(9, seed=51), settings(temperature=1.0, seed=2))]
    outputs = llm.generate(
        [*(ids for ids, _, _ in cases), *(ids for ids, _ in free)], [*(p for *_, p in cases), *(p for _, p in free)]
    )
    evicted = [pressure(output)[0] for output in outputs[: len(cases)]]
    for output, (ids, asked, params) in zip(outputs, cases):
        check_equal(output, solo(ids, params))
        if params.temperature > 0:
            check_asked(output, asked)
    for output, (ids, params) in zip(outputs[len(cases) :], free):
        check_equal(output, solo(ids, params))
    witness("structured-evicted", depth=depth, evicted=evicted)
    assert sum(evicted) > 0


@DEPTHS
def test_structured_goes_on_from_a_checkpoint_and_after_a_suspension(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """The grammar's place is found anew from the output's tokens."""
    here, there = make_llm(steps_in_flight=depth), make_llm(steps_in_flight=5 - depth, page_size=32, num_pages=8)
    params = asking(ASKED["regex"])
    truth = solo(prompt(37), params)
    for after in (1, 9, 30):
        found, _ = taken(here, prompt(37), params, after, end=True)
        (again,) = there.generate(type(found).from_bytes(found.to_bytes()))
        check_equal(again, truth)
        assert again.exact
        witness("structured-checkpoint", tokens_before=found.num_output + 1)
    brake = Brake(here._engine)
    brake.hold(after=11)
    call = in_thread(lambda: here.generate([prompt(37)], params))
    brake.wait_until_held()
    halted(here, brake, lambda: here.suspend("recompute"))
    here.resume()
    check_equal(call()[0], truth)


def test_structured_streams_in_parts(make_async: MakeAsync, solo: Solo) -> None:
    params = asking(ASKED["json"])

    async def main() -> None:
        handle = make_async().submit(prompt(12), params)
        parts = [part async for part in handle]
        result = await handle
        check_equal(result, solo(prompt(12), params))
        assert "".join(part.outputs[0].text for part in parts) == result.outputs[0].text and len(parts) > 5
        assert result.metrics is not None
        assert [event.kind for event in result.metrics.events][:4] == ["queued", "held", "released", "scheduled"]

    run_async(main())


def test_a_journal_of_structured_requests_replays(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Also in a core that has no grammars: what is allowed was decided beside it."""
    llm = make_llm(journal=str(tmp_path / "journal"))
    impossible = {"regex": r"[^\s\S]"}
    good, bad, free = llm.generate([prompt(12)] * 3, [asking(ASKED["json"]), asking(impossible), settings()])
    assert good.error is None and free.error is None and isinstance(bad.error, InvalidValue)
    llm.shutdown()

    def no_text(request: Request) -> TextCursor:
        raise AssertionError("no stop strings here")

    with (tmp_path / "journal").open("rb") as file:
        told = replay(file, no_text)
    ended = {e.record.request_id: e.record.token_ids for e in told if isinstance(e, ev.Ended)}
    assert ended == {output.request_id: output.outputs[0].token_ids for output in (good, free)}
    assert [e.request_id for e in told if isinstance(e, ev.Refused)] == [bad.request_id]


def test_several_samples_each_go_their_own_way(make_llm: MakeLLM, solo: Solo) -> None:
    """One grammar, compiled once; the first sample is the only one's."""
    asked = ASKED["json"]
    llm = make_llm(num_pages=9, paused_pages=0)
    (several,) = llm.generate([prompt(12)], asking(asked, n=4))
    texts = [one.text for one in several.outputs]
    assert len({*texts}) > 1 and all(satisfies(text, asked) for text in texts)
    alone = solo(prompt(12), asking(asked)).outputs[0]
    first = several.outputs[0]
    assert (first.text, first.token_ids) == (alone.text, alone.token_ids)
    witness("structured-samples", texts=len({*texts}))


# With other settings


def test_scores_are_the_models_and_those_of_what_is_left(make_llm: MakeLLM, reference: Reference) -> None:
    """Raw: as if nothing had been asked. Processed: the same over the ids that the grammar allows."""
    llm, ids = make_llm(), prompt(15)
    raw, processed = llm.generate(
        [ids] * 2, [asking(ASKED["json"], logprobs=-1, logprobs_mode=mode) for mode in ("raw", "processed")]
    )
    output = raw.outputs[0].token_ids
    assert output == processed.outputs[0].token_ids
    truth = torch.log_softmax(reference.logits([*ids, *output])[len(ids) - 1 : -1], -1)
    of_model, of_left = whole_rows(raw.outputs[0].logprobs), whole_rows(processed.outputs[0].logprobs)
    torch.testing.assert_close(of_model.double(), truth.double(), atol=SCORE_TOLERANCE, rtol=1e-5)
    left = of_left > float("-inf")
    assert left.sum(-1).max() < V and left[torch.arange(len(output)), torch.tensor(output)].all()
    within = torch.log_softmax(torch.where(left, truth, float("-inf")), -1)
    torch.testing.assert_close(of_left[left].double(), within[left].double(), atol=SCORE_TOLERANCE, rtol=1e-5)
    assert left[-1].nonzero().flatten().tolist() == [EOS_ID], "after the last brace there is nothing but the end"
    witness("structured-scores", least_left=int(left.sum(-1).min()), most_left=int(left.sum(-1).max()))


def test_structured_ends_where_nothing_else_follows_whatever_ignore_eos_says(make_llm: MakeLLM) -> None:
    """Ending in between is what `ignore_eos` excludes: then the output is as long as the grammar lets it be, however
    likely an end is."""
    llm = make_llm()
    wanted = {"logit_bias": {EOS_ID: 30.0}}
    asked = {"regex": "[a-z]{1,40}"}
    early, late = (
        llm.generate([prompt(8)] * 8, [asking(asked, seed=at, ignore_eos=ignores, **wanted) for at in range(8)])
        for ignores in (False, True)
    )
    assert {len(output.outputs[0].text) for output in late} == {40}
    assert min(len(output.outputs[0].text) for output in early) < 40
    for output in [*early, *late]:
        check_asked(output, asked)


def test_structured_with_all_that_changes_logits(make_llm: MakeLLM, solo: Solo) -> None:
    """Allowed ids, bad words, bias, penalties and a function of the caller's each take their part of what is left."""
    llm = make_llm()
    assert llm.tokenizer is not None
    a, b, c = (llm.tokenizer.encode(letter, False)[0] for letter in "abc")

    def no_b(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        logits[b] = float("-inf")
        return logits

    asked = {"regex": "[abc]{30}"}
    common: dict[str, Any] = {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "allowed_token_ids": [a, b, c, EOS_ID],
    }
    cases: list[tuple[dict[str, Any], set[str]]] = [
        ({}, set("abc")),
        ({"bad_words": [[a]]}, set("bc")),
        ({"logits_processors": no_b}, set("ac")),
        ({"logit_bias": {c: 100.0}}, set("c")),
        ({"min_tokens": 20}, set("abc")),
    ]
    for changes, letters in cases:
        params = asking(asked, **common, **changes)
        (output,) = llm.generate([prompt(8)], params)
        assert set(output.outputs[0].text) == letters and len(output.outputs[0].token_ids) == 31
        check_asked(output, asked)
        check_equal(output, solo(prompt(8), params))


def test_structured_stops_of_the_caller_cut_it(make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert llm.tokenizer is not None
    comma = llm.tokenizer.encode(",", False)[0]
    string, single, short = llm.generate(
        [prompt(8)] * 3,
        [
            asking(ASKED["regex"], stop=[","]),
            asking(ASKED["regex"], stop_token_ids=[comma]),
            asking(ASKED["regex"], max_tokens=5),
        ],
    )
    assert (string.outputs[0].finish_reason, string.outputs[0].stop_reason) == ("stop", ",")
    assert single.outputs[0].stop_reason == comma and single.outputs[0].token_ids[-1] == comma
    assert short.outputs[0].finish_reason == "length" and len(short.outputs[0].token_ids) == 5


@pytest.mark.parametrize(
    ("asked", "changes"),
    [
        ({"regex": "[0-9]{4}"}, {"allowed_token_ids": [EOS_ID]}),
        ({"choice": ["x"]}, {"min_tokens": 9}),
        ({"choice": ["xx"]}, {"bad_words": ["x"]}),
    ],
    ids=["allowed", "min_tokens", "bad_words"],
)
def test_structured_with_nothing_left_ends_alone(
    asked: dict[str, Any], changes: dict[str, Any], make_llm: MakeLLM, solo: Solo
) -> None:
    llm = make_llm()
    good = asking(ASKED["json"])
    one, two, three = llm.generate([prompt(8)] * 3, [good, asking(asked, **changes), settings()])
    assert isinstance(two.error, NothingToSample) and two.outputs[0].finish_reason == "error"
    assert "structured_outputs allows some ids here, the other settings none of them" in str(two.error)
    check_equal(one, solo(prompt(8), good))
    check_equal(three, solo(prompt(8), settings()))


# Refusals, and compiling beside the loop


def test_a_grammar_that_cannot_be_is_refused_alone(make_llm: MakeLLM, make_async: MakeAsync, solo: Solo) -> None:
    llm, bad = make_llm(), {"json": {"type": "string", "minLength": 3, "maxLength": 2}}
    named = r"structured_outputs\.json=.*minLength \(3\) is greater than maxLength \(2\)"
    with pytest.raises(InvalidValue, match=named):
        llm.generate(prompt(5), asking(bad))
    one, two = llm.generate([prompt(5)] * 2, [asking(bad), settings()], request_ids=["A", "B"])
    assert isinstance(one.error, InvalidValue) and not one.outputs[0].token_ids and one.request_id == "A"
    check_equal(two, solo(prompt(5), settings()))
    assert not llm._engine.resolved.runner.grammars._holds

    async def main() -> None:
        other = make_async()
        handle = other.submit(prompt(5), asking(bad))
        with pytest.raises(InvalidValue, match=named):
            await handle
        with pytest.raises(InvalidValue, match=named):
            async for _ in handle:
                raise AssertionError("a part of nothing")

    run_async(main())


def test_a_slow_grammar_holds_up_nobody(make_llm: MakeLLM, solo: Solo, monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is compiled others come and go, and it can be aborted; then it runs as if nothing had been."""
    llm, gate = make_llm(), threading.Event()
    grammars = llm._engine.resolved.runner.grammars
    compile_one = grammars._compile

    def slow(asked: StructuredOutputsParams) -> Any:
        assert gate.wait(60)
        return compile_one(asked)

    monkeypatch.setattr(grammars, "_compile", slow)
    params = [asking(ASKED["json"]), asking(ASKED["choice"])]
    calls = [
        in_thread(lambda one=one, name=name: llm.generate([prompt(8)], one, request_ids=[name]))
        for name, one in zip("AB", params)
    ]
    until_stats(llm, lambda stats: stats.num_waiting == 2)
    check_equal(llm.generate(prompt(9), settings())[0], solo(prompt(9), settings()))
    llm.abort("B")
    (aborted,) = calls[1]()
    assert aborted.outputs[0].finish_reason == "abort" and not aborted.outputs[0].token_ids
    stats = llm.stats()
    assert stats.num_waiting == 1 and stats.num_free_pages == stats.num_pages
    gate.set()
    check_equal(calls[0]()[0], solo(prompt(8), params[0]))
    witness("structured-beside-the-loop", waiting_meanwhile=stats.num_waiting)


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Patterns of a single letter are compiled until this is set, as it is in the end."""
    opened, compile_one = threading.Event(), Grammars._compile

    def compiled(grammars: Grammars, asked: StructuredOutputsParams) -> Any:
        if asked.kind == "regex" and len(asked.text) == 1:
            assert opened.wait(60)
        return compile_one(grammars, asked)

    monkeypatch.setattr(Grammars, "_compile", compiled)
    yield opened
    opened.set()


def test_closing_while_a_grammar_is_compiled(make_llm: MakeLLM, hanging: threading.Event) -> None:
    """Requests end with the engine, those whose grammar has begun and those whose grammar waits; it takes no time."""
    llm = make_llm()
    call = in_thread(lambda: llm.generate([prompt(8)] * 4, [asking({"regex": letter}) for letter in "abcd"]))
    until_stats(llm, lambda stats: stats.num_waiting == 4)
    begun = time.monotonic()
    llm.shutdown()
    seconds = time.monotonic() - begun
    assert {output.outputs[0].finish_reason for output in call()} == {"abort"}
    witness("structured-closing", seconds=round(seconds, 2))
    assert seconds < 3


def test_a_grammar_that_takes_too_long_fails_alone(make_llm: MakeLLM, solo: Solo, hanging: threading.Event) -> None:
    """More of them than there are threads at first."""
    llm, good = make_llm(grammar_timeout_s=0.5), asking(ASKED["json"])
    call = in_thread(lambda: llm.generate([prompt(8)] * 3, [asking({"regex": letter}) for letter in "abc"]))
    until_stats(llm, lambda stats: stats.num_waiting == 3)
    check_equal(llm.generate([prompt(8)], good)[0], solo(prompt(8), good))
    for output, letter in zip(call(), "abc"):
        assert isinstance(output.error, InvalidValue) and not output.outputs[0].token_ids
        assert f"structured_outputs.regex='{letter}': not compiled within grammar_timeout_s=0.5" in str(output.error)
    check_equal(llm.generate([prompt(9)], settings())[0], solo(prompt(9), settings()))
    check_empty(llm._engine)
    witness("structured-given-up", given_up=3)


@pytest.mark.parametrize("max_tokens", [0, 1, None])
def test_a_wrong_grammar_is_refused_whatever_is_drawn(max_tokens: int | None, make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidValue, match="unclosed character class"):
        llm.generate(prompt(5), asking({"regex": "[a-z"}, max_tokens=max_tokens))
    (scored,) = llm.generate(prompt(5), asking(ASKED["json"], max_tokens=0, prompt_logprobs=0))
    assert scored.outputs[0].finish_reason == "length" and not scored.outputs[0].token_ids
    assert scored.prompt_logprobs is not None and len(scored.prompt_logprobs) == 5


def test_a_model_without_a_tokenizer_or_an_end(tmp_path: Path, make_llm: MakeLLM) -> None:
    for name in ("tokenizer", "end"):
        directory = make_tiny_llama(tmp_path / name)
        if name == "tokenizer":
            for file in directory.glob("tokenizer*"):
                file.unlink()
        else:
            for file in ("config.json", "generation_config.json"):
                known = json.loads((directory / file).read_text())
                (directory / file).write_text(json.dumps({**known, "eos_token_id": None}))
        with pytest.raises(InvalidValue, match=f"structured_outputs .* {name}"):
            make_llm(directory).generate(prompt(5), asking(ASKED["json"], detokenize=False))


def test_ids_that_the_tokenizer_lacks_are_never_drawn(tmp_path: Path, make_llm: MakeLLM) -> None:
    """Logits wider than the tokenizer, and the padding's far above all others."""
    directory = make_tiny_llama(tmp_path, vocab_size=600)
    llm = make_llm(directory)
    assert llm.tokenizer is not None and llm.tokenizer.vocab_size < 600
    padding = range(llm.tokenizer.vocab_size, 600)
    (output,) = llm.generate([prompt(8)], asking(ASKED["json"], logit_bias=dict.fromkeys(padding, 1000.0)))
    check_asked(output, ASKED["json"])
    witness("structured-padding", padding_ids=len(padding))


# SmolLM2

TOPICS = (
    "a friendly dog", "the city of Paris", "a broken phone", "your favourite book", "the planet Mars",
    "a cheap restaurant", "a famous singer", "a rainy day", "a new laptop", "an old bridge",
)  # fmt: skip
SCHEMAS: dict[str, dict[str, Any]] = {
    "review": {
        "type": "object",
        "properties": {
            "sentiment": {"enum": ["positive", "neutral", "negative"]},
            "stars": {"type": "integer", "minimum": 1, "maximum": 5},
            "reason": {"type": "string", "minLength": 1, "maxLength": 60},
        },
        "required": ["sentiment", "stars", "reason"],
        "additionalProperties": False,
    },
    "record": {
        "type": "object",
        "properties": {
            "title": {"type": "string", "maxLength": 30},
            "code": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
            "price": {"anyOf": [{"type": "null"}, {"type": "integer", "minimum": 0, "maximum": 9999}]},
            "in_stock": {"type": "boolean"},
        },
        "required": ["title", "code", "price", "in_stock"],
        "additionalProperties": False,
    },
    "list": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {"word": {"type": "string", "maxLength": 14}, "good": {"type": "boolean"}},
            "required": ["word"],
            "additionalProperties": False,
        },
        "minItems": 1,
        "maxItems": 3,
    },
}


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), num_pages=600, max_model_len=512, max_num_seqs=16) as llm:
        yield llm
        check_empty(llm._engine)


def test_structured_answers_of_smollm2_validate(smollm2: LLM, soak_factor: int) -> None:
    """10 prompts (soak: 200) by 3 schemas, greedy and drawn: what ends in `stop` validates, and nearly all do."""
    num_prompts = 10 if soak_factor == 1 else 200
    conversations, params, kinds = [], [], []
    for at in range(num_prompts):
        for number, kind in enumerate(SCHEMAS):
            question = f"Write about {TOPICS[at % len(TOPICS)]} (number {at + 1}) as a JSON {kind}."
            conversations.append([{"role": "user", "content": question}])
            greedy = (at + number) % 2 == 0
            params.append(
                SamplingParams(
                    temperature=0.0 if greedy else 0.8,
                    seed=at,
                    max_tokens=160,
                    logprobs=0,
                    structured_outputs=StructuredOutputsParams(json=SCHEMAS[kind]),
                )
            )
            kinds.append(kind)
    outputs = smollm2.chat(conversations, params)
    stopped = 0
    for output, kind in zip(outputs, kinds):
        assert output.error is None
        if output.outputs[0].finish_reason == "stop":
            stopped += 1
            assert satisfies(output.outputs[0].text, {"json": SCHEMAS[kind]}), output.outputs[0].text
    witness("structured-smollm2", validated=stopped, of=len(outputs))
    assert stopped >= 0.95 * len(outputs)
    for at in (0, 1):  # one greedy, one drawn
        check_equal(smollm2.chat(conversations[at], params[at])[0], outputs[at])


@pytest.mark.alone
def test_masks_cost_little_of_a_step(smollm2: LLM, soak_factor: int) -> None:
    """The same prompts to the same length, in turns, eight at once; each side by the best of its turns, in time of all
    its threads on a processor, which others on the machine take no part of."""
    story = {"type": "array", "items": {"type": "string", "minLength": 20, "maxLength": 60}, "minItems": 20}
    common: dict[str, Any] = {"temperature": 0.8, "seed": 1, "max_tokens": 24, "ignore_eos": True}
    masked = SamplingParams(**common, structured_outputs={"json": story})
    plain = SamplingParams(**common)
    prompts = [prompt(40, seed=at) for at in range(8)]
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * (3 if soak_factor == 1 else 8)):
        is_masked = turn % 2 == 0
        start = time.process_time()
        outputs = smollm2.generate(prompts, masked if is_masked else plain)
        seconds[is_masked].append(time.process_time() - start)
        assert {len(output.outputs[0].token_ids) for output in outputs} == {24}
    ratio = min(seconds[True]) / min(seconds[False])
    witness("structured-cost", times_a_plain_step=round(ratio, 3))
    assert ratio < (1.5 if soak_factor == 1 else 1.15)
