"""The simulation can fail: each of these one-line faults, planted into a copy of the real core, is caught."""

from pathlib import Path

import pytest

from tests.sim.planting import check_caught

FAULTS = {
    "eviction_forgets_the_in_flight_count": (
        "core/requests.py",
        2,
        "        self._leave(state)\n        self.waiting.add(state)",
        "        self._leave(state)\n        self.waiting.add(state); state.in_flight = 0",
    ),
    "stop_test_on_the_last_token_only": (
        "core/stopping.py",
        1,
        "tuple(tokens[at + 1 - len(s) : at + 1]) == s]",
        "tokens[at] == s[-1]]",
    ),
    "a_page_missing_from_fresh_pages": (
        "core/draft.py",
        1,
        "self._plan.fresh_pages.extend(pages)",
        "self._plan.fresh_pages.extend(pages[1:])",
    ),
    "a_result_applied_after_a_final_status": (
        "core/committing.py",
        2,
        "            if state.is_final:\n                requests.forget_if_done(state)\n                continue",
        "            if False:\n                requests.forget_if_done(state)\n                continue",
    ),
    "a_full_prefix_hit_leaving_nothing_to_compute": (
        "core/prefix_cache.py",
        1,
        "return min(len(state.tokens), state.last_position) - 1",
        "return min(len(state.tokens), state.last_position)",
    ),
    "a_checkpoint_that_forgets_its_text": (
        "core/stopping.py",
        1,
        "                self.strings.push(token, counts=False)",
        "                pass",
    ),
    "a_seed_resolved_again_after_a_checkpoint": (
        "core/checkpoint.py",
        2,
        "Group(request, checkpoint.seed,",
        "Group(request, config.seed if request.params.seed is None else request.params.seed,",
    ),
    "a_key_published_at_plan_time": (
        "core/planning.py",
        2,
        "        self._prefill(state, draft)\n        return True",
        "        self._prefill(state, draft); state.num_computed = state.num_planned; requests.cache.publish(state)\n"
        "        return True",
    ),
    "an_urgent_prompt_behind_one_that_was_begun": (
        "core/planning.py",
        1,
        "            self._admit_waiting(draft, before=state)",
        "            pass",
    ),
    "cached_keys_that_survive_a_drop_of_the_kv": (
        "core/requests.py",
        1,
        "        self._replay_residents()\n        self.cache.clear(self.residents)",
        "        self._replay_residents()",
    ),
    "a_page_forgotten_when_the_kv_is_copied_out": (
        "core/pages.py",
        2,
        "if self._holders[page] or page in self._idle]",
        "if page in self._idle]",
    ),
    "pages_that_come_back_shifted_by_one": (
        "runner/fake.py",
        1,
        "                self._kv[page] = self._away[page]",
        "                self._kv[page] = self._away[min((p for p in directive.pages if p > page), default=page)]",
    ),
    "a_page_that_is_not_brought_back": (
        "core/control.py",
        3,
        "requests.kept_pages() if is_away else []",
        "requests.kept_pages()[:-1] if is_away else []",
    ),
    "the_mark_of_later_weights_lost": (
        "core/state.py",
        4,
        "if not self.epochs or self.epochs[-1][1] != epoch:",
        "if not self.epochs:",
    ),
    "a_checkpoint_that_forgets_which_weights": (
        "core/checkpoint.py",
        2,
        "epochs=tuple(state.epochs),",
        "epochs=tuple(state.epochs[-1:] and [(0, state.epochs[-1][1])]),",
    ),
    "a_checkpoint_with_prompt_scores_of_other_weights": (
        "core/checkpoint.py",
        2,
        "if checkpoint.prompt_scores is not None and (is_same or checkpoint.num_output):",
        "if checkpoint.prompt_scores is not None:",
    ),
    "a_row_planned_before_the_host_had_its_say": (
        "core/planning.py",
        2,
        "if state.needs_host and host_has_a_say:",
        "if False:",
    ),
    "a_history_without_the_output_after_an_eviction": (
        "core/draft.py",
        1,
        "history=tuple(state.tokens)",
        "history=tuple(state.request.prompt_token_ids)",
    ),
    "a_stop_inside_a_forced_continuation": (
        "core/stopping.py",
        1,
        "counts = count >= self.min_tokens and count > self.num_forced",
        "counts = count >= self.min_tokens",
    ),
    "a_reclaimed_page_that_leaves_those_under_it": ("core/prefix.py", 2, "gone += node.children", "pass"),
    "a_salt_that_makes_no_difference": (
        "core/prefix.py",
        1,
        "return (self._begun_with, salt)",
        "return (self._begun_with, None)",
    ),
    "a_wait_for_one_who_has_left": (
        "core/prefix_cache.py",
        2,
        "        key = self._key_of.pop(state.arrival, None)\n",
        "        key = None\n",
    ),
    "scores_of_a_page_one_too_far": (
        "core/prefix_cache.py",
        1,
        "first, end = max(index * size - 1, 0), (index + 1) * size - 1",
        "first, end = index * size, min((index + 1) * size, state.prompt_length - 1)",
    ),
    "a_pin_that_is_never_given_back": (
        "core/pins.py",
        1,
        "            self._stop_waiting(pin)\n            self._pool.release(pin.pages)\n",
        "            self._stop_waiting(pin)\n",
    ),
    "a_child_that_draws_as_the_first": ("core/draft.py", 1, "        child=state.child,\n", ""),
    "a_copy_one_position_too_long": (
        "core/draft.py",
        1,
        "plan.copy_length.append(fork.num_copied)",
        "plan.copy_length.append(fork.num_copied + 1)",
    ),
    "a_prompt_shared_before_it_is_committed": (
        "core/group.py",
        2,
        "return child.num_computed >= child.prompt_length - 1",
        "return child.num_planned >= child.prompt_length - 1",
    ),
    "children_held_back_by_nobody": (
        "core/requests.py",
        1,
        "        self.forget_if_done(state)\n        self._let_in(group)\n",
        "        self.forget_if_done(state)\n",
    ),
    "a_fork_that_forgets_its_sibling_is_of_other_weights": (
        "core/prefix_cache.py",
        2,
        "state.exact = state.exact and sibling.exact",
        "pass",
    ),
    "prompt_scores_forgotten_though_a_child_has_output": (
        "core/group.py",
        1,
        "if self.residents or self.has_output:",
        "if self.residents:",
    ),
    "a_burst_without_its_last_page": (
        "core/planning.py",
        1,
        "draft.grow(state, count)",
        "draft.grow(state, count - 1)",
    ),
    "pages_published_of_what_follows_a_stop": (
        "core/committing.py",
        2,
        "computed if ending is None else min(computed, len(state.tokens) - 1)",
        "computed",
    ),
    "in_flight_kv_that_survives_other_weights": (
        "core/requests.py",
        1,
        '        if in_flight == "recompute":\n            self._replay_residents()\n',
        "",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_caught(name: str, tmp_path: Path) -> None:
    file, depth, right, wrong = FAULTS[name]
    check_caught(tmp_path, file, right, wrong, "life", "--depth", str(depth), "--count", "2000")
