"""The device rows: one stable slot a request, as a struct of arrays.

- Changed by a plan's deltas and by the step's own result only; a row never moves and nothing is compacted.
- A slot belongs to the request of its last `RowInit`; nothing marks it free, a later one takes it over.
- The core could rebuild all of it at any time.

Shapes: S slots, W = the most pages a request can have, V = vocabulary.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from perdure.api.plan import DeviceRow, RowInit, StepPlan
from perdure.ops.sampling import NO_LIST, SamplingColumns
from perdure.ops.select import Ids
from perdure.runner.row_adjustments import RowAdjustments

NO_REQUEST = -1
_FLOAT32 = np.finfo(np.float32)
_MAX_TOP_K = 2**31


class RowStore:
    """position [S]: the next position to compute; last_token [S]: the token that stands there, once sampled.

    listed_ids: ids to score beside each token, by slot. adjustments: what is done to a row's logits before temperature.
    """

    def __init__(self, num_slots: int, max_pages: int, vocab_size: int) -> None:
        self.request = np.full(num_slots, NO_REQUEST, np.int64)
        self.prompt_length = np.zeros(num_slots, np.int64)
        self.position = np.zeros(num_slots, np.int64)
        self.last_token = np.zeros(num_slots, np.int64)
        self.block_table = np.zeros((num_slots, max_pages), np.int64)
        self.num_logprobs = np.zeros(num_slots, np.int64)
        self.num_prompt_logprobs = np.zeros(num_slots, np.int64)
        self.processed_logprobs = np.zeros(num_slots, np.bool_)
        self._temperature = np.zeros(num_slots, np.float32)
        self._top_k = np.zeros(num_slots, np.int64)
        self._top_p = np.ones(num_slots, np.float64)
        self._min_p = np.zeros(num_slots, np.float64)
        self._seed = np.zeros(num_slots, np.uint64)
        self._child = np.zeros(num_slots, np.int64)
        self.listed_ids: list[Ids] = [NO_LIST] * num_slots
        self.num_listed = np.zeros(num_slots, np.int64)
        self._forced_ids: list[tuple[int, ...]] = [()] * num_slots
        self._num_forced = np.zeros(num_slots, np.int64)
        self.adjustments = RowAdjustments(num_slots, vocab_size)

    def apply(self, plan: StepPlan) -> None:
        """The plan's deltas, in its order: new rows, then entries of the block table."""
        for init in plan.row_inits:
            self._init(init)
        if plan.table_slot:
            self.block_table[plan.table_slot, plan.table_index] = plan.table_page

    def advance(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> None:
        """These rows now stand at these positions."""
        self.position[slots] = positions

    def output_index(self, slots: Ids, positions: Ids) -> Ids:
        """Where in its row's output a token at each of these positions stands."""
        index: Ids = positions - self.prompt_length[slots]
        return index

    def sampling(self, slots: Ids, output_index: Ids) -> SamplingColumns:
        """Settings for drawing the tokens of these rows at these output indices."""
        return SamplingColumns(
            temperature=self._temperature[slots],
            top_k=self._top_k[slots],
            top_p=self._top_p[slots],
            min_p=self._min_p[slots],
            seed=self._seed[slots],
            child=self._child[slots],
            output_index=output_index,
        )

    def force(self, tokens: Ids, slots: Ids, output_index: Ids) -> None:
        """Put the given token of a forced continuation in the place of what was drawn."""
        for row in np.flatnonzero(output_index < self._num_forced[slots]).tolist():
            tokens[row] = self._forced_ids[int(slots[row])][int(output_index[row])]

    def forced(self, slots: Ids, output_index: Ids) -> Ids:
        """The tokens that forced continuations give at these output indices; -1 where a token is to be drawn."""
        tokens = np.full(len(slots), -1, np.int64)
        self.force(tokens, slots, output_index)
        return tokens

    def sampled(self, slots: Ids, tokens: Ids) -> None:
        """These rows got these tokens."""
        self.last_token[slots] = tokens
        self.adjustments.sampled(slots, tokens)

    def check(self, row: DeviceRow) -> None:
        """This row is what another account of it says: a row made anew of that would be equal in every column."""
        slot = row.settings.slot
        anew = RowStore(slot + 1, self.block_table.shape[1], self.adjustments.vocab_size)
        anew._init(row.settings)
        self.adjustments.check(slot, anew.adjustments)
        for name, column in vars(self).items():
            if name not in ("position", "last_token", "block_table", "adjustments"):
                found, told = column[slot], getattr(anew, name)[slot]
                assert np.array_equal(found, told), f"slot {slot}: {name} is {found}, the core says {told}"
        assert self.position[slot] == row.position, f"slot {slot} stands at {self.position[slot]}, not {row.position}"
        if row.last_token is not None:
            assert self.last_token[slot] == row.last_token, f"slot {slot} holds another last token"
        table = self.block_table[slot, : len(row.pages)].tolist()
        assert table == row.pages, f"slot {slot} has pages {table}, the core says {row.pages}"

    def _init(self, init: RowInit) -> None:
        slot, temperature = init.slot, init.temperature
        if temperature > 0.0:  # in fp32, neither greedy by underflow nor infinite
            temperature = min(max(temperature, float(_FLOAT32.tiny)), float(_FLOAT32.max))
        self.request[slot] = init.request
        self.prompt_length[slot] = init.prompt_length
        self.position[slot] = 0
        self.num_logprobs[slot] = init.num_logprobs
        self.num_prompt_logprobs[slot] = init.num_prompt_logprobs
        self.processed_logprobs[slot] = init.processed_logprobs
        self._temperature[slot] = temperature
        self._top_k[slot] = min(init.top_k, _MAX_TOP_K)
        self._top_p[slot] = init.top_p
        self._min_p[slot] = init.min_p
        self._seed[slot] = init.seed
        self._child[slot] = init.child
        self.listed_ids[slot] = np.array(init.listed_ids, np.int64)
        self.num_listed[slot] = len(init.listed_ids)
        self._forced_ids[slot] = init.forced_ids
        self._num_forced[slot] = len(init.forced_ids)
        self.adjustments.init(init)
