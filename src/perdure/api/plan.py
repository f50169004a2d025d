"""The two values that cross between deciding and executing: `StepPlan` down, `StepOutput` up.

- Both are columns of plain host numbers, complete in themselves and serialisable (no tensor, no object of core).
- `StepPlan` names rows by slot; `request` carries the engine's serial number so that an output cannot be misread.
- A plan asks for exactly what requests asked; the device computes nothing provisional.
"""

from __future__ import annotations

import msgspec

from perdure.api.ending import Failure
from perdure.api.structured import StructuredOutputsParams

DEVICE_POSITION = -1
"""`start` of a row that goes on where its device row stands, with the token sampled last into that row."""

MOST_STEPS = 16
"""Of a burst: by then a step's share of the host's work is small, and of rows that end inside not much is in vain."""


class Adjustments(msgspec.Struct, frozen=True, array_like=True):
    """What is done to a row's logits before its temperature, beyond the mask of `RowInit.masked_ids`.

    allowed_ids: None = all. bad_words: the last id of one cannot be sampled where the ids before it came just now.
    functions: logits processors, by the names the runner knows them by. structure: what the output must be; with
    ends_last an end id is allowed only where nothing else can follow. history: all known tokens of the request, prompt
    first, where penalties, bad words, functions or structure look back; the device appends what it samples.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_ids: tuple[int, ...] | None = None
    bad_words: tuple[tuple[int, ...], ...] = ()
    functions: tuple[str, ...] = ()
    history: tuple[int, ...] = ()
    structure: StructuredOutputsParams | None = None
    ends_last: bool = False

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def looks_back(self) -> bool:
        """Whether anything here depends on the tokens before."""
        return (
            self.has_penalties
            or bool(self.functions)
            or self.structure is not None
            or any(len(word) > 1 for word in self.bad_words)
        )


class RowInit(msgspec.Struct, frozen=True, array_like=True):
    """Settings a device row gets when a request takes a slot. They stay until the slot's next `RowInit`.

    A sampled token at absolute position p has output index p - prompt_length; the draw's key is (seed, child, output
    index).
    `masked_ids` cannot be sampled while the output index is below `min_tokens`. One of `end_ids` that is sampled from
    there on, and beyond `forced_ids`, ends the request: what a burst computes after it is not looked at.
    `num_logprobs`: -2 none, -1 whole vocabulary, 0 chosen only, k the k best (`NO_LOGPROBS` below). `listed_ids` are
    scored beside these at each output position. The output begins with `forced_ids`, whatever would be drawn.
    """

    slot: int
    request: int
    prompt_length: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    min_tokens: int
    masked_ids: tuple[int, ...]
    num_logprobs: int
    num_prompt_logprobs: int
    processed_logprobs: bool
    adjustments: Adjustments | None = None
    listed_ids: tuple[int, ...] = ()
    forced_ids: tuple[int, ...] = ()
    child: int = 0
    end_ids: tuple[int, ...] = ()


NO_LOGPROBS = -2


class DeviceRow(msgspec.Struct, frozen=True, array_like=True):
    """What a device row must hold when no step is in flight: the core's own account of it, for comparing.

    position: the next to compute. last_token: the token that stands there, if it was sampled here. pages: its table.
    """

    settings: RowInit
    position: int
    last_token: int | None
    pages: list[int]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """One step. Row i computes positions start[i] .. start[i] + length[i] - 1 of the request in slot[i].

    start[i] = DEVICE_POSITION: length[i] positions one after another, from where the device row stands, each with the
        token sampled last into it, and num_tokens[i] = 0. Otherwise num_tokens[i] = length[i] ids of `tokens` belong to
        the row.
    sample[i] = 1: draw the token that follows the row's last position; 0: draw nothing.
    A length above 1 from DEVICE_POSITION is a burst: `num_steps` steps without the host between them, a row taking part
        in the first length[i]. Every row of such a plan decodes, and draws a token at each of its positions.
    step: how many of the device were before it.
    num_targets[i] ids of `targets` are known prompt tokens to score; the first of them stands at absolute position
        target_start[i] (so its score comes from the logits at target_start[i] - 1, which this row computes).
    Applied before any row runs, in this order: `row_inits`; the block table entries (table_slot, table_index,
        table_page); then every page of `poisoned_pages`, which nobody owns, is filled with NaN (for debugging, else
        there are none), and every page of `fresh_pages` is cleared; then the first copy_length[j] positions of page
        copy_from[j] are copied into page copy_to[j], which is a fresh one (copy_from[j] never is).
    """

    step: int
    request: list[int]
    slot: list[int]
    start: list[int]
    length: list[int]
    num_tokens: list[int]
    tokens: list[int]
    sample: list[int]
    target_start: list[int]
    num_targets: list[int]
    targets: list[int]
    row_inits: list[RowInit]
    table_slot: list[int]
    table_index: list[int]
    table_page: list[int]
    fresh_pages: list[int]
    poisoned_pages: list[int] = []
    copy_from: list[int] = []
    copy_to: list[int] = []
    copy_length: list[int] = []

    @property
    def num_steps(self) -> int:
        """How many of the device this is: 1 unless it is a burst."""
        return 1 if self.tokens else max(self.length, default=1)


class ScoreColumns(msgspec.Struct, frozen=True, array_like=True):
    """Scores of tokens, one entry a scored token, flat: `row` is the plan's row, `position` the token's absolute one.

    chosen: natural-log probability of that token. rank: 1 = the most likely. num_top[j] pairs of (top_ids,
    top_scores), best first (ties to the lower id), belong to entry j; 0 where only the chosen score was asked. Pairs
    are packed (int32 and float32, little-endian): a whole vocabulary a token would be gigabytes of numbers otherwise.
    Entries of one row are contiguous, in order of position, and rows come in the plan's order.
    num_listed[j] of (listed_ranks, listed_scores), packed alike, belong to entry j: of the row's `listed_ids`, in their
    order. Empty = no row has any.
    """

    row: list[int]
    position: list[int]
    chosen: list[float]
    rank: list[int]
    num_top: list[int]
    top_ids: bytes
    top_scores: bytes
    num_listed: list[int] = []
    listed_ranks: bytes = b""
    listed_scores: bytes = b""

    @staticmethod
    def empty() -> ScoreColumns:
        return ScoreColumns([], [], [], [], [], b"", b"")


class StepOutput(msgspec.Struct, frozen=True, array_like=True):
    """What a step gave: num_sampled[i] of `tokens` belong to the plan's row i (0 where nothing was to be sampled).

    records: scores of sampled tokens, one for each sampled token of a row that asked. prompt_records: of targets.
    errors: (row, what its request ends with); such a row has the tokens of a burst before its first failure, and of
    its targets the scores before it.
    """

    step: int
    num_sampled: list[int]
    tokens: list[int]
    records: ScoreColumns
    prompt_records: ScoreColumns
    errors: list[tuple[int, Failure]]

    @staticmethod
    def empty(step: int) -> StepOutput:
        """Of a step without rows."""
        return StepOutput(step, [], [], ScoreColumns.empty(), ScoreColumns.empty(), [])
