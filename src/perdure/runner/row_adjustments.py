"""The part of the device rows that says what is done to their logits before temperature, and the history it needs.

- The history comes with a row's `RowInit` and grows by what the device samples: it is the true one whatever is in
  flight. A step adds one token a row; nothing is counted anew.
- Rows that ask for nothing cost nothing: columns as wide as the vocabulary are touched by penalised rows only, and what
  was never touched takes no memory.

Shapes: S slots, V = vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from perdure.api.ending import Failure
from perdure.api.plan import Adjustments, RowInit
from perdure.ops.adjust import Penalties, RowIds, RowMasks, StepAdjustments
from perdure.ops.select import Floats, Ids
from perdure.runner.functions import Functions, Processor
from perdure.runner.history import History
from perdure.runner.masks import Walk, Wanted

NONE: Ids = np.empty(0, np.int64)


@dataclass(slots=True)
class Special:
    """What one row asked that is not a number. tokens: its history, kept only where something looks back."""

    bias_ids: Ids
    bias_values: Floats
    allowed: Ids | None
    always_banned: Ids
    sequences: tuple[tuple[int, ...], ...]
    functions: tuple[str, ...]
    prompt_length: int
    walk: Walk | None = None
    tokens: list[int] = field(default_factory=list)

    @property
    def keeps_tokens(self) -> bool:
        return bool(self.sequences or self.functions) or self.walk is not None

    def banned(self) -> Ids:
        """Ids that would complete a bad word now."""
        tokens = self.tokens
        ending = [
            word[-1]
            for word in self.sequences
            if len(word) <= len(tokens) + 1 and tuple(tokens[len(tokens) + 1 - len(word) :]) == word[:-1]
        ]
        return np.concatenate([self.always_banned, np.array(ending, np.int64)]) if ending else self.always_banned


class RowAdjustments:
    """`functions`: the logits processors that rows name. calls_functions, walks [S]: rows that call some, rows that are
    held to a grammar."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self.functions = Functions()
        self.vocab_size = vocab_size
        self.calls_functions = np.zeros(num_slots, np.bool_)
        self.walks = np.zeros(num_slots, np.bool_)
        self._special: list[Special | None] = [None] * num_slots
        self._is_special = np.zeros(num_slots, np.bool_)
        self._is_penalised = np.zeros(num_slots, np.bool_)
        self._repetition = np.ones(num_slots, np.float32)
        self._presence = np.zeros(num_slots, np.float32)
        self._frequency = np.zeros(num_slots, np.float32)
        self._output_counts = np.zeros((num_slots, vocab_size), np.int32)
        self._in_prompt = np.zeros((num_slots, vocab_size), np.bool_)
        self._min_tokens = np.zeros(num_slots, np.int64)
        self._masked_ids = [NONE] * num_slots

    def init(self, init: RowInit) -> None:
        slot, asked = init.slot, init.adjustments
        self._min_tokens[slot] = init.min_tokens if init.masked_ids else 0
        self._masked_ids[slot] = np.array(init.masked_ids, np.int64)
        self._is_penalised[slot] = asked is not None and asked.has_penalties
        self._is_special[slot] = asked is not None
        self._special[slot] = None if asked is None else _special(asked, init.prompt_length)
        self.calls_functions[slot] = asked is not None and bool(asked.functions)
        self.walks[slot] = asked is not None and asked.structure is not None
        if asked is not None and asked.has_penalties:
            history = np.array(asked.history, np.int64)
            self._repetition[slot] = asked.repetition_penalty
            self._presence[slot] = asked.presence_penalty
            self._frequency[slot] = asked.frequency_penalty
            self._in_prompt[slot] = False
            self._in_prompt[slot, history[: init.prompt_length]] = True
            counts = np.bincount(history[init.prompt_length :], minlength=self._output_counts.shape[1])
            self._output_counts[slot] = counts

    def sampled(self, slots: Ids, tokens: Ids) -> None:
        """These rows got these tokens."""
        if not self._is_special[slots].any():
            return
        counted = self._is_penalised[slots]
        self._output_counts[slots[counted], tokens[counted]] += 1
        for slot, token in zip(slots.tolist(), tokens.tolist(), strict=True):
            special = self._special[slot]
            if special is not None and special.keeps_tokens:
                special.tokens.append(token)

    def touches(self, slots: Ids, output_index: Ids) -> NDArray[np.bool_]:
        """Whether anything is done to the logits of each of these rows at these output indices."""
        touched: NDArray[np.bool_] = self._is_special[slots] | (output_index < self._min_tokens[slots])
        return touched

    def check(self, slot: int, told: RowAdjustments) -> None:
        """What this row asked, and its history, are those of another account of it."""
        one, two = self._special[slot], told._special[slot]
        assert (one is None) == (two is None), f"slot {slot}: {one} is asked, the core says {two}"
        if one is None or two is None:
            return
        for name in (column.name for column in fields(one)):
            found, right = getattr(one, name), getattr(two, name)
            same = np.array_equal(found, right) if isinstance(found, np.ndarray) else found == right
            assert same, f"slot {slot}: {name} is {found}, the core says {right}"
        if self._is_penalised[slot]:
            for column, right in ((self._output_counts, told._output_counts), (self._in_prompt, told._in_prompt)):
                assert np.array_equal(column[slot], right[slot]), f"slot {slot}: its penalties count another history"

    def check_history(self, slot: int, tokens: list[int], counts: dict[int, int]) -> None:
        """Another account of a row that looks back has the same tokens, where this one keeps them, and has counted the
        same ones; both are empty where that one does not look back."""
        special = self._special[slot]
        if tokens and special is not None and special.keeps_tokens:
            assert tokens == special.tokens, f"slot {slot}: the device's history is {tokens}, not {special.tokens}"
        if counts or self._is_penalised[slot]:
            here = np.flatnonzero((self._output_counts[slot] > 0) | self._in_prompt[slot]).tolist()
            right = {id_: int(self._output_counts[slot, id_]) for id_ in here}
            assert counts == right, f"slot {slot}: the device counts {counts}, not {right}"

    def call_functions(self, slots: Ids, logits: Floats, errors: dict[int, Failure]) -> Floats:
        """Logits [n, V] after the rows' own processors. errors: by index, of those whose function failed."""
        x = logits
        for index in np.flatnonzero(self._is_special[slots]).tolist():
            special = self._special[int(slots[index])]
            assert special is not None
            if not special.functions:
                continue
            if x is logits:
                x = logits.copy()
            try:
                for name in special.functions:
                    x[index] = self._called(self.functions.find(name), special, x[index])
            except BaseException as error:  # an exit or a cancellation, too, is of this request alone
                errors[index] = Failure.of_step(error)
        return x

    @staticmethod
    def _called(processor: Processor, special: Special, logits: Floats) -> Floats:
        tokens, length = special.tokens, special.prompt_length
        return processor(History(tokens, 0, length), History(tokens, length, len(tokens)), logits)

    def wanted_masks(self, slots: Ids) -> list[Wanted]:
        """What the grammars of these rows will be asked, to draw their next tokens."""
        found = []
        for slot in slots[self._is_special[slots]].tolist():
            special = self._special[slot]
            if special is not None and special.walk is not None:
                found.append(Wanted(slot, special.walk, special.tokens, special.prompt_length))
        return found

    def of(self, slots: Ids, output_index: Ids, masks: RowMasks | None = None) -> StepAdjustments | None:
        """For drawing the tokens of these output indices; None = no row asks for anything."""
        early = np.flatnonzero(output_index < self._min_tokens[slots]).tolist()
        asking = np.flatnonzero(self._is_special[slots]).tolist()
        if not early and not asking:
            return None
        bias, values, allowed, banned = [], [np.empty(0, np.float32)], [], []
        for row in asking:
            special = self._special[int(slots[row])]
            assert special is not None
            bias.append((row, special.bias_ids))
            values.append(special.bias_values)
            if special.allowed is not None:
                allowed.append((row, special.allowed))
            banned.append((row, special.banned()))
        return StepAdjustments(
            bias=RowIds.of(bias),
            bias_values=np.concatenate(values),
            allowed=RowIds.of(allowed),
            banned=RowIds.of(banned),
            penalties=self._penalties(slots),
            too_early=RowIds.of([(row, self._masked_ids[int(slots[row])]) for row in early]),
            masks=masks,
        )

    def _penalties(self, slots: Ids) -> Penalties | None:
        rows = np.flatnonzero(self._is_penalised[slots])
        if not len(rows):
            return None
        at = slots[rows]
        return Penalties(
            row=rows,
            slot=at,
            repetition=self._repetition[at],
            presence=self._presence[at],
            frequency=self._frequency[at],
            output_counts=self._output_counts,
            in_prompt=self._in_prompt,
        )


def _special(asked: Adjustments, prompt_length: int) -> Special:
    special = Special(
        bias_ids=np.array([token for token, _ in asked.logit_bias], np.int64),
        bias_values=np.array([value for _, value in asked.logit_bias], np.float32),
        allowed=None if asked.allowed_ids is None else np.array(asked.allowed_ids, np.int64),
        always_banned=np.array([word[0] for word in asked.bad_words if len(word) == 1], np.int64),
        sequences=tuple(word for word in asked.bad_words if len(word) > 1),
        functions=asked.functions,
        prompt_length=prompt_length,
        walk=None if asked.structure is None else Walk(asked.structure, asked.ends_last),
    )
    special.tokens = list(asked.history) if special.keeps_tokens else []
    return special
