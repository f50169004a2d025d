"""The runner against a dense forward pass, and against itself under other schedules."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from perdure.api.plan import StepOutput
from perdure.ops.sampling_reference import log_softmax, rank
from tests.runner.plans import VOCAB, Driver, Row, dense_logits, entries, prompt, prompt_scores

SAMPLED = {"temperature": 0.8, "top_p": 0.95, "seed": 7}


def solo(model, ids, num_new, **settings):
    """Prompt at once, then decode on the device: (tokens, the first step's output)."""
    driver = Driver(model)
    driver.admit(0, len(ids), **settings)
    first = driver.run(Row(0, ids))
    return first.tokens + (driver.decode([0], num_new - 1)[0] if num_new > 1 else []), first


@pytest.mark.parametrize("backend", ["native", "tiled", "plain", "reference"])
def test_greedy_equals_a_dense_forward(model, backend):
    driver = Driver(model, batch_invariant=backend != "plain", attention_backend=backend)
    assert driver.runner.attention_backend == backend
    prompts = [prompt(length) for length in (5, 1, 33, 18)]
    for slot, ids in enumerate(prompts):
        driver.admit(slot, len(ids))
    first = driver.run(*(Row(slot, ids) for slot, ids in enumerate(prompts)))
    assert first.num_sampled == [1, 1, 1, 1] and first.errors == []
    later = driver.decode([0, 1, 2, 3], 9)
    for ids, token, more in zip(prompts, first.tokens, later):
        history = list(ids)
        for expected in [token, *more]:
            assert dense_logits(model, history)[-1].argmax() == expected
            history.append(expected)


@pytest.mark.parametrize(("page_size", "length"), [(1, 9), (4, 13), (4, 14), (4, 16), (16, 16), (16, 9)])
def test_a_row_goes_on_from_pages_of_another(model, page_size, length):
    """Full pages by reference, what is left of the prompt by a copy of the beginning of a page, whose owner has gone on
    in it meanwhile: the token and all after it are those of a run alone."""
    ids = prompt(length)
    driver = Driver(model, page_size=page_size)
    driver.admit(0, length, **SAMPLED)
    own = driver.pending[0][1]
    driver.run(Row(0, ids))
    driver.decode([0], 3)
    num_shared, num_copied = divmod(length - 1, page_size)
    driver.admit(5, length, **SAMPLED, child=2)
    fresh = driver.pending[0][1][num_shared:]
    driver.pending[0] = driver.pending[0][0], own[:num_shared] + fresh
    plan = replace(driver.plan(Row(0), Row(5, ids[-1:], start=length - 1)), fresh_pages=fresh)
    if num_copied:
        plan = replace(plan, copy_from=own[num_shared : num_shared + 1], copy_to=fresh[:1], copy_length=[num_copied])
    first = driver.runner.execute(plan)
    both = driver.decode([5, 0], 6)
    tokens = [first.tokens[1], *both[0]]
    assert tokens == solo(model, ids, 7, **SAMPLED, child=2)[0] != solo(model, ids, 7, **SAMPLED)[0]
    parent = solo(model, ids, 11, **SAMPLED)[0]
    assert [first.tokens[0], *both[1]] == parent[4:11]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_schedules_do_not_change_tokens(model, page_size):
    """Chunks, neighbours, order of rows, and rows given by the host instead of the device."""
    ids = prompt(41)
    expected, _ = solo(model, ids, 12, **SAMPLED)
    driver = Driver(model, page_size=page_size)
    driver.admit(3, 41, **SAMPLED)
    for slot in (0, 1):
        driver.admit(slot, 10 + slot, temperature=1.0, seed=slot)
    driver.run(Row(0, prompt(10)), Row(3, ids[:7], sample=False), Row(1, prompt(11)))
    driver.run(Row(3, ids[7:8], start=7, sample=False), Row(1))
    output = driver.run(Row(1), Row(0), Row(3, ids[8:], start=8))
    tokens = output.tokens[-1:]
    tokens += driver.decode([0, 3, 1], 4)[1]
    for position in range(45, 50):
        tokens += driver.run(Row(3, tokens[-1:], start=position)).tokens
    tokens += driver.decode([3], 2)[0]
    assert tokens == expected


def test_recompute_gives_the_same_continuation(model):
    ids = prompt(20)
    expected, _ = solo(model, ids, 10, **SAMPLED)
    driver = Driver(model)
    driver.admit(2, 20, **SAMPLED)
    driver.run(Row(2, ids + expected[:6]))  # prompt and what was generated before, in one go
    assert driver.decode([2], 3)[0] == expected[7:]


def test_a_slot_taken_over_starts_afresh(model):
    driver = Driver(model)
    driver.admit(0, 30, temperature=1.0, min_tokens=50, masked_ids=tuple(range(100)))
    driver.run(Row(0, prompt(30)))
    driver.decode([0], 5)
    ids = prompt(9, seed=4)
    driver.admit(0, 9)
    assert driver.run(Row(0, ids)).tokens + driver.decode([0], 4)[0] == solo(model, ids, 5)[0]


def test_masked_ids_hold_below_min_tokens_only(model):
    ids = prompt(12)
    free, _ = solo(model, ids, 1)
    held, first = solo(model, ids, 1, min_tokens=3, masked_ids=(free[0],), num_logprobs=1)
    assert held != free
    assert first.records.rank == [2]  # raw scores are the model's own, mask or not
    driver = Driver(model)
    driver.admit(0, 9, min_tokens=3, masked_ids=(free[0],))  # three tokens are there already
    assert driver.run(Row(0, ids)).tokens == free


def test_t41_prompt_scores_under_chunking(model):
    ids = prompt(65)
    whole = prompt_scores(model, ids, 65)
    assert [entry[0] for entry in whole] == list(range(1, 65))
    logits = dense_logits(model, ids)
    for position, chosen, place, top in whole:
        expected = log_softmax(logits[position - 1])
        assert abs(chosen - expected[ids[position]]) < 1e-4
        assert place == rank(expected, ids[position])
        assert [id_ for id_, _ in top] == np.argsort(-expected, kind="stable")[:3].tolist()
    for size in (32, 16, 7, 1):
        assert prompt_scores(model, ids, size) == whole
    assert prompt_scores(model, ids, 16, neighbour=True) == whole


def test_prompt_scores_of_more_rows_than_a_slice(model, monkeypatch):
    ids = prompt(65)
    whole = prompt_scores(model, ids, 65)
    monkeypatch.setattr("perdure.runner.sampler.TARGET_SLICE", 10)
    assert prompt_scores(model, ids, 65) == whole


def test_t40_mixed_scores_in_one_step(model):
    ids = prompt(12)
    asked = [
        {},
        {"num_logprobs": 0},
        {"num_logprobs": 5},
        {"num_logprobs": -1},
        {"num_logprobs": 2, "processed_logprobs": True},
        {"num_logprobs": VOCAB + 9},
    ]
    driver = Driver(model)
    for slot, scores in enumerate(asked):
        driver.admit(slot, 12, temperature=0.7, top_k=4, **scores)
    output = driver.run(*(Row(slot, ids) for slot in range(len(asked))))
    assert len(set(output.tokens)) == 1
    found = entries(output.records)
    assert [entry[0] for entry in found] == [1, 2, 3, 4, 5]
    assert output.records.num_top == [0, 5, VOCAB, 2, VOCAB]
    assert {entry[1] for entry in found} == {12}
    raw = {entry[2] for entry in found if entry[0] != 4}
    assert len(raw) == 1 and found[3][2] not in raw
    for slot, scores in enumerate(asked[1:], start=1):
        _, first = solo(model, ids, 1, temperature=0.7, top_k=4, **scores)
        assert entries(first.records)[0][1:] == found[slot - 1][1:]


def test_scoring_only_draws_nothing(model):
    driver = Driver(model)
    driver.admit(0, 8, num_prompt_logprobs=0)
    ids = prompt(8)
    output = driver.run(Row(0, ids, sample=False, targets=ids[1:], target_start=1))
    assert output.num_sampled == [0] and output.tokens == [] and len(output.prompt_records.chosen) == 7
    assert output.prompt_records.top_ids == b""


class NaNModel:
    """The tiny model with a head that gives NaN for a token's successor."""

    def __init__(self, model, poison):
        self.config, self._model, self._poison = model.config, model, poison

    def forward(self, token_ids, positions, attend, rows):
        hidden = self._model.forward(token_ids, positions, attend, rows)
        hidden[(token_ids if rows is None else token_ids[rows]) == self._poison] = torch.nan
        return hidden

    def logits(self, hidden):
        return self._model.logits(hidden)


def test_nan_is_an_error_of_its_row_alone(model):
    ids, poison = [3, 4, 5, 6, 7, 8], 199
    clean = Driver(model)
    driver = Driver(NaNModel(model, poison))
    outputs: list[StepOutput] = []
    for one, first in ((clean, ids), (driver, [3, 4, poison])):
        one.admit(0, 3, num_prompt_logprobs=1)
        one.admit(1, 6, num_prompt_logprobs=1, num_logprobs=1)
        one.admit(2, 3, num_logprobs=1)
        # Row 0's scores are not asked of its poisoned position, row 2's are: both must fail, and only they.
        rows = [
            Row(0, first, targets=first[1:], target_start=1),
            Row(1, ids, targets=ids[1:], target_start=1),
            Row(2, first, sample=True, targets=[9], target_start=3),
        ]
        outputs.append(one.run(*rows))
    good, bad = outputs
    assert [row for row, _ in bad.errors] == [0, 2]
    assert all(why.kind == "BadLogits" and "NaN" in why.message for _, why in bad.errors)
    assert bad.num_sampled == [0, 1, 0] and bad.tokens == good.tokens[1:2]
    assert entries(bad.records) == [entry for entry in entries(good.records) if entry[0] == 1]
    of_neighbour = [entry for entry in entries(good.prompt_records) if entry[0] == 1]
    assert entries(bad.prompt_records)[2:] == of_neighbour
    assert [entry[:2] for entry in entries(bad.prompt_records)[:2]] == [(0, 1), (0, 2)], "of usable logits, all of them"


@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_a_failing_prompt_is_scored_up_to_its_first_bad_position(model, monkeypatch, size):
    """However it is cut into steps, and these into slices: entries after it do not count, good as they are."""
    monkeypatch.setattr("perdure.runner.sampler.TARGET_SLICE", 2)
    ids, poison, found = [3, 4, 5, 199, 6, 7, 8, 9, 10], 199, []
    driver = Driver(NaNModel(model, poison))
    driver.admit(0, len(ids), num_prompt_logprobs=0)
    for low in range(0, len(ids), size):
        targets = ids[low + 1 : low + size + 1]
        output = driver.run(Row(0, ids[low : low + size], low, sample=False, targets=targets, target_start=low + 1))
        found += output.prompt_records.position
        if output.errors:
            break
    assert found == [1, 2, 3] and output.errors, "the token at 4 would be scored by the logits that are not usable"


def test_a_plan_for_another_request_is_our_own_mistake(model):
    driver = Driver(model)
    driver.admit(0, 3)
    plan = driver.plan(Row(0, [1, 2, 3]))
    driver.requests[0] += 1
    driver.runner.execute(plan)
    with pytest.raises(AssertionError, match="not the request in its slot"):
        driver.run(Row(0))


def test_a_plan_without_rows_applies_its_deltas(model):
    driver = Driver(model)
    driver.admit(0, 3)
    assert driver.run().num_sampled == []
    assert driver.run(Row(0, [1, 2, 3])).num_sampled == [1]
