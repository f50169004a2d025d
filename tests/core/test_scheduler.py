"""What the scheduler decides, step by step: admission, chunks, pages, pause, eviction, ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.ending import Failure
from perdure.api.plan import DEVICE_POSITION
from perdure.core.admission import derived_seed
from tests.core.helpers import Bench, request, ticket_of


def test_a_prompt_is_cut_to_the_token_budget_and_sampled_at_its_end_only() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.submit("a", list(range(10)), max_tokens=2)
    lengths, samples = [], []
    while (plan := bench.launch()) is not None:
        lengths.append(plan.length[0])
        samples.append(plan.sample[0])
        bench.commit()
    assert lengths == [4, 4, 2, 1] and samples == [0, 0, 1, 1]


def test_decoding_rows_come_before_prompts_under_one_budget() -> None:
    bench = Bench(max_num_batched_tokens=5)
    bench.submit("a", [1, 2], max_tokens=20)
    bench.step()
    bench.submit("b", list(range(9)), max_tokens=1)
    plan = bench.launch()
    assert plan is not None
    assert plan.request == [0, 1] and plan.start == [DEVICE_POSITION, 0] and plan.length == [1, 4]


@pytest.mark.parametrize(("is_closed", "lengths"), [(False, [1, 8, 1, 1]), (True, [1, 9])])
def test_prompts_beside_rows_that_somebody_follows_are_cut_smaller(is_closed: bool, lengths: list[int]) -> None:
    bench = Bench(max_num_batched_tokens=17, max_num_mixed_tokens=9)
    for name, prompt, count in (("long", list(range(15)), 5), ("late", [9] * 9, 1)):
        asked = msgspec.structs.replace(request(name, prompt, max_tokens=count), is_closed=is_closed)
        bench.apply(cmd.Submit(asked))
        if name == "long":
            alone = bench.launch()
            assert alone is not None and alone.length == [15], "nobody decodes yet"
            bench.commit()
    found: list[int] = []
    while bench.scheduler.requests.counters.num_steps < 3 and (plan := bench.launch()) is not None:
        found += plan.length
        bench.commit()
    assert found[: len(lengths)] == lengths


@pytest.mark.parametrize(("is_closed", "prompts_first"), [(False, True), (True, False), (True, True)])
def test_prompts_that_fill_steps_come_before_rows_that_nobody_follows(is_closed: bool, prompts_first: bool) -> None:
    """Six prompts of five in steps of eight. Those of a closed call decode once the last cannot fill one."""
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=6, num_pages=64, prompts_first=prompts_first)
    for name in range(6):
        asked = request(name, [name] * 5, max_tokens=4, ignore_eos=True)
        bench.apply(cmd.Submit(msgspec.structs.replace(asked, is_closed=is_closed)))
    decodes = []
    while (plan := bench.launch()) is not None:
        decodes.append(plan.start.count(DEVICE_POSITION))
        assert sum(plan.length) <= 8
        bench.commit()
    assert sum(decodes) == 6 * 3
    assert decodes == ([0, 0, 0, 4, 5, 6, 2, 1] if is_closed and prompts_first else [0, 1, 3, 4, 3, 2, 2, 2, 1])


def test_a_row_that_decodes_goes_on_beside_a_prompt_that_comes_alone() -> None:
    """However long it is: nobody else is to come."""
    bench = Bench(max_num_batched_tokens=4, num_pages=64, prompts_first=True)
    for name, length in (("short", 2), ("long", 15)):
        asked = request(name, list(range(length)), max_tokens=9)
        bench.apply(cmd.Submit(msgspec.structs.replace(asked, is_closed=True)))
    bench.step()
    plan = bench.launch()
    assert plan is not None and plan.start == [DEVICE_POSITION, 2]


@pytest.mark.parametrize(
    ("most_wait", "ends"),
    [
        (1, {"max_tokens": 1}),
        (1, {"max_tokens": 0, "prompt_logprobs": 0}),
        (16, {"max_tokens": 20, "stop_token_ids": list(range(32))}),  # a pool of 256 positions, in steps of 16
    ],
)
def test_no_row_waits_without_end_for_prompts_whose_slots_are_free_again(most_wait: int, ends: dict[str, Any]) -> None:
    """Somebody else keeps the queue full."""
    bench = Bench(max_num_batched_tokens=16, max_num_seqs=5, num_pages=64, prompts_first=True)

    def submit(name: str, **params: Any) -> None:
        asked = request(name, [1] * 8, **params)
        bench.apply(cmd.Submit(msgspec.structs.replace(asked, is_closed=True, cache_salt=name)))

    submit("row", max_tokens=40, ignore_eos=True)
    bench.step()
    number = wait = longest = 0
    while not any(isinstance(e, ev.Ended) and e.record.request_id == "row" for e in bench.events):
        while bench.scheduler.requests.num_waiting < 4:
            number += 1
            submit(str(number), **ends)
        plan = bench.launch()
        assert plan is not None
        wait = 0 if DEVICE_POSITION in plan.start else wait + 1
        longest = max(longest, wait)
        bench.commit()
    assert longest <= most_wait and (longest > 0) == (most_wait > 1)


def test_whoever_comes_again_and_again_takes_a_row_no_more_than_every_other_step() -> None:
    """And the positions of one pool, once. Of a row that is more urgent nothing."""
    steps = {}
    for priority in (0, -1):
        bench = Bench(max_num_batched_tokens=16, max_num_seqs=8, num_pages=64, prompts_first=True)
        row = request("row", [1] * 4, max_tokens=40, ignore_eos=True, priority=priority)
        bench.apply(cmd.Submit(msgspec.structs.replace(row, is_closed=True)))
        bench.step()
        num_steps = number = 0
        while not any(isinstance(e, ev.Ended) and e.record.request_id == "row" for e in bench.events):
            if len(bench.scheduler.requests.live) == 1:
                for _ in range(6):
                    number += 1
                    late = request(f"late {number}", [number % 31 + 1] * 20, max_tokens=2, ignore_eos=True)
                    bench.apply(cmd.Submit(msgspec.structs.replace(late, is_closed=True, cache_salt=str(number))))
            bench.step()
            num_steps += 1
        steps[priority] = num_steps
    assert steps[-1] == 39 and 39 < steps[0] <= 2 * 39 + 64 * 4 // 16


def test_prompts_that_others_would_be_put_aside_for_do_not_come_first() -> None:
    """There are pages for all prompts, and not for what they go on to."""
    found = []
    for num_pages in (24, 64):
        bench = Bench(max_num_batched_tokens=8, max_num_seqs=6, num_pages=num_pages, prompts_first=True)
        for name in range(6):
            asked = request(name, [name] * 5, max_tokens=20, ignore_eos=True)
            bench.apply(cmd.Submit(msgspec.structs.replace(asked, is_closed=True)))
        bench.step()
        plan = bench.launch()
        assert plan is not None
        found.append(plan.start.count(DEVICE_POSITION))
    assert found == [1, 0]


def test_a_budget_of_one_works() -> None:
    bench = Bench(max_num_batched_tokens=1)
    bench.submit("a", [1, 2, 3], max_tokens=2)
    bench.submit("b", [1, 2, 3], max_tokens=2)
    bench.run()
    assert [len(bench.ended(name).token_ids) for name in "ab"] == [2, 2]


def test_priority_then_arrival() -> None:
    bench = Bench(max_num_seqs=1)
    bench.submit("first", [1], max_tokens=1)
    bench.submit("late", [1], max_tokens=1, priority=1)
    bench.submit("urgent", [1], max_tokens=1, priority=-1)
    bench.run()
    order = [event.record.request_id for event in bench.events if isinstance(event, ev.Ended)]
    assert order == ["urgent", "first", "late"]


def test_an_urgent_prompt_does_not_wait_for_a_long_one_that_was_begun() -> None:
    bench = Bench(max_num_batched_tokens=4)
    bench.submit("long", list(range(15)), max_tokens=1)
    bench.step()
    bench.submit("later", [1, 2], max_tokens=1)
    bench.submit("urgent", [9] * 5, max_tokens=1, priority=-1)
    rows = []
    while (plan := bench.launch()) is not None:
        rows.append(list(zip(plan.request, plan.length)))
        bench.commit()
    assert rows == [[(2, 4)], [(2, 1), (0, 3)], [(0, 4)], [(0, 4)], [(1, 2)]]
    order = [event.record.request_id for event in bench.events if isinstance(event, ev.Ended)]
    assert order == ["urgent", "long", "later"]


def test_every_private_page_is_fresh_and_no_shared_one_is() -> None:
    bench = Bench()
    prompt = list(range(10))
    bench.submit("a", prompt, max_tokens=4)
    first = bench.launch()
    assert first is not None and sorted(first.fresh_pages) == sorted(first.table_page)
    bench.commit()
    bench.run()
    bench.submit("b", prompt, max_tokens=1)
    second = bench.launch()
    assert second is not None
    assert second.table_page[:2] == first.table_page[:2], "the hit begins with a's pages"
    assert second.fresh_pages == second.table_page[2:] and second.start == [8]


@pytest.mark.parametrize(("length", "cached"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_T53_a_hit_leaves_one_position_to_compute(length: int, cached: int) -> None:
    bench = Bench(page_size=16, num_pages=16)
    prompt = [i % 31 for i in range(length)]
    for name in ("a", "b"):
        bench.submit(name, prompt, max_tokens=3, temperature=0)
        bench.run()
    first, second = bench.ended("a"), bench.ended("b")
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, cached)
    assert first.token_ids == second.token_ids


def test_prompt_scores_are_computed_even_where_pages_are_cached() -> None:
    bench = Bench()
    prompt = list(range(9))
    bench.submit("a", prompt, max_tokens=1)
    bench.run()
    bench.submit("b", prompt, max_tokens=1, prompt_logprobs=0)
    bench.run()
    scores = bench.ended("b").prompt_scores
    assert scores is not None and len(scores) == 9 and scores[0] is None
    assert bench.ended("b").num_cached_tokens == 0


def test_the_last_in_the_order_is_evicted_and_its_result_does_not_show_it() -> None:
    solo = {}
    for name in ("a", "b"):
        alone = Bench()
        alone.submit(name, [ord(name) - 97] * 4, max_tokens=16, temperature=0)
        alone.run()
        solo[name] = alone.ended(name).token_ids
    bench = Bench(num_pages=6, paused_pages=0)
    for name in ("a", "b"):
        bench.submit(name, [ord(name) - 97] * 4, max_tokens=16, temperature=0)
    bench.run()
    assert bench.scheduler.stats().num_evictions > 0
    assert bench.ended("a").num_evictions == 0 and bench.ended("b").num_evictions > 0
    assert {name: bench.ended(name).token_ids for name in "ab"} == solo


def test_a_request_pauses_with_its_pages_while_the_budget_allows() -> None:
    bench = Bench(num_pages=5, paused_pages=4)
    bench.submit("a", [1] * 6, max_tokens=12)
    bench.submit("b", [2] * 8, max_tokens=4)
    bench.run()
    assert bench.ended("a").num_pauses + bench.ended("b").num_pauses > 0
    assert bench.scheduler.stats().num_evictions == 0


def test_seeds_are_resolved_once_by_the_count_of_admitted_requests() -> None:
    bench = Bench(seed=3)
    bench.submit("bad", [], max_tokens=1)
    bench.submit("a", [1], max_tokens=1)
    bench.submit("b", [1], max_tokens=1, seed=11)
    bench.submit("c", [1], max_tokens=1)
    bench.run()
    seeds = [bench.ended(name).seed for name in "abc"]
    assert seeds == [derived_seed(3, 0, 0), 11, derived_seed(3, 0, 2)]
    assert derived_seed(3, 0, 2) != derived_seed(3, 1, 2)


def test_T15_what_never_fits_is_refused_with_need_and_capacity() -> None:
    bench = Bench(num_pages=8, page_size=16, max_model_len=4096, max_num_batched_tokens=512)
    bench.submit("a", [1] * 200)
    bench.submit("b", [2] * 20, max_tokens=5)
    bench.submit("c", [3] * 100, max_tokens=100)
    message = bench.refused("a").message
    assert "201" in message and "128" in message
    bench.run()
    assert bench.ended("b").finish_reason == "length" and len(bench.ended("b").token_ids) == 5
    assert bench.ended("c").finish_reason == "length" and len(bench.ended("c").token_ids) == 28


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ([], {}, "empty"),
        ([-1], {}, "prompt_token_ids[0]=-1"),
        ([1, 32], {}, "prompt_token_ids[1]=32"),
        ([2**63 - 1], {}, "0 to 31"),
        ([1], {"stop_token_ids": [32]}, "stop_token_ids[0]=32"),
        ([1], {"stop_token_sequences": [[1, -1]]}, "stop_token_sequences[0][1]=-1"),
        ([1] * 64, {}, "max_model_len is 64"),
        ([1] * 65, {"max_tokens": 0}, "65 tokens"),
    ],
)
def test_a_refusal_names_field_value_and_limit_and_leaves_nothing(
    prompt: list[int], params: dict[str, object], words: str
) -> None:
    bench = Bench()
    bench.submit("x", prompt, **params)
    assert words in bench.refused("x").message
    stats = bench.scheduler.stats()
    assert stats.num_requests == stats.num_waiting == 0 and stats.num_free_pages == stats.num_pages
    bench.submit("x", [1], max_tokens=1)
    bench.run()
    assert len(bench.ended("x").token_ids) == 1


def test_a_prompt_as_long_as_the_limit_can_be_scored() -> None:
    bench = Bench(max_num_batched_tokens=64)
    bench.submit("x", [1] * 64, max_tokens=0, prompt_logprobs=0)
    bench.submit("y", [1] * 63)
    bench.submit("z", [1] * 8, max_tokens=0)
    bench.run()
    scores = bench.ended("x").prompt_scores
    assert scores is not None and len(scores) == 64 and bench.ended("x").token_ids == []
    assert len(bench.ended("y").token_ids) == 1
    assert bench.ended("z").finish_reason == "length"


def test_a_full_queue_refuses() -> None:
    bench = Bench(max_num_waiting=2)
    for name in "abc":
        bench.submit(name, [1], max_tokens=1)
    assert bench.refused("c").kind == "QueueFull" and "max_num_waiting=2" in bench.refused("c").message


def test_one_that_was_inside_elsewhere_is_refused_neither_by_the_queue_nor_by_a_suspension() -> None:
    bench = Bench(max_num_waiting=1)
    bench.submit("a", [1], max_tokens=1)
    bench.apply(cmd.Suspend(1))
    bench.apply(cmd.Submit(request("b", [2], max_tokens=1), again=True))
    bench.submit("c", [3], max_tokens=1)
    assert bench.refused("c").kind == "StateError"
    assert bench.launch() is None and bench.scheduler.stats().num_waiting == 2, "it waits with those inside"
    bench.apply(cmd.Stop(2))
    assert bench.ended("b").finish_reason == "abort"
    bench.apply(cmd.Submit(request("d", [4], max_tokens=1), again=True))
    assert bench.refused("d").kind == "StateError"


@pytest.mark.parametrize("kind", ["StepFailed", "NothingToSample", "BadLogits"])
def test_a_failed_row_ends_its_request_only_and_publishes_nothing(kind: str) -> None:
    """Its error is the one that the device names, whatever its message says."""
    bench = Bench()
    planted = Failure(kind, "structured_outputs: boom")
    bench.device._fail = lambda plan: {0: planted} if plan.step == 1 else {}
    prompt = list(range(9))
    bench.submit("a", prompt, max_tokens=8)
    bench.submit("b", [5] * 9, max_tokens=8)
    bench.run()
    failed = bench.ended("a")
    assert failed.finish_reason == "error" and failed.failure == planted and len(failed.token_ids) == 1
    assert len(bench.ended("b").token_ids) == 8


def test_T06_abort_in_the_last_step_gives_one_end_and_frees_pages_at_once() -> None:
    bench = Bench()
    bench.submit("a", [1, 2], max_tokens=2)
    bench.step()
    bench.launch()
    told = bench.apply(cmd.Abort(request_ids=["a"]))
    assert [type(event) for event in told] == [ev.Ended]
    assert bench.scheduler.stats().num_free_pages == 64
    assert bench.commit() == []
    assert bench.ended("a").finish_reason == "abort" and len(bench.ended("a").token_ids) == 1


def test_an_abort_by_ticket_spares_a_later_request_of_the_same_id() -> None:
    bench = Bench()
    bench.submit("x", [1], max_tokens=1)
    bench.run()
    bench.apply(cmd.Submit(msgspec.structs.replace(request("x", [1, 2], max_tokens=2), ticket=77)))
    bench.apply(cmd.Abort(tickets=[ticket_of("x")]))
    bench.run()
    last = [event for event in bench.events if isinstance(event, ev.Ended)][-1]
    assert last.ticket == 77 and last.record.finish_reason == "length"


def test_ids_7_and_the_string_7_differ() -> None:
    bench = Bench()
    bench.submit(7, [1], max_tokens=3)
    bench.submit("7", [1], max_tokens=3)
    bench.submit(7, [1], max_tokens=3)
    assert bench.refused(7).kind == "InvalidValue" and "request_id=7 is live" in bench.refused(7).message
    bench.run()
    assert bench.ended(7).request_id == 7 and bench.ended("7").request_id == "7"


def test_reset_prefix_cache_forgets_keys_and_live_requests_keep_their_pages() -> None:
    bench = Bench()
    prompt = list(range(12))
    bench.submit("a", prompt, max_tokens=8, temperature=0)
    bench.step()
    bench.step()
    bench.apply(cmd.ResetPrefixCache(1))
    bench.run()
    for name, cached in (("b", 0), ("c", 8)):
        bench.submit(name, prompt, max_tokens=8, temperature=0)
        bench.run()
        assert bench.ended(name).num_cached_tokens == cached
    assert bench.ended("a").token_ids == bench.ended("b").token_ids == bench.ended("c").token_ids


def test_T08_abort_all_then_a_new_request_needs_no_resume() -> None:
    bench = Bench(max_num_seqs=8)
    for i in range(16):
        bench.submit(i, [i], max_tokens=30)
    bench.step()
    bench.apply(cmd.Abort(everything=True))
    assert [len(bench.ended(i).token_ids) for i in range(16)] == [1] * 8 + [0] * 8
    bench.submit("new", [1], max_tokens=2)
    bench.run()
    assert bench.ended("new").finish_reason == "length"


class TestPause:
    def test_keep_is_answered_when_drained_and_nothing_is_planned_before_resume(self) -> None:
        bench = Bench()
        bench.submit("a", [1, 2], max_tokens=6)
        bench.launch()
        bench.launch()
        assert bench.apply(cmd.Pause(500)) == []
        assert bench.launch() is None
        bench.commit()
        assert ev.Done(500) not in bench.events
        bench.commit()
        assert bench.events[-1] == ev.Done(500)
        bench.submit("b", [3], max_tokens=1)
        assert bench.launch() is None and not bench.scheduler.can_act
        bench.apply(cmd.Resume(501))
        bench.run()
        assert len(bench.ended("a").token_ids) == 6 and len(bench.ended("b").token_ids) == 1

    def test_wait_lets_the_admitted_end_and_holds_later_ones(self) -> None:
        bench = Bench()
        bench.submit("a", [1, 2], max_tokens=3)
        bench.apply(cmd.Pause(500, "wait"))
        bench.submit("b", [3], max_tokens=1)
        bench.run()
        assert ev.Done(500) in bench.events and len(bench.ended("a").token_ids) == 3
        assert bench.scheduler.stats().num_waiting == 1 and bench.scheduler.stats().state == "paused"
        bench.apply(cmd.Resume(501))
        bench.run()
        assert bench.ended("b").finish_reason == "length"

    def test_wait_is_not_held_up_by_a_more_urgent_newcomer(self) -> None:
        bench = Bench(max_num_seqs=1)
        bench.submit("a", [1], max_tokens=2)
        bench.step()
        bench.submit("b", [2], max_tokens=2)
        bench.apply(cmd.Pause(500, "wait"))
        bench.submit("c", [3], max_tokens=2, priority=-1)
        bench.run()
        assert ev.Done(500) in bench.events and bench.ended("b").finish_reason == "length"
        assert bench.scheduler.stats().num_waiting == 1

    def test_abort_ends_all_now(self) -> None:
        bench = Bench()
        bench.submit("a", [1, 2], max_tokens=3)
        bench.step()
        bench.apply(cmd.Pause(500, "abort"))
        assert bench.ended("a").finish_reason == "abort" and bench.events[-1] == ev.Done(500)

    def test_pausing_twice_and_resuming_a_running_engine_do_nothing(self) -> None:
        bench = Bench()
        bench.apply(cmd.Resume(1))
        bench.apply(cmd.Pause(2))
        bench.apply(cmd.Pause(3))
        assert bench.events == [ev.Done(1), ev.Done(2), ev.Done(3)]
        assert bench.scheduler.stats().state == "paused"

    def test_a_stopped_engine_refuses(self) -> None:
        bench = Bench()
        bench.submit("a", [1], max_tokens=3)
        bench.apply(cmd.Stop(9))
        assert bench.ended("a").finish_reason == "abort" and bench.events[-1] == ev.Done(9)
        bench.submit("b", [1])
        assert bench.refused("b").kind == "StateError" and bench.scheduler.is_stopped
