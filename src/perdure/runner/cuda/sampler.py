"""From logits to tokens and scores on the device, for all that rows ask but functions and whole vocabularies.

- What a row asked is on the device from its `RowInit` on (`ops.triton.adjust.make_block`), and its history grows there:
  derived from what the core said and what was drawn, made anew whenever the row is.
- Most rows are drawn with the step, in its graph. Rows held to a grammar are drawn after it: their masks are made on
  the host meanwhile, and only the host waits for them.
- Rows that call functions, or ask for scores of all ids, are not for here (`Parts.on_host`).

Shapes: S slots, n rows of a draw.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from perdure.api.ending import Failure
from perdure.api.plan import NO_LOGPROBS, RowInit
from perdure.ops import flashinfer_filters
from perdure.ops.transfer import sent
from perdure.ops.triton.adjust import Adjusted, Asked, history_of, make_block
from perdure.ops.triton.bursts import MOST_ENDS, NO_ID, RowEnds
from perdure.ops.triton.filters import find_kept
from perdure.ops.triton.sampling import draw_tokens
from perdure.ops.triton.scores import Entries, View
from perdure.ops.triton.weights import Filter, Kept, Settings
from perdure.runner.cuda.pages import to_device
from perdure.runner.cuda.sample_columns import SampleColumns, num_sample_words
from perdure.runner.cuda.scores import PendingScores, pending
from perdure.runner.inputs import Ints, PackedStep
from perdure.runner.masks import Masks
from perdure.runner.row_store import RowStore

Drawn = tuple[Adjusted, Kept, Settings]


def as_outputs(x: Adjusted, kept: Kept) -> tuple[Tensor, ...]:
    """As a step returns them, which may be a graph's."""
    return *(getattr(x, field.name) for field in fields(x)), kept.border, kept.last_tie


def of_outputs(outputs: Sequence[Tensor]) -> tuple[Adjusted, Kept]:
    """`as_outputs` back."""
    return Adjusted(*outputs[:-2]), Kept(*outputs[-2:])


@dataclass(frozen=True, slots=True)
class Parts:
    """Indices into a step's sampled rows: those drawn on the device, of these those that wait for a mask (indices into
    on_device), and those that the host samples."""

    on_device: Ints
    masked: Ints
    on_host: Ints

    @property
    def with_step(self) -> Ints:
        """Indices into on_device of those drawn with the step."""
        every = np.arange(len(self.on_device))
        return np.setdiff1d(every, self.masked) if len(self.masked) else every


