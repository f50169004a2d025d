"""`PlanDraft`: a `StepPlan` in the making. The one door through which pages, table entries and rows enter a plan.

Every private page comes from here, so none can be missing from `fresh_pages`.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from perdure.api.plan import DEVICE_POSITION, NO_LOGPROBS, Adjustments, RowInit, StepPlan
from perdure.api.sampling import ALL_LOGPROBS, SamplingParams
from perdure.core.group import Fork
from perdure.core.pages import PagePool
from perdure.core.state import RequestState


class PlanDraft:
    """tokens_left: what remains of the step's budget. poisoned: pages that nobody owns, for debugging."""

    def __init__(self, step: int, budget: int, pool: PagePool, poisoned: Sequence[int] = ()) -> None:
        self.tokens_left = budget
        self._pool = pool
        self._plan = StepPlan(
            step, [], [], [], [], [], [], [], [], [], [], [], [], [], [], [], list(poisoned), [], [], []
        )

    @property
    def num_rows(self) -> int:
        return len(self._plan.request)

    def finish(self) -> StepPlan:
        return self._plan

    def grow(self, state: RequestState, count: int) -> None:
        """Give the request count private pages; they are cleared before this step's rows run."""
        pages = self._pool.take(count)
        self._plan.fresh_pages.extend(pages)
        self._enter(state, pages)

    def share(self, state: RequestState, pages: list[int]) -> None:
        """Give the request published pages, or a sibling's; they keep their content."""
        self._pool.share(pages)
        self._enter(state, pages)

    def copy(self, state: RequestState, fork: Fork) -> None:
        """Copy the beginning of a sibling's page into the first private page of the request."""
        if fork.num_copied:
            at, plan = len(fork.pages), self._plan
            plan.copy_from.append(fork.source.pages[at])
            plan.copy_to.append(state.pages[at])
            plan.copy_length.append(fork.num_copied)
            state.num_copied = fork.num_copied
            state.num_planned += fork.num_copied

    def _enter(self, state: RequestState, pages: list[int]) -> None:
        plan, first = self._plan, len(state.pages)
        plan.table_slot.extend([state.slot] * len(pages))
        plan.table_index.extend(range(first, first + len(pages)))
        plan.table_page.extend(pages)
        state.pages.extend(pages)

    def init_row(self, state: RequestState, vocab_size: int) -> None:
        """Give the device row this request's settings."""
        self._plan.row_inits.append(row_settings(state, vocab_size))

    def decode(self, states: Sequence[RequestState], lengths: Sequence[int]) -> None:
        """So many positions of each, from where its device row stands."""
        plan, count = self._plan, len(states)
        plan.request.extend([state.arrival for state in states])
        plan.slot.extend([state.slot for state in states])
        plan.start.extend([DEVICE_POSITION] * count)
        plan.length.extend(lengths)
        plan.sample.extend([1] * count)
        for column in (plan.num_tokens, plan.target_start, plan.num_targets):
            column.extend([0] * count)
        for state, length in zip(states, lengths, strict=True):
            state.num_planned += length
            state.in_flight += 1
            state.in_flight_tokens += length
        self.tokens_left -= count

    def prefill(self, state: RequestState, length: int) -> None:
        """The next `length` positions, their tokens given."""
        plan, start = self._plan, state.num_planned
        end = start + length
        plan.request.append(state.arrival)
        plan.slot.append(state.slot)
        plan.start.append(start)
        plan.length.append(length)
        plan.num_tokens.append(length)
        plan.tokens.extend(state.tokens[start:end])
        plan.sample.append(1 if end == len(state.tokens) else 0)
        self._score_prompt(state, start, end)
        state.num_planned = end
        state.in_flight += 1
        self.tokens_left -= length

    def _score_prompt(self, state: RequestState, start: int, end: int) -> None:
        """Ask for the scores of the prompt tokens that follow these positions and are not recorded yet."""
        plan = self._plan
        first, last = start + 1, min(end + 1, state.prompt_length)
        if state.prompt_scores is None:
            last = first
        else:
            first = max(first, state.prompt_scores.num_scored + 1)
        count = max(0, last - first)
        plan.target_start.append(first if count else 0)
        plan.num_targets.append(count)
        plan.targets.extend(state.tokens[first : first + count])


def row_settings(state: RequestState, vocab_size: int) -> RowInit:
    """What the device row of a resident request is told of it."""
    params = state.request.params
    return RowInit(
        slot=state.slot,
        request=state.arrival,
        prompt_length=state.prompt_length,
        temperature=float(params.temperature),
        top_k=params.top_k if 0 < params.top_k < vocab_size else 0,
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        seed=state.group.seed,
        min_tokens=state.stops.min_tokens,
        masked_ids=state.stops.masked_ids,
        num_logprobs=_num_logprobs(_best_asked(params), vocab_size),
        num_prompt_logprobs=_num_logprobs(params.prompt_logprobs, vocab_size),
        processed_logprobs=state.group.logprobs_mode == "processed",
        adjustments=_adjustments(state),
        listed_ids=params.logprob_token_ids or (),
        forced_ids=params.forced_token_ids or (),
        child=state.child,
        end_ids=tuple(state.stops.reasons),
    )


def _adjustments(state: RequestState) -> Adjustments | None:
    """What the request asked; None = nothing."""
    params = state.request.params
    asked = Adjustments(
        repetition_penalty=float(params.repetition_penalty),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        logit_bias=params.logit_bias or (),
        allowed_ids=params.allowed_token_ids,
        bad_words=tuple(word for word in params.bad_words or () if not isinstance(word, str)),
        functions=params.logits_processors,
        structure=params.structured_outputs,
        ends_last=params.structured_outputs is not None and params.ignore_eos,
    )
    if asked == Adjustments():
        return None
    return replace(asked, history=tuple(state.tokens)) if asked.looks_back else asked


def _best_asked(params: SamplingParams) -> int | None:
    """`logprobs`; listed ids alone ask for the chosen one's score too."""
    return 0 if params.logprobs is None and params.asks_scores else params.logprobs


def _num_logprobs(asked: int | None, vocab_size: int) -> int:
    if asked is None:
        return NO_LOGPROBS
    return ALL_LOGPROBS if asked == ALL_LOGPROBS else min(asked, vocab_size)
