"""What is done to logits before temperature, through the device rows: against float64 from the whole history."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perdure.api.plan import NO_LOGPROBS, Adjustments, RowInit
from perdure.ops import sampling_reference as reference
from perdure.ops.adjust import adjust
from perdure.runner.history import History
from perdure.runner.row_adjustments import RowAdjustments
from tests.witness import witness

V, SLOTS = 40, 8


def random_request(rng: np.random.Generator) -> dict[str, Any]:
    """Settings as the reference takes them, each there or not."""

    def sometimes(value: Any) -> bool:
        return bool(rng.random() < 0.4)

    words = [rng.integers(0, 4, rng.integers(1, 4)).tolist() for _ in range(rng.integers(1, 6))]
    asked: dict[str, Any] = {
        "logit_bias": {int(i): float(rng.normal() * 5) for i in rng.choice(V, 5, replace=False)},
        "allowed_token_ids": rng.choice(V, 20, replace=False).tolist(),
        "bad_words": words,
        "repetition_penalty": float(rng.choice([0.5, 1.3, 2.0])),
        "presence_penalty": float(rng.choice([-2.0, 0.5])),
        "frequency_penalty": float(rng.choice([-0.3, 0.2, 2.0])),
    }
    found = {name: value for name, value in asked.items() if sometimes(value)}
    if rng.random() < 0.3:
        found |= {"min_tokens": int(rng.integers(1, 8)), "masked_ids": rng.choice(V, 3, replace=False).tolist()}
    return found


def init(slot: int, asked: dict[str, Any], prompt: Sequence[int], output: Sequence[int]) -> RowInit:
    wanted = Adjustments(
        repetition_penalty=asked.get("repetition_penalty", 1.0),
        presence_penalty=asked.get("presence_penalty", 0.0),
        frequency_penalty=asked.get("frequency_penalty", 0.0),
        logit_bias=tuple(asked.get("logit_bias", {}).items()),
        allowed_ids=None if "allowed_token_ids" not in asked else tuple(asked["allowed_token_ids"]),
        bad_words=tuple(map(tuple, asked.get("bad_words", ()))),
        functions=asked.get("functions", ()),
        history=(*prompt, *output),
    )
    return RowInit(
        slot=slot,
        request=slot,
        prompt_length=len(prompt),
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        min_tokens=asked.get("min_tokens", 0),
        masked_ids=tuple(asked.get("masked_ids", ())),
        num_logprobs=NO_LOGPROBS,
        num_prompt_logprobs=NO_LOGPROBS,
        processed_logprobs=False,
        adjustments=wanted if wanted != Adjustments(history=wanted.history) else None,
    )


@given(st.integers(0, 2**32))
def test_adjusted_logits_of_random_rows_equal_the_reference(seed: int) -> None:
    """Rows with and without settings beside each other; part of a history is given, the rest sampled, token by token.
    Put into another slot with its whole history, as after an eviction, a row gives the same bits."""
    rng = np.random.default_rng(seed)
    rows = RowAdjustments(2 * SLOTS, V)
    requests = []
    for slot in range(2 * SLOTS):  # whoever was there before leaves nothing
        rows.init(init(slot, random_request(rng), [1, 2, 3], [4, 4]))
    for slot in range(SLOTS):
        asked = random_request(rng)
        prompt = rng.integers(0, 6, rng.integers(1, 9)).tolist()
        output = rng.integers(0, 6, rng.integers(0, 9)).tolist()
        known = int(rng.integers(0, len(output) + 1))
        rows.init(init(slot, asked, prompt, output[:known]))
        requests.append((asked, prompt, output, known))
    for at in range(9):
        here = [slot for slot, (_, _, output, known) in enumerate(requests) if known <= at < len(output)]
        if here:
            rows.sampled(np.array(here), np.array([requests[slot][2][at] for slot in here]))
    logits = (rng.standard_normal((SLOTS, V)) * 4).astype(np.float32)
    before = logits.copy()
    slots = rng.permutation(SLOTS)
    index = np.array([len(requests[slot][2]) for slot in slots])
    found = rows.of(slots, index)
    x = logits if found is None else adjust(logits, found)
    assert np.array_equal(logits, before)
    for row, slot in enumerate(slots.tolist()):
        asked, prompt, output, _ = requests[slot]
        np.testing.assert_allclose(
            x[row], reference.adjusted(logits[row], prompt, output, **asked), rtol=2e-6, atol=1e-5
        )
        rows.init(init(SLOTS + slot, asked, prompt, output))
        alone = rows.of(np.array([SLOTS + slot]), index[row : row + 1])
        y = logits[row : row + 1] if alone is None else adjust(logits[row : row + 1], alone)
        assert np.array_equal(y[0], x[row])


def test_rows_that_ask_for_nothing_cost_nothing() -> None:
    rows = RowAdjustments(2, V)
    rows.init(init(0, {}, [1, 2], []))
    assert rows.of(np.array([0, 0]), np.array([0, 5])) is None


# Histories of logits processors


def test_a_history_reads_like_the_list_it_shows() -> None:
    ids = [9, 4, 7, 7, 5]
    for first in range(6):
        for end in range(first, 6):
            seen, copy = History(ids, first, end), ids[first:end]
            assert (len(seen), list(seen), [*reversed(seen)], repr(seen)) == (len(copy), copy, copy[::-1], repr(copy))
            assert seen == copy and copy == seen and seen == History(ids, first, end) and seen != [*copy, 1]
            for cut in (slice(None), slice(-2, None), slice(1, 4, 2), slice(None, None, -1), slice(9, 3)):
                assert seen[cut] == copy[cut] and type(seen[cut]) is list
            assert [seen[at] for at in range(-len(copy), len(copy))] == copy * 2
            for at in (len(copy), -len(copy) - 1):
                with pytest.raises(IndexError):
                    seen[at]
            assert seen + [1] == [*copy, 1] and [1] + seen == [1, *copy] and seen + seen == copy * 2
            assert (7 in seen, seen.count(7)) == (7 in copy, copy.count(7))
            assert np.array_equal(np.array(seen, np.int64), copy)
            assert torch.equal(torch.tensor(list(seen)), torch.tensor(copy))
            logits, wanted = torch.zeros(10), torch.zeros(10)
            logits[seen], wanted[copy] = 1.0, 1.0  # type: ignore[index]
            assert torch.equal(logits, wanted) and torch.equal(logits[seen], wanted[copy])  # type: ignore[index]
    with pytest.raises(TypeError):
        History(ids, 0, 3)[0] = 1  # type: ignore[index]


def test_a_history_that_is_kept_shows_what_it_showed() -> None:
    """While the row goes on, and after it has come again in another slot."""
    kept: list[tuple[History, History]] = []

    def keep(prompt_ids: History, output_ids: History, logits: torch.Tensor) -> torch.Tensor:
        kept.append((prompt_ids, output_ids))
        return logits

    rows = RowAdjustments(2, V)
    asked = {"functions": rows.functions.hold(1, [keep])}
    output: list[int] = []
    for slot in (0, 1, 0):
        rows.init(init(slot, asked, [3, 4], output))
        for token in (5, 6):
            rows.call_functions(np.array([slot]), np.zeros((1, V), np.float32), {})
            rows.sampled(np.array([slot]), np.array([token]))
            output.append(token)
    assert kept == [([3, 4], output[:count]) for count in range(6)]


@pytest.mark.parametrize("takes_prompt", [False, True])
def test_a_processor_costs_the_same_however_long_the_history(takes_prompt: bool) -> None:
    """By CPU time of calls at 10 and at 1,000,000 tokens before, the best of many: copies would take milliseconds."""

    def with_prompt(prompt_ids: History, output_ids: History, logits: torch.Tensor) -> torch.Tensor:
        return logits + prompt_ids[-1] + output_ids[-1]

    def without(output_ids: History, logits: torch.Tensor) -> torch.Tensor:
        return logits + output_ids[-1]

    rows = RowAdjustments(2, V)
    asked = {"functions": rows.functions.hold(1, [with_prompt if takes_prompt else without])}
    logits, best = np.zeros((1, V), np.float32), []
    for slot, length in enumerate((5, 500_000)):
        rows.init(init(slot, asked, range(length), range(length)))
        times = []
        for _ in range(60):
            begin = time.thread_time()
            for _ in range(5):
                rows.call_functions(np.array([slot]), logits, {})
                rows.sampled(np.array([slot]), np.array([1]))
            times.append(time.thread_time() - begin)
        best.append(min(times))
    witness("processor-cost", us_short=round(best[0] * 2e5, 1), us_long=round(best[1] * 2e5, 1))
    assert best[1] < 3 * best[0]
