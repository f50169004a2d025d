"""T51, T52 and logits processors on M: what is done to logits before temperature, at any depth, after any eviction."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from perdure import LLM, InvalidValue, NothingToSample, SamplingParams
from perdure.api.plan import StepPlan
from perdure.core.journal import replay
from perdure.core.stopping import TextCursor
from perdure.engine.spelling import text_cursor
from perdure.ops import sampling_reference as oracle
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import V, check_equal, constant_model, pressure, prompt, run_async, settings, whole_rows
from tests.engine.reference import Reference
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])
PENALTIES: dict[str, Any] = {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2}
TOLERANCE = 2e-4  # the reference's logits, penalised: between two right programs, fp32


# T51


def check_history(llm_scores: torch.Tensor, ids: list[int], output: list[int], reference: Reference) -> None:
    """Processed scores of the whole vocabulary at temperature 1 against float64 from the true history."""
    raw = reference.logits([*ids, *output])[len(ids) - 1 : -1].numpy()
    for index, row in enumerate(raw):
        truth = oracle.log_softmax(oracle.adjusted(row, ids, output[:index], **PENALTIES))
        assert np.abs(llm_scores[index].numpy() - truth).max() < TOLERANCE


@DEPTHS
@pytest.mark.parametrize("budget", [512, 16])
def test_T51_penalties_count_the_true_history(
    budget: int, depth: int, make_llm: MakeLLM, solo: Solo, reference: Reference
) -> None:
    """Penalised requests start while others run, are put aside for want of pages, and come again: at each step the
    logits are those of a computation from the whole history, and ids and scores have the bits of an undisturbed run."""
    llm = make_llm(steps_in_flight=depth, num_pages=9, paused_pages=0, max_num_batched_tokens=budget)
    whole = {"logprobs": -1, "logprobs_mode": "processed", "temperature": 1.0}
    params = [
        settings(max_tokens=60, temperature=1.0, seed=1),
        settings(max_tokens=40, seed=3, **PENALTIES, **whole),
        settings(max_tokens=30, **PENALTIES),
        settings(max_tokens=24, seed=4, bad_words=[[n] for n in range(9)], **PENALTIES, **whole),
    ]
    prompts = [prompt(20), [7, 7, 8, 7, 9] * 4, [5] * 17, prompt(9)]
    outputs = llm.generate(prompts, params)
    num_evictions = sum(pressure(output)[0] for output in outputs[1:])
    witness("T51", num_evictions_of_penalised=num_evictions)
    for output, ids, one in zip(outputs, prompts, params):
        check_equal(output, solo(ids, one))
    ids, output = outputs[1].outputs[0].token_ids, outputs[1].outputs[0]
    check_history(whole_rows(output.logprobs), prompts[1], ids, reference)
    assert len(ids) > 8


# T52, bad words


def constant(make_llm: MakeLLM, tmp_path: Path, logits: list[float], **config: Any) -> LLM:
    return make_llm(constant_model(tmp_path / "constant", logits), **config)


def ids_of(llm: LLM, prompt_ids: list[int], **asked: Any) -> list[int]:
    (output,) = llm.generate([prompt_ids], settings(**{"temperature": 1.0, "seed": 5, "max_tokens": 100, **asked}))
    assert output.error is None
    return output.outputs[0].token_ids


def test_T52_bias_and_allowed_ids(make_llm: MakeLLM, tmp_path: Path) -> None:
    """+100 on 7: only 7. -100 on the best: never it. {3, 4} allowed: only they. Keys as strings. A neighbour is left
    alone, and drawn and greedy rows stand side by side."""
    logits = [0.0] * V
    logits[100] = 3.0
    llm = constant(make_llm, tmp_path, logits)
    drawn = {"temperature": 1.0, "seed": 5, "max_tokens": 50}
    asked: list[dict[str, Any]] = [
        {"logit_bias": {7: 100}},
        {"logit_bias": {"7": 100}},
        {"logit_bias": {100: -100.0}},
        {"allowed_token_ids": [3, 4]},
        {"allowed_token_ids": [4, 3], "temperature": 0.0},
        {},
    ]
    outputs = llm.generate([[1]] * len(asked), [settings(**{**drawn, **one}) for one in asked])
    up, text, down, some, greedy, neighbour = ({*output.outputs[0].token_ids} for output in outputs)
    assert up == text == {7} and 100 not in down and len(down) > 20 and some == {3, 4} and greedy == {3}
    (alone,) = llm.generate([[1]], settings(**drawn))
    check_equal(outputs[5], alone)
    assert 100 in neighbour
    witness("T52", ids_of_the_neighbour=len(neighbour))


def test_T52_raw_scores_know_nothing_of_a_bias_and_processed_ones_do(make_llm: MakeLLM, tmp_path: Path) -> None:
    logits = torch.randn(V, generator=torch.Generator().manual_seed(3))
    llm = constant(make_llm, tmp_path, logits.tolist())
    asked = {"logit_bias": {9: 2.5}, "allowed_token_ids": [9, 10, 11], "temperature": 1.0, "seed": 1, "logprobs": -1}
    raw, processed = llm.generate([[1]] * 2, [settings(**asked, logprobs_mode=mode) for mode in ("raw", "processed")])
    assert raw.outputs[0].token_ids == processed.outputs[0].token_ids
    truth = logits.double().log_softmax(0)
    assert (whole_rows(raw.outputs[0].logprobs)[0] - truth).abs().max() < 1e-5
    left = oracle.log_softmax(oracle.adjusted(logits, [], [], logit_bias={9: 2.5}, allowed_token_ids=[9, 10, 11]))
    found = whole_rows(processed.outputs[0].logprobs)[0].numpy()
    assert np.array_equal(np.isfinite(found), np.isfinite(left))
    assert np.abs(found[9:12] - left[9:12]).max() < 1e-5


def test_bad_words_are_never_completed(make_llm: MakeLLM, tmp_path: Path) -> None:
    """A single id never comes; of a sequence only the last id is kept back, and only after the others, even where
    these are the prompt's end."""
    logits = [-20.0] * V
    logits[5] = logits[6] = logits[7] = logits[8] = 0.0
    llm = constant(make_llm, tmp_path, logits)
    ids = ids_of(llm, [1, 5, 5], bad_words=[[8], [5, 5, 6], [7, 5]])
    assert ids[0] != 6 and {*ids} == {5, 6, 7}
    triples = {*zip(ids, ids[1:], ids[2:])}
    assert (5, 5, 6) not in triples and (7, 5) not in {*pairwise(ids)} and (6, 5, 6) in triples


