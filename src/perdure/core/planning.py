"""`Planning`: which rows the next step computes.

- A step first continues residents that decode. Then prompts, those begun and those to be taken in, share what is left
  of one token budget in order (priority, arrival).
- With `prompts_first`, where nobody follows any request, rows that decode wait while prompts fill step after step.
- Nobody overtakes one that waits for a slot or for pages. Whoever is ready goes past those whose grammar is not. One
  that waits for a prefix which another computes is passed over too, and a slot and its pages are kept for it.
- Pages for a prefill are taken whole at admission, so a prefill never stalls; a decoding row takes one at a time.
- Without a page somebody is put aside (`preempt`).
- A step in which somebody decodes has fewer tokens of prompts (`budget.beside`), unless nobody follows any request.
- Where nobody could be taken in, and everybody decodes, they get several steps in a row (`budget.burst`).
- Work is O(rows), never O(context).
"""

from __future__ import annotations

from perdure.api.config import CoreConfig
from perdure.api.plan import StepPlan
from perdure.core import budget, preempt
from perdure.core.control import Control
from perdure.core.draft import PlanDraft
from perdure.core.group import Fork
from perdure.core.lifecycle import Status
from perdure.core.requests import Requests
from perdure.core.state import RequestState


class Planning:
    """Plans over `requests`; `control` says whether, and whom it holds back."""

    def __init__(self, config: CoreConfig, requests: Requests, control: Control) -> None:
        self._config = config
        self._requests = requests
        self._control = control
        self._num_positions_first = 0
        """Those of prompts that rows waited for, less a step's for each step that they took part in since."""

    @property
    def can_act(self) -> bool:
        """Whether `plan` could return a step now, as far as is known without trying."""
        if not self._control.may_plan:
            return False
        first = self._next_ready()
        return bool(self._requests.residents) or (first is not None and not self._requests.waiting[first].in_flight)

    def plan(self, most_steps: int) -> StepPlan | None:
        """The next step, or a burst of most_steps at most; None if there is nothing to do now (paused, drained, or all
        that can run is in flight)."""
        requests = self._requests
        if not self._control.may_plan:
            return None
        poisoned = requests.pool.unowned() if self._config.poison_free_pages else []
        draft = PlanDraft(requests.counters.num_steps, self._config.max_num_batched_tokens, requests.pool, poisoned)
        evictions = -1
        while not draft.num_rows and evictions != requests.counters.num_evictions:
            # An eviction may free what an earlier resident lacked: look again before giving up.
            evictions = requests.counters.num_evictions
            self._continue_residents(draft, most_steps)
            self._admit_waiting(draft)
        if not draft.num_rows:
            return None
        plan = draft.finish()
        requests.counters.num_steps += plan.num_steps
        requests.steps_in_flight += 1
        return plan

    def _continue_residents(self, draft: PlanDraft, most_steps: int) -> None:
        config, requests = self._config, self._requests
        prefills = [state for state in requests.residents if state.num_planned < state.prefill_end]
        others = [state for state in requests.residents if state.prefill_end <= state.num_planned < state.last_position]
        num_prefills = len(prefills)
        if others and self._prompts_fill(prefills, others, draft.tokens_left):
            self._continue_prompts(prefills, draft)
            self._admit_waiting(draft)
            self._num_positions_first += config.max_num_batched_tokens - draft.tokens_left
            prefills = []
        decodes: list[RequestState] = []
        host_has_a_say = any(s.needs_host and s.draws_in_flight for s in requests.residents)
        for state in others:
            if len(decodes) == draft.tokens_left:
                break
            if not state.is_resident:
                continue  # evicted for one before it
            if state.needs_host and host_has_a_say:
                continue  # its neighbours go on; those like it go together, so that no step is half full
            if state.num_planned == len(state.pages) * config.page_size and not self._grow(state, draft):
                continue
            decodes.append(state)
        lengths = [1] * len(decodes)
        num_unfinished = num_prefills + sum(state.is_resident for state in others)
        if most_steps > 1 and not draft.num_rows and 0 < len(decodes) == num_unfinished:
            lengths = self._burst(draft, decodes, most_steps)
        draft.decode(decodes, lengths)
        if decodes:
            paid = max(lengths) * config.max_num_batched_tokens
            self._num_positions_first = max(0, self._num_positions_first - paid)
            if requests.num_open and config.max_num_mixed_tokens:
                most = budget.beside(len(decodes), config.max_num_batched_tokens, config.max_num_mixed_tokens)
                draft.tokens_left = min(draft.tokens_left, most)
        self._continue_prompts(prefills, draft)

    def _prompts_fill(self, begun: list[RequestState], decoding: list[RequestState], num_tokens: int) -> bool:
        """Whether rows that decode wait for prompts, which fill this step: where all that wait for a slot can have one,
        there are pages for everybody to the end, each will decode, none that decodes is more urgent, and what prompts
        had so is not yet a pool of positions."""
        config, requests = self._config, self._requests
        waiting, residents, pool = requests.waiting, requests.residents, requests.pool
        if not config.prompts_first or requests.num_open or not waiting or len(waiting) > requests.slots.num_free:
            return False
        if self._num_positions_first >= config.num_pages * config.page_size:
            return False
        if any(s.in_flight or s.num_evictions or s.tried_at == pool.version or s.group.waits_for for s in waiting):
            return False
        if any(s.last_position <= s.prompt_length for s in (*begun, *waiting)):
            return False
        if min(s.request.params.priority for s in decoding) < waiting[0].request.params.priority:
            return False
        num_pages = sum(budget.num_pages_for(s.last_position, config.page_size) for s in (*residents, *waiting))
        if num_pages > pool.num_free + sum(len(s.pages) for s in residents):
            return False
        known = sum(s.prefill_end - s.num_planned for s in begun) + sum(len(s.tokens) for s in waiting if not s.awaits)
        return known > num_tokens

    def _continue_prompts(self, prefills: list[RequestState], draft: PlanDraft) -> None:
        """Those begun, each after those that go before it."""
        for state in prefills:
            if draft.tokens_left <= 0 or not state.is_resident:
                continue
            self._admit_waiting(draft, before=state)
            if draft.tokens_left > 0:
                self._prefill(state, draft)

    def _prefill(self, state: RequestState, draft: PlanDraft) -> None:
        draft.prefill(state, min(state.prefill_end - state.num_planned, draft.tokens_left))

    def _burst(self, draft: PlanDraft, decodes: list[RequestState], most_steps: int) -> list[int]:
        """How many steps each row takes part in, with the pages for them. decodes: all that go on."""
        requests, page_size = self._requests, self._config.page_size
        left = [state.last_position - state.num_planned for state in decodes]
        if requests.num_waiting:  # for a slot, which no end may leave empty that is known now
            is_full = not requests.slots.num_free and len(decodes) == len(requests.residents)
            most_steps = min(most_steps, *left) if is_full else 1
        if most_steps == 1 or not all(state.may_burst for state in decodes):
            return [1] * len(decodes)
        room = [len(state.pages) * page_size - state.num_planned for state in decodes]
        lengths, num_pages = budget.burst(left, room, most_steps, requests.pool.num_free, page_size)
        for state, count in zip(decodes, num_pages, strict=True):
            if count:
                draft.grow(state, count)
        return lengths

    def _grow(self, state: RequestState, draft: PlanDraft) -> bool:
        """One more page for a decoding row; without one, somebody is put aside, or it waits if prompts came first."""
        requests = self._requests
        while not requests.pool.num_free:
            if draft.num_rows:
                return False
            if preempt.may_pause(state, requests.residents, self._config.paused_pages):
                requests.pause(state)
                return False
            victim = preempt.victim(requests.residents)
            requests.evict(victim)
            if victim is state:
                return False
        if state.status is Status.PAUSED:
            state.move(Status.RUNNING)
            requests.note(state, "resumed")
        draft.grow(state, 1)
        return True

    def _next_ready(self, at: int = 0) -> int | None:
        """The first place in the queue, from this one on, of one that neither a pause nor what it needs holds back."""
        waiting, may_admit = self._requests.waiting, self._control.may_admit
        places = range(at, len(waiting))
        return next((n for n in places if not waiting[n].group.waits_for and may_admit(waiting[n].arrival)), None)

    def _admit_waiting(self, draft: PlanDraft, before: RequestState | None = None) -> None:
        """Take in as many as there is room for, or of these only who goes before one that was begun."""
        requests = self._requests
        if not self._config.admit_beside_paused and any(s.status is Status.PAUSED for s in requests.residents):
            return
        num_passed = num_kept = at = 0
        while num_passed < requests.slots.num_free and (place := self._next_ready(at)) is not None:
            at, state = place, requests.waiting[place]
            if draft.tokens_left <= 0 or state.in_flight or (before and before.order < state.order):
                break
            if state.group.must_wait(state):
                requests.hold(state)  # so the next one stands here
                continue
            if state.tried_at == requests.pool.version:
                break
            num_found = requests.cache.find(state)
            fork = state.group.fork_for(state, num_found, self._config.page_size)
            if fork is None and requests.cache.is_coming(state):
                requests.let_wait(state)
                num_kept += self._num_pages(state) - num_found
                num_passed, at = num_passed + 1, place + 1
            elif not self._take_in(state, num_found, fork, num_kept, draft):
                break

    def _num_pages(self, state: RequestState) -> int:
        """For all its known tokens."""
        return budget.num_pages_for(min(len(state.tokens), state.last_position), self._config.page_size)

    def _fits(self, state: RequestState, num_needed: int, shared: list[int]) -> bool:
        requests = self._requests
        paused = sum(other.status is Status.PAUSED for other in requests.residents)
        num_free = requests.pool.num_free - requests.pool.num_idle(shared) - paused
        return preempt.may_return(num_free, num_needed, len(requests.residents), state.num_evictions)

    def _take_in(self, state: RequestState, num_found: int, fork: Fork | None, num_kept: int, draft: PlanDraft) -> bool:
        """Give the request a slot, the pages found of its prefix or a sibling's, and private ones for the rest of its
        known tokens.

        num_kept: pages that others are to have."""
        requests, group = self._requests, state.group
        pages = requests.cache.pages(state, num_found) if fork is None else fork.pages
        needed = self._num_pages(state) - len(pages)
        if not self._fits(state, needed + num_kept, pages):
            if not num_kept:
                state.tried_at = requests.pool.version
            return False
        requests.cache.take_scores(state)
        requests.begin(state)
        state.num_planned = state.num_computed = len(pages) * self._config.page_size
        state.prefill_end = end = min(len(state.tokens), state.last_position)
        if fork is None:
            requests.cache.begin(state, len(pages))
        else:
            requests.cache.begin_beside(state, fork.source, len(pages))
        draft.init_row(state, self._config.vocab_size)
        draft.share(state, pages)
        draft.grow(state, needed)
        if fork is not None:
            draft.copy(state, fork)
        if not group.num_residencies and not group.has_output:
            # What a checkpoint brings was counted before.
            group.num_cached = group.num_cached or state.num_computed
            requests.counters.num_cached_tokens += state.num_computed
            requests.counters.num_prompt_tokens += state.prompt_length
        group.num_residencies += 1
        if not self._config.batch_invariant and (pages or state.has_begun):
            state.exact = False  # other forms go on with other bits than an undisturbed run
        requests.note(state, "scheduled", end - state.num_planned)
        self._prefill(state, draft)
        return True
