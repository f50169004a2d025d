"""What is done to logits before temperature, through the device rows: against float64 from the whole history."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from perdure.api.plan import NO_LOGPROBS, Adjustments, RowInit
from perdure.ops import sampling_reference as reference
from perdure.ops.adjust import adjust
from perdure.runner.row_adjustments import RowAdjustments

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


def init(slot: int, asked: dict[str, Any], prompt: list[int], output: list[int]) -> RowInit:
    wanted = Adjustments(
        repetition_penalty=asked.get("repetition_penalty", 1.0),
        presence_penalty=asked.get("presence_penalty", 0.0),
        frequency_penalty=asked.get("frequency_penalty", 0.0),
        logit_bias=tuple(asked.get("logit_bias", {}).items()),
        allowed_ids=None if "allowed_token_ids" not in asked else tuple(asked["allowed_token_ids"]),
        bad_words=tuple(map(tuple, asked.get("bad_words", ()))),
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