def test_bad_words_may_be_text(make_llm: MakeLLM, tmp_path: Path) -> None:
    """Spelled by the tokenizer, where a text begins and after a space."""
    llm = constant(make_llm, tmp_path, [0.0] * V)
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    spelled = [tokenizer.encode(text, add_special_tokens=False) for text in ("he", " he")]
    free = llm.generate([[1]], settings(temperature=1.0, seed=5, max_tokens=250))[0].outputs[0].token_ids
    two = [free[10], free[11]]
    words: list[Any] = ["he", two]
    banned = ids_of(llm, [1], bad_words=words, max_tokens=250)
    for word in [*spelled, two]:
        assert tuple(word) not in {*zip(*(banned[at:] for at in range(len(word))))}
    only_two = ids_of(llm, [1], bad_words=[two], max_tokens=250)
    assert only_two[:11] == free[:11] and only_two[11] != free[11]


def test_settings_that_leave_nothing_are_refused_or_fail_alone(make_llm: MakeLLM, solo: Solo) -> None:
    """Known before: refused by name. Known at a step: that request fails, its neighbour does not notice."""
    llm = make_llm()
    for wrong in ({"bad_words": [[3], [4]]}, {"stop_token_ids": [3, 4], "min_tokens": 2}):
        with pytest.raises(InvalidValue, match=r"allowed_token_ids=\[3, 4\].* none could be sampled"):
            llm.generate(prompt(5), settings(allowed_token_ids=[3, 4], **wrong))
    one = settings(allowed_token_ids=[3, 4], bad_words=[[3, 3], [4, 3], [3, 4], [4, 4]])
    failed, other = llm.generate([prompt(5), prompt(6)], [one, settings()])
    assert failed.outputs[0].finish_reason == "error" and len(failed.outputs[0].token_ids) == 1
    assert isinstance(failed.error, NothingToSample) and "leaves no usable logits" in str(failed.error)
    check_equal(other, solo(prompt(6), settings()))