class DeviceSampler:
    """last_token [S + 1]: the token sampled last into each slot, and into one that nobody has. results [2, most]:
    tokens of a step's rows, then what came of them (`ops.triton.adjust.FINE` and so on)."""

    def __init__(
        self, rows: RowStore, masks: Masks, vocab_size: int, max_length: int, device: torch.device, find: Filter
    ) -> None:
        num_slots = len(rows.request)
        self._rows = rows
        self._masks = masks
        self._vocab_size = vocab_size
        self._max_length = max_length
        self._device = device
        self._find = find
        self.last_token = torch.zeros(num_slots + 1, dtype=torch.int32, device=device)
        self.results = torch.zeros(2, num_slots, dtype=torch.int32, device=device)
        self.row_ends = RowEnds(num_slots, device)
        self._blocks: list[Tensor | None] = [None] * num_slots
        self._addresses = np.zeros(num_slots, np.int64)

    @property
    def nobody(self) -> int:
        """The slot that padding is drawn into."""
        return len(self._blocks)

    def admit(self, inits: Sequence[RowInit]) -> None:
        """These rows are new. The blocks of those before them may still be read by steps under way: memory goes to
        others in the order of the device's work."""
        for init in inits:
            asked = _asked(init)
            block = None if asked is None else make_block(asked, self._vocab_size, self._max_length, self._device)
            self._blocks[init.slot] = block
            self._addresses[init.slot] = 0 if block is None else block.data_ptr()
        if inits:
            self.row_ends.begin(sent(_ends_of(inits), self._device))

    def parts(self, step: PackedStep) -> Parts:
        slots = step.slots[step.sampled]
        rows = self._rows
        on_host = rows.adjustments.calls_functions[slots]
        on_host |= (rows.num_logprobs[slots] < 0) & (rows.num_logprobs[slots] != NO_LOGPROBS)
        on_device = np.flatnonzero(~on_host)
        masked = np.flatnonzero(rows.adjustments.walks[slots[on_device]])
        return Parts(on_device, masked, np.flatnonzero(on_host))

    def fill(self, columns: SampleColumns, step: PackedStep, parts: Parts) -> None:
        """What is drawn with the step, over padding; rows that wait for a mask stay padding."""
        at = parts.with_step
        self._fill(columns, at, step, parts.on_device[at])

    def _fill(self, columns: SampleColumns, at: Ints, step: PackedStep, sampled: Ints) -> None:
        rows = step.sampled[sampled]
        slots = step.slots[rows]
        output_index = self._rows.output_index(slots, step.ends[rows])
        touched = self._rows.adjustments.touches(slots, output_index)
        columns.fill(at, slots, output_index, self._rows, np.where(touched, self._addresses[slots], 0))

    def turn(self, columns: SampleColumns, step: PackedStep) -> None:
        """The same rows at the output indices of another step."""
        output_index = self._rows.output_index(step.slots, step.ends)
        touched = self._rows.adjustments.touches(step.slots, output_index)
        columns.turn(step.slots, output_index, self._rows, np.where(touched, self._addresses[step.slots], 0))

    def draw(self, logits: Tensor, settings: Settings) -> tuple[Adjusted, Kept]:
        """Of the first rows of results. Waits for nothing and looks at no value."""
        tokens, codes = self.results[:, : len(logits)]
        return draw_tokens(logits, settings, tokens, codes, self.last_token, self._find)

    def draw_masked(self, logits: Tensor, step: PackedStep, parts: Parts, errors: dict[int, Failure]) -> Drawn:
        """The rows that waited for masks, of the logits of all. errors, by the plan's row: those that got none."""
        count, sampled = len(parts.masked), parts.on_device[parts.masked]
        words = np.zeros(num_sample_words(count), np.int32)
        columns = SampleColumns.on_host(words, count)
        self._fill(columns, np.arange(count), step, sampled)
        rows = step.sampled[sampled]
        masks, failed = self._masks.take(step.slots[rows])
        errors.update((int(rows[at]), why) for at, why in failed.items())
        if masks is not None:
            bits = sent(masks.bits, self._device)
            columns.masks[masks.row] = bits.data_ptr() + np.arange(len(bits)) * bits[0].nbytes
        settings = SampleColumns.on_device(sent(words, self._device), count).settings()
        at = sent(parts.masked, self._device)
        tokens, codes = torch.empty(2, count, dtype=torch.int32, device=self._device)
        x, kept = draw_tokens(logits[at], settings, tokens, codes, self.last_token, self._find)
        self.results[0, at], self.results[1, at] = tokens, codes
        return x, kept, settings

    def any_scores(self, step: PackedStep, parts: Parts) -> bool:
        """Whether a row drawn on the device asks for scores."""
        asked = self._rows.num_logprobs[step.slots[step.sampled[parts.on_device]]]
        return bool((asked != NO_LOGPROBS).any())

    def scores(self, step: PackedStep, parts: Parts, drawn: Drawn, masked: Drawn | None) -> list[PendingScores]:
        """Of the rows that asked: those drawn with the step, and those after."""
        found = [self._scores(step, parts.on_device, parts.with_step, parts.with_step, drawn)]
        if masked is not None:
            found.append(self._scores(step, parts.on_device, parts.masked, np.arange(len(parts.masked)), masked))
        return [one for one in found if one is not None]

    def scores_in_burst(self, step: PackedStep, at: Ints, drawn: Drawn) -> PendingScores | None:
        """Of those of a burst's rows that asked. at: which are in this step of it."""
        return self._scores(step, np.arange(len(step.slots)), at, at, drawn)

    def _scores(
        self, step: PackedStep, on_device: Ints, results: Ints, drawn_rows: Ints, drawn: Drawn
    ) -> PendingScores | None:
        """results: where each row's token is; drawn_rows: where its logits are."""
        slots = step.slots[step.sampled[on_device[results]]]
        asking = np.flatnonzero(self._rows.num_logprobs[slots] != NO_LOGPROBS)
        if not len(asking):
            return None
        rows, slots = step.sampled[on_device[results[asking]]], slots[asking]
        count, num_listed = len(asking), self._rows.num_listed[slots]
        width = -(-count // 4) * 4  # every column begins on 16 bytes, else kernels would be compiled anew
        numbers = np.full(3 * width + (1 + num_listed.max()) * count, -1, np.int32)
        columns, ids = numbers[: 3 * width].reshape(3, width), numbers[3 * width :].reshape(count, -1)
        columns[:, :count] = drawn_rows[asking], self._rows.processed_logprobs[slots], results[asking]
        for entry in np.flatnonzero(num_listed).tolist():
            ids[entry, 1 : 1 + num_listed[entry]] = self._rows.listed_ids[slots[entry]]
        placed = sent(numbers, self._device)
        looked_at, is_processed, at = placed[: 3 * width].view(3, width)[:, :count]
        scored = placed[3 * width :].view(count, -1)
        scored[:, 0] = self.results[0, at]
        x, kept, settings = drawn
        view = View(x, Entries(looked_at, is_processed), (settings, kept))
        return pending(view, scored, rows, step.ends[rows], self._rows.num_logprobs[slots], num_listed)

    def keep(self, slots: Ints, tokens: Ints) -> None:
        """The tokens of rows that the host sampled."""
        pair = to_device([slots.tolist(), tokens.tolist()], torch.int32, self._device)
        self.last_token[pair[0]] = pair[1]

    def check(self, slots: Sequence[int]) -> None:
        """The device's histories are those of the host's account. Raises AssertionError."""
        for slot in slots:
            block = self._blocks[slot]
            if block is not None:
                self._rows.adjustments.check_history(slot, *history_of(block))


def filter_of(backend: str) -> Filter:
    """ValueError: it is not here."""
    if backend != "flashinfer":
        return find_kept
    if missing := flashinfer_filters.why_not():
        raise ValueError(f"sampling_backend='flashinfer' is not here: {missing}")
    return flashinfer_filters.find_kept


def _ends_of(inits: Sequence[RowInit]) -> np.ndarray:
    """What `RowEnds.begin` takes."""
    rows = np.full((len(inits), 2 + MOST_ENDS.value), NO_ID, np.int32)
    for row, init in zip(rows, inits, strict=True):
        row[:2] = init.slot, max(init.min_tokens, len(init.forced_ids))
        if len(init.end_ids) <= MOST_ENDS.value:
            row[2 : 2 + len(init.end_ids)] = init.end_ids
    return rows


def _asked(init: RowInit) -> Asked | None:
    """What is done to the row's logits on the device; None: nothing, or the host does it."""
    asked, is_held = init.adjustments, init.min_tokens > 0 and bool(init.masked_ids)
    if (asked is None and not is_held) or (asked is not None and asked.functions):
        return None
    early = np.array(init.masked_ids, np.int64)
    if asked is None:
        return Asked(init.prompt_length, early=early, min_tokens=init.min_tokens)
    words = [word for word in asked.bad_words if len(word) > 1]
    looks_back = bool(words) or asked.has_penalties
    return Asked(
        prompt_length=init.prompt_length,
        bias_ids=np.array([id_ for id_, _ in asked.logit_bias], np.int64),
        bias_values=np.array([value for _, value in asked.logit_bias], np.float32),
        allowed=None if asked.allowed_ids is None else np.array(asked.allowed_ids, np.int64),
        banned=np.array([word[0] for word in asked.bad_words if len(word) == 1], np.int64),
        early=early,
        min_tokens=init.min_tokens,
        words=words,
        penalties=(asked.repetition_penalty, asked.presence_penalty, asked.frequency_penalty)
        if asked.has_penalties
        else None,
        history=asked.history if looks_back else (),
    )
