"""The device's sampler against the host's, on equal logits, step by step, whatever rows ask."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from perdure.api.ending import Failure
from perdure.api.plan import NO_LOGPROBS, Adjustments, RowInit, StepOutput
from perdure.api.structured import StructuredOutputsParams
from perdure.ops.adjust import RowMasks
from perdure.ops.triton.adjust import KNOWN, STALE, as_bits
from perdure.ops.triton.filters import find_kept
from perdure.runner.cuda.sample_columns import SampleColumns, num_sample_words
from perdure.runner.cuda.sampler import DeviceSampler
from perdure.runner.cuda.ticket import WHY, Launched
from perdure.runner.inputs import PackedStep, Targets
from perdure.runner.row_store import RowStore
from perdure.runner.sampler import Sampler
from tests.cuda.conftest import ON_GPU
from tests.runner.plans import entries
from tests.witness import witness

VOCAB = 151_936 if ON_GPU else 4_200  # two chunks
STEPS = 12 if ON_GPU else 3
MAX_LENGTH = 64
NONE = np.empty(0, np.int64)

ASKED: dict[str, dict[str, Any]] = {
    "nothing": {},
    "bias": {"adjustments": Adjustments(logit_bias=((3, 9.0), (77, -5.0), (4101, 9.5))), "num_logprobs": 3},
    "allowed": {"adjustments": Adjustments(allowed_ids=(1, 2, 3, 700, 4100, 4150), bad_words=((2,),))},
    "penalties": {
        "adjustments": Adjustments(1.7, 0.4, 0.6), "temperature": 0.0, "num_logprobs": 2, "listed_ids": (5, 9),
    },
    "repetition": {"adjustments": Adjustments(0.5), "processed_logprobs": True, "num_logprobs": 4},
    "words": {"adjustments": Adjustments(allowed_ids=(11, 12), bad_words=((11, 11), (12, 12, 12)))},
    "early": {"min_tokens": 2, "masked_ids": (3, 5, 7), "num_logprobs": 0},
    "grammar": {"adjustments": Adjustments(structure=StructuredOutputsParams(regex="a")), "num_logprobs": 2},
    "everything": {
        "adjustments": Adjustments(1.2, 0.3, 0.2, ((5, 3.0), (4100, 8.0)), None, ((5,), (5, 6), (4100, 4100)), (), (),
                                   StructuredOutputsParams(regex="a")),
        "min_tokens": 2, "masked_ids": (5, 11), "top_k": 30, "top_p": 0.9, "min_p": 0.001, "num_logprobs": 3,
        "processed_logprobs": True, "listed_ids": (4100, 3, 8),
    },
    "forced": {"adjustments": Adjustments(1.5, 0.5), "forced_ids": (8, 8), "num_logprobs": 1},
    "processed greedy": {"temperature": 0.0, "processed_logprobs": True, "num_logprobs": 3},
}  # fmt: skip
FEWER = {"nothing", "allowed", "repetition", "forced", "processed greedy"}
"""Left out of a life in the interpreter."""
PROMPT = (1, 5, 4100, 11, 5)


class GivenMasks:
    """Masks as grammars make them, of numbers that the slot and the step say."""

    def __init__(self) -> None:
        self.step = 0

    def take(self, slots: np.ndarray) -> tuple[RowMasks | None, dict[int, Failure]]:
        rows = np.flatnonzero(np.isin(slots, [slot for slot, name in enumerate(ASKED) if walks(name)]))
        if not len(rows):
            return None, {}
        allowed = [np.random.default_rng([self.step, slot]).random(VOCAB) < 0.3 for slot in slots[rows].tolist()]
        return RowMasks(rows, np.stack([as_bits(one) for one in allowed])), {}


def walks(name: str) -> bool:
    asked = ASKED[name].get("adjustments")
    return asked is not None and asked.structure is not None


def row_init(slot: int, tokens: list[int]) -> RowInit:
    """As the core says it of a request with these tokens: its history comes only where something looks back."""
    given = dict(temperature=0.9, top_k=0, top_p=1.0, min_p=0.0, seed=slot, min_tokens=0, masked_ids=())
    given |= dict(num_logprobs=NO_LOGPROBS, num_prompt_logprobs=NO_LOGPROBS, processed_logprobs=False)
    given |= [*ASKED.values()][slot]
    asked = given.get("adjustments")
    if asked is not None and asked.looks_back:
        given["adjustments"] = msgspec.structs.replace(asked, history=tuple(tokens))
    return RowInit(slot, 100 + slot, len(PROMPT), **given)


def packed(slots: np.ndarray, positions: np.ndarray) -> PackedStep:
    """A step that samples a row of each slot, whose token will stand at its position."""
    count = np.arange(len(slots))
    return PackedStep(
        token_ids=NONE, positions=NONE, slots=slots, starts=positions - 1, ends=positions, offsets=NONE,
        on_device=np.zeros(len(slots), np.bool_), kv_slots=NONE, sampled=count, sampled_hidden=count,
        targets=Targets(NONE, NONE, NONE, NONE),
    )  # fmt: skip


class OnHost:
    def __init__(self) -> None:
        self.masks = GivenMasks()
        self.rows = RowStore(len(ASKED), 1, VOCAB)
        self.sampler = Sampler(None, self.rows, self.masks, 1)  # type: ignore[arg-type]

    def admit(self, inits: list[RowInit]) -> None:
        for init in inits:
            self.rows._init(init)

    def run(self, logits: np.ndarray, step: PackedStep) -> StepOutput:
        errors: dict[int, Failure] = {}
        rows, tokens, scores = self.sampler.sample_from(logits, step.sampled, step.slots, step.ends, errors)
        self.rows.sampled(step.slots[rows], tokens)
        launched = Launched(0, [0] * len(step.slots), NONE, NONE, step.slots, errors)
        launched.host_rows, launched.host_tokens, launched.host_entries = rows, tokens, scores
        return launched.output(NONE[None], NONE[None])[0]


class OnDevice:
    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.masks = GivenMasks()
        self.rows = RowStore(len(ASKED), 1, VOCAB)
        self.sampler = DeviceSampler(self.rows, self.masks, VOCAB, MAX_LENGTH, device, find_kept)  # type: ignore[arg-type]

    def admit(self, inits: list[RowInit]) -> None:
        for init in inits:
            self.rows._init(init)
        self.sampler.admit(inits)

    def launch(self, logits: np.ndarray, step: PackedStep) -> tuple[Launched, torch.Tensor, np.ndarray]:
        """A step on its way; its tokens are looked at by `finish`, after other steps maybe."""
        parts = self.sampler.parts(step)
        assert not len(parts.on_host)
        words = np.zeros(num_sample_words(len(step.slots)), np.int32)
        columns = SampleColumns.on_host(words, len(step.slots))
        columns.pad(self.sampler.nobody)
        self.sampler.fill(columns, step, parts)
        settings = SampleColumns.on_device(torch.from_numpy(words).to(self.device), len(step.slots)).settings()
        placed = torch.from_numpy(logits).to(self.device)
        x, kept = self.sampler.draw(placed, settings)
        launched = Launched(0, [0] * len(step.slots), step.sampled, step.slots, step.slots, masked=parts.masked)
        after = self.sampler.draw_masked(placed, step, parts, launched.errors) if len(parts.masked) else None
        launched.scores = self.sampler.scores(step, parts, (x, kept, settings), after)
        return launched, self.sampler.results.clone(), step.slots

    def finish(self, launched: Launched, results: torch.Tensor, slots: np.ndarray) -> StepOutput:
        tokens, codes = results.cpu().numpy().astype(np.int64)[:, : len(slots)]
        output, (good,) = launched.output(tokens[None], codes[None])
        self.rows.sampled(slots[good], tokens[good])
        return output


def check_equal(found: StepOutput, right: StepOutput) -> None:
    assert (found.tokens, found.num_sampled, found.errors) == (right.tokens, right.num_sampled, right.errors)
    ours, theirs = entries(found.records), entries(right.records)
    assert len(ours) == len(theirs)
    for (*where, chosen, rank, top), (*there, score, place, best) in zip(ours, theirs):
        assert (where, rank) == (there, place) and abs(chosen - score) <= 1e-5
        assert [i for i, _ in top] == [i for i, _ in best]
        assert all(x == y or abs(x - y) <= 1e-5 for (_, x), (_, y) in zip(top, best))
    one, two = found.records, right.records
    assert (one.num_listed, one.listed_ranks) == (two.num_listed, two.listed_ranks)
    scores = (np.frombuffer(listed, "<f4") for listed in (one.listed_scores, two.listed_scores))
    np.testing.assert_allclose(*scores, atol=1e-5)


def random_logits(step: int) -> np.ndarray:
    logits = (2 * np.random.default_rng([9, step]).standard_normal((len(ASKED), VOCAB))).astype(np.float32)
    logits[:, [5, 11, 4100]] += 6
    return logits


def test_a_life_of_steps(device):
    """Every kind of row beside the others, two steps in flight, put aside and taken in again in the middle."""
    host, there = OnHost(), OnDevice(device)
    slots = np.array([slot for slot, name in enumerate(ASKED) if ON_GPU or name not in FEWER])
    tokens = {slot: list(PROMPT) for slot in slots.tolist()}
    for runner in (host, there):
        runner.admit([row_init(slot, tokens[slot]) for slot in slots.tolist()])
    flying: list[tuple[Any, StepOutput]] = []

    def land(count: int) -> None:
        for launched, right in flying[:count]:
            check_equal(there.finish(*launched), right)
        del flying[:count]

    for step in range(STEPS):
        if step == STEPS // 2:
            land(len(flying))
            there.sampler.check(slots.tolist())
            for runner in (host, there):
                runner.admit([row_init(slot, tokens[slot]) for slot in slots.tolist()])
            there.sampler.check(slots.tolist())
        host.masks.step = there.masks.step = step
        order = np.random.default_rng(step).permutation(slots)
        plan = packed(order, np.array([len(tokens[slot]) for slot in order.tolist()]))
        logits = random_logits(step)[: len(slots)]
        launched = there.launch(logits, plan)
        right = host.run(logits, plan)
        assert not right.errors
        for slot, token in zip(order.tolist(), right.tokens, strict=True):
            tokens[slot].append(token)
        flying.append((launched, right))
        land(len(flying) - 1)
    land(len(flying))
    there.sampler.check(slots.tolist())
    outputs = {[*ASKED][slot]: tokens[slot][len(PROMPT) :] for slot in slots.tolist()}
    assert outputs.get("forced", [8, 8])[:2] == [8, 8] and set(outputs["words"]) == {11, 12}
    witness("sampling-cuda-adjusted", rows=len(slots), steps=STEPS, tokens=sum(map(len, outputs.values())))


def test_a_history_that_is_not_this_ones_gives_no_token(device):
    """A count too many, and one too few: an error of that row; its neighbours do not notice."""
    there = OnDevice(device)
    names = list(ASKED)
    slots = np.array([names.index(name) for name in ("penalties", "words", "repetition")])
    there.admit([row_init(slot, list(PROMPT)) for slot in slots.tolist()])
    there.sampler._blocks[slots[0]][KNOWN.value] = 1
    output = there.finish(*there.launch(random_logits(0)[: len(slots)], packed(slots, np.full(3, len(PROMPT)))))
    assert output.num_sampled == [0, 1, 1]
    assert output.errors == [(0, WHY[STALE.value])]
    there.sampler._blocks[slots[1]][KNOWN.value] = 0
    again = there.launch(random_logits(1)[: len(slots)], packed(slots, np.full(3, len(PROMPT) + 1)))
    assert there.finish(*again).num_sampled == [1, 0, 1]


def test_nothing_left_and_unusable_logits(device):
    """Each an error of its row, in the host's words."""
    host, there = OnHost(), OnDevice(device)
    names = list(ASKED)
    slots = np.array([names.index(name) for name in ("allowed", "grammar", "bias", "nothing")])
    logits = random_logits(0)[:4]
    logits[0, [1, 3, 700, 4100, 4150]] = -np.inf
    logits[1] = -np.inf
    logits[1, :3] = 1.0
    logits[2, 1] = np.nan
    for runner in (host, there):
        runner.masks.take = lambda slots: (RowMasks(np.flatnonzero(slots == names.index("grammar")),
                                                    np.zeros((1, -(-VOCAB // 32)), np.int32)), {})  # fmt: skip
        runner.admit([row_init(slot, list(PROMPT)) for slot in slots.tolist()])
    plan = packed(slots, np.full(4, len(PROMPT)))
    right = host.run(logits, plan)
    found = there.finish(*there.launch(logits, plan))
    assert [row for row, _ in right.errors] == [0, 1, 2]
    check_equal(found, right)