# Logits processors


Histories = list[tuple[Sequence[int], Sequence[int]]]


def without_repeats(seen: Histories) -> Callable[[Sequence[int], Sequence[int], torch.Tensor], torch.Tensor]:
    """A processor that lets no id come twice, and notes the histories it was shown."""

    def processor(prompt_ids: Sequence[int], output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        seen.append((prompt_ids, output_ids))
        logits[[*prompt_ids, *output_ids]] = -math.inf
        return logits

    return processor


def only_even(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """A processor that can be found by name; gives a tensor of its own."""
    return torch.where(torch.arange(len(logits)) % 2 == 0, logits, -math.inf)


@contextmanager
def in_flight_of(llm: LLM) -> Iterator[dict[int, int]]:
    """The most steps that each request, by arrival, had in flight."""
    scheduler, most = llm._engine._loop.scheduler, dict[int, int]()
    plan = scheduler.plan

    def watched(most_steps: int) -> StepPlan | None:
        made = plan(most_steps)
        for arrival in made.request if made is not None else ():
            most[arrival] = max(most.get(arrival, 0), scheduler.requests.states[arrival].in_flight)
        return made

    scheduler.plan = watched  # type: ignore[method-assign]
    yield most
    scheduler.plan = plan  # type: ignore[method-assign]


@DEPTHS
def test_a_processor_sees_the_true_history_at_any_depth(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """It is called once a token, with all tokens before and none after the end, through evictions too; it has one step
    in flight while its neighbours overlap."""
    llm = make_llm(steps_in_flight=depth, num_pages=9, paused_pages=0)
    seen: Histories = []
    own = settings(
        temperature=1.0, seed=2, max_tokens=50, logits_processors=without_repeats(seen), logprobs=2, priority=1
    )
    params = [settings(max_tokens=110), own, settings(max_tokens=30)]
    prompts = [prompt(20), [1, 2, 3] * 7, prompt(12)]
    with in_flight_of(llm) as most:
        outputs = llm.generate(prompts, params)
    ids = outputs[1].outputs[0].token_ids
    assert len({*ids, 1, 2, 3}) == 53
    assert seen == [(prompts[1], ids[:count]) for count in range(50)]
    assert most[1] == 1 and most[0] == depth
    witness("logits-processors", num_evictions=pressure(outputs[1])[0], most_in_flight_of_neighbour=most[0])
    for output, one, given in zip(outputs, params, prompts):
        check_equal(output, solo(given, one))
    assert not llm._engine.resolved.runner.functions._held, "functions are held after their requests"


@pytest.mark.parametrize("stop", ["stop_token_ids", "stop_token_sequences"])
def test_a_processor_is_not_called_after_a_stop(stop: str, make_llm: MakeLLM) -> None:
    llm, seen = make_llm(steps_in_flight=4), Histories()
    own = settings(max_tokens=30, logits_processors=without_repeats(seen))
    free = llm.generate([prompt(9)], own)[0].outputs[0].token_ids
    seen.clear()
    given: Any = [free[6]] if stop == "stop_token_ids" else [free[5:7]]
    stopped = llm.generate(
        [prompt(9)], settings(max_tokens=30, logits_processors=own.logits_processors, **{stop: given})
    )
    assert stopped[0].outputs[0].token_ids == free[:7] and len(seen) == 7


def test_processors_by_name_and_in_their_order(make_llm: MakeLLM, tiny: Path, tmp_path: Path) -> None:
    """`module:function` is imported; several run one after another; a journal of such a run replays."""
    journal = tmp_path / "journal"
    llm = make_llm(journal=str(journal))

    def all_but_even(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        return logits + only_even(output_ids, torch.zeros_like(logits))

    name = f"{__name__}:only_even"
    by_name, given, both = llm.generate(
        [prompt(9)] * 3, [settings(logits_processors=one) for one in (name, only_even, [name, all_but_even])]
    )
    assert all(token % 2 == 0 for token in by_name.outputs[0].token_ids)
    check_equal(given, by_name)
    check_equal(both, by_name)
    llm.shutdown()

    def cursor(request: Any) -> TextCursor:
        assert llm.tokenizer is not None
        return text_cursor(llm.tokenizer, True)

    with journal.open("rb") as file:
        assert replay(file, cursor)


@pytest.mark.parametrize("name", ["no.such.module:f", f"{__name__}:no_such_function", f"{__name__}:DEPTHS.name"])
def test_a_processor_that_cannot_be_found_is_refused(name: str, make_llm: MakeLLM, make_async: MakeAsync) -> None:
    with pytest.raises(InvalidValue, match="logits_processors"):
        make_llm().generate(prompt(5), settings(logits_processors=name))

    async def main() -> None:
        with pytest.raises(InvalidValue, match="logits_processors"):
            await make_async().submit(prompt(5), settings(logits_processors=name))

    run_async(main())


def raising(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    if len(output_ids) == 2:
        raise ValueError("planted")
    return logits


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


def raises(error: BaseException) -> Callable[..., Any]:
    def processor(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        raise error

    return processor


WRONG: dict[str, tuple[Callable[..., Any], int, str]] = {
    "raises": (raising, 2, "ValueError: planted"),
    "exits": (raises(SystemExit(3)), 0, "SystemExit: 3"),
    "is cancelled": (raises(asyncio.CancelledError()), 0, "CancelledError"),
    "raises what cannot be said": (raises(Unspeakable()), 0, "Unspeakable, whose message raises ZeroDivisionError"),
    "raises at length": (raises(ValueError("x" * 100_000)), 0, "xxx ... (99412 characters) ... xxx"),
    "nothing": (lambda output_ids, logits: None, 0, "gave NoneType, not a tensor of shape [512]"),
    "shape": (lambda output_ids, logits: logits[:5], 0, "gave shape [5], not a tensor of shape [512]"),
    "nan": (lambda output_ids, logits: logits * math.nan, 0, "no usable logits"),
    "all": (lambda output_ids, logits: logits - math.inf, 0, "no usable logits"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_processor_fails_its_request_alone(kind: str, make_llm: MakeLLM, solo: Solo) -> None:
    processor, num_tokens, message = WRONG[kind]
    one = settings(logits_processors=processor)
    failed, other, again = make_llm().generate([prompt(7)] * 3, [one, settings(), settings(logprobs=3)])
    assert failed.outputs[0].finish_reason == "error" and len(failed.outputs[0].token_ids) == num_tokens
    assert message in str(failed.error)
    check_equal(other, solo(prompt(7), settings()))
    check_equal(again, solo(prompt(7), settings(logprobs=3)))


def test_settings_hold_whatever_a_processor_does(make_llm: MakeLLM, tmp_path: Path) -> None:
    """It comes first: what it raises is still subject to allowed ids and to the mask before min_tokens."""
    llm = constant(make_llm, tmp_path, [0.0] * V)

    def raised(output_ids: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        logits[[9, 30]] = 1e6
        return logits

    asked = SamplingParams(
        temperature=0.0, logits_processors=raised, bad_words=[[9]], stop_token_ids=[30], min_tokens=3, max_tokens=9
    )
    output = llm.generate([[1]], asked)[0].outputs[0]
    assert output.token_ids == [0, 0, 0, 30] and output.stop_reason == 30
