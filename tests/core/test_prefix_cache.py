"""What requests find, wait for and keep: each computed once, counted once, and never waited for in vain."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.ending import Failure
from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.core.lifecycle import Status
from perdure.core.state import RequestState
from tests.core.helpers import Bench, request, ticket_of
from tests.witness import witness

SHARED = list(range(1, 25))  # six pages of 4


def state_of(bench: Bench, name: str) -> RequestState:
    return bench.scheduler.requests.live[name].children[0]


def num_waits(bench: Bench, name: str) -> int:
    moments = (event for event in bench.events if isinstance(event, ev.Moment))
    return sum(moment.kind == "awaits" and moment.ticket == ticket_of(name) for moment in moments)


def num_computed(bench: Bench, name: str) -> int:
    """Positions of its prefills."""
    moments = (event for event in bench.events if isinstance(event, ev.Moment))
    return sum(moment.num_tokens for moment in moments if moment.kind == "chunk" and moment.ticket == ticket_of(name))


# Salts


def test_T60_only_equal_salts_share_pages() -> None:
    bench = Bench()
    cached = []
    for number, salt in enumerate((None, "a", "b", "a", None)):
        bench.apply(cmd.Submit(Request(number, number, SHARED, SamplingParams(max_tokens=2), cache_salt=salt)))
        bench.run()
        cached.append(bench.ended(number).num_cached_tokens)
    assert cached == [0, 0, 0, 20, 20]
    assert len({tuple(bench.ended(number).token_ids) for number in range(5)}) >= 1
    witness("T60-text", num_cached_of_equal_salt=cached[3])


# Waiting for a prefix


def test_requests_that_begin_alike_compute_it_once_and_others_go_past_them() -> None:
    """b waits for what a computes; d, with a beginning of its own, is not held up; and b goes on in the first plan
    after the last shared page."""
    bench = Bench(max_num_batched_tokens=16)
    bench.submit("a", [*SHARED, 30], max_tokens=3)
    for name, tail in (("b", 31), ("c", 29)):
        bench.submit(name, [*SHARED, tail], max_tokens=3)
    bench.submit("d", [9, 8, 7, 6, 5], max_tokens=3)
    bench.launch()
    bench.commit()  # 16 of the 24
    assert [state.request.request_id for state in bench.scheduler.requests.residents] == ["a"]
    plan = bench.launch()
    assert plan is not None and plan.request == [0, 3] and plan.length == [9, 5]
    assert state_of(bench, "b").status is Status.WAITING and num_waits(bench, "b") == num_waits(bench, "c") == 1
    bench.commit()
    plan = bench.launch()
    assert plan is not None and plan.start[-2:] == [24, 24] and plan.length[-2:] == [1, 1]
    bench.commit()
    bench.run()
    assert [bench.ended(name).num_cached_tokens for name in "abcd"] == [0, 24, 24, 0]
    assert [num_computed(bench, name) for name in "abcd"] == [25, 1, 1, 5]
    witness("computed-once", num_waits=num_waits(bench, "b"), num_cached_tokens=bench.ended("b").num_cached_tokens)


def test_nobody_waits_for_one_behind_it_or_for_less_than_it_costs() -> None:
    """One behind it that shares enough waits; one before it does not, nor one that shares less than a wait costs."""
    bench = Bench(max_num_batched_tokens=128, page_size=4)  # 16 tokens pay
    bench.submit("a", [*SHARED, 30], max_tokens=3, priority=1)
    bench.launch()
    bench.submit("before", [*SHARED, 31], max_tokens=3)
    bench.submit("little", [*SHARED[:12], *range(20, 30)], max_tokens=3, priority=2)
    bench.submit("much", [*SHARED[:16], *range(20, 30)], max_tokens=3, priority=2)
    bench.launch()
    waiting = [state.request.request_id for state in bench.scheduler.requests.waiting]
    assert waiting == ["much"] and num_waits(bench, "before") == num_waits(bench, "little") == 0
    while bench.in_flight:
        bench.commit()
    bench.run()
    assert bench.ended("much").num_cached_tokens == 16


def test_a_kept_slot_and_kept_pages_are_not_taken_by_those_who_go_past() -> None:
    bench = Bench(max_num_batched_tokens=8, max_num_seqs=2, num_pages=64)
    for name in ("a", "b", "c"):
        bench.submit(name, [*SHARED, 30] if name != "c" else [9, 8, 7], max_tokens=3)
    bench.step()
    assert [state.request.request_id for state in bench.scheduler.requests.waiting] == ["b", "c"]
    bench.run()
    assert bench.ended("b").num_cached_tokens == 24

    bench = Bench(max_num_batched_tokens=16, num_pages=16, max_model_len=40)
    bench.submit("a", [*SHARED, 30], max_tokens=3)  # 7 pages
    bench.submit("b", [*SHARED, 31], max_tokens=3)  # 3 more than it finds, and they are kept for it
    bench.submit("c", list(range(26)), max_tokens=2)  # 7: one too many
    bench.submit("d", [1], max_tokens=2)  # would fit, and does not overtake
    bench.step()
    bench.launch()
    assert [state.request.request_id for state in bench.scheduler.requests.waiting] == ["b", "c", "d"]
    bench.commit()
    bench.run()
    assert [bench.ended(name).num_evictions for name in "abcd"] == [0] * 4


EXITS: dict[str, Callable[[Bench], object]] = {
    "abort": lambda bench: bench.apply(cmd.Abort(["a"])),
    "error": lambda bench: setattr(bench.device, "_fail", lambda plan: {0: Failure("StepFailed", "planted")}),
    "eviction": lambda bench: bench.scheduler.requests.evict(state_of(bench, "a")),
    "reset of the cache": lambda bench: bench.apply(cmd.ResetPrefixCache(99)),
    "drop of the KV": lambda bench: bench.scheduler.requests.drop_kv(),
}


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("way", EXITS)
def test_a_wait_ends_with_any_exit_of_the_one_who_computes(way: str, depth: int) -> None:
    """While it computes the second chunk of two, the first being known or in flight too."""
    bench = Bench(max_num_batched_tokens=16)
    bench.submit("a", [*SHARED, 30], max_tokens=3)
    bench.submit("b", [*SHARED, 31], max_tokens=3)
    bench.launch()
    if depth == 1:
        bench.commit()
    bench.launch()
    assert [state.request.request_id for state in bench.scheduler.requests.waiting] == ["b"]
    EXITS[way](bench)
    for _ in range(40):
        if bench.in_flight:
            bench.commit()
        bench.device._fail = lambda plan: {}
        bench.launch()
    assert not bench.scheduler.requests.live and not bench.in_flight
    alone = Bench(enable_prefix_caching=False)
    alone.submit("b", [*SHARED, 31], max_tokens=3, seed=bench.ended("b").seed)
    alone.run()
    assert bench.ended("b").token_ids == alone.ended("b").token_ids
    assert num_waits(bench, "b") == 1


def test_one_that_reads_no_cache_waits_for_nobody_and_offers_what_it_computes() -> None:
    bench = Bench()
    bench.submit("a", [*SHARED, 30], max_tokens=1)
    bench.submit("b", [*SHARED, 31], max_tokens=1, skip_reading_prefix_cache=True)
    bench.run()
    assert num_waits(bench, "b") == bench.ended("b").num_cached_tokens == 0
    bench = Bench()
    bench.submit("b", [*SHARED, 31], max_tokens=1, skip_reading_prefix_cache=True)
    bench.submit("c", [*SHARED, 30], max_tokens=1)
    bench.run()
    assert num_waits(bench, "c") == 1 and bench.ended("c").num_cached_tokens == 24


# Prompt scores


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("top", [0, 2])
def test_prompt_scores_come_with_the_pages(page_size: int, top: int) -> None:
    """They are not asked of the device again, and equal those that were; fewer of the best are cut from more."""
    bench = Bench(page_size=page_size)
    bench.submit("first", [*SHARED, 30], max_tokens=1, prompt_logprobs=2)
    bench.run()
    bench.submit("again", [*SHARED, 30, 28], max_tokens=1, prompt_logprobs=top)
    plan = bench.launch()
    assert plan is not None
    cached = 24 if page_size == 1 else 20  # the score of a page's first token stands with its page
    assert plan.start == [cached] and sum(plan.num_targets) == len(SHARED) + 2 - (24 if page_size == 4 else 25)
    bench.commit()
    bench.run()
    alone = Bench(enable_prefix_caching=False)
    alone.submit("alone", [*SHARED, 30, 28], max_tokens=1, prompt_logprobs=top)
    alone.run()
    assert bench.ended("again").prompt_scores == alone.ended("alone").prompt_scores
    assert bench.ended("again").num_cached_tokens == cached
    witness("kept-scores", num_cached_tokens=cached)


def test_a_hit_ends_where_the_scores_asked_are_not_kept() -> None:
    """Pages without scores, with too few of the best, of the whole vocabulary (not kept), and of a request that brought
    scores of other weights."""
    for before, asked, cached in ((None, 0, 0), (0, 1, 0), (-1, 0, 20 if Bench().config.vocab_size <= 32 else 0)):
        bench = Bench()
        bench.submit("a", [*SHARED, 30], max_tokens=1, prompt_logprobs=before)
        bench.run()
        bench.submit("b", [*SHARED, 30], max_tokens=1, prompt_logprobs=asked)
        bench.run()
        assert bench.ended("b").num_cached_tokens == cached
        bench.submit("c", [*SHARED, 30], max_tokens=1, prompt_logprobs=asked)
        bench.run()
        assert bench.ended("c").num_cached_tokens == 20, "b has left its scores with the pages"
        assert bench.ended("c").prompt_scores == bench.ended("b").prompt_scores
    wide = Bench(vocab_size=40)
    for name in ("a", "b"):
        wide.submit(name, [*SHARED, 30], max_tokens=1, prompt_logprobs=-1)
        wide.run()
    assert wide.ended("b").num_cached_tokens == 0, "40 of the best are more than are kept"


def test_scores_of_other_weights_are_not_taken_from_pages_that_are_kept() -> None:
    """The pages would do; their scores are of the weights before, and the result would not say so."""
    bench = Bench()
    bench.submit("a", [*SHARED, 30], max_tokens=1, prompt_logprobs=1)
    bench.run()
    bench.scheduler.requests.take_weights(1, "1", "keep", "recompute")
    bench.device.weights = 1
    for name, asked, cached in (("b", 1, 0), ("c", None, 24)):
        bench.submit(name, [*SHARED, 30], max_tokens=1, prompt_logprobs=asked)
        bench.run()
        assert bench.ended(name).num_cached_tokens == cached and bench.ended(name).exact == (name == "b")
    alone = Bench(enable_prefix_caching=False)
    alone.device.weights = 1
    alone.submit("b", [*SHARED, 30], max_tokens=1, prompt_logprobs=1)
    alone.run()
    assert bench.ended("b").prompt_scores == alone.ended("b").prompt_scores


# Counting


def test_a_hit_is_counted_once_whatever_is_tried_and_happens() -> None:
    """Admission fails a few times for want of pages; then come an eviction, a checkpoint, and a second engine."""
    bench = Bench(num_pages=12, max_model_len=40)
    bench.submit("a", [*SHARED, 30], max_tokens=12)
    bench.step()
    bench.submit("b", [*SHARED, 31, 32 - 1, 5, 6, 7], max_tokens=6)
    for _ in range(3):
        bench.step()
        state_of(bench, "b").tried_at = -1  # try again, as after a release
    bench.run()
    first = bench.ended("b")
    stats = bench.scheduler.stats()
    assert first.num_cached_tokens == stats.num_cached_tokens == 24
    assert stats.num_prompt_tokens == 25 + 29

    bench = Bench()
    bench.submit("a", [*SHARED, 30], max_tokens=2)
    bench.run()
    bench.submit("b", [*SHARED, 31], max_tokens=20)
    for _ in range(3):
        bench.step()
    bench.scheduler.requests.evict(state_of(bench, "b"))
    for _ in range(3):
        bench.step()
    (taken,) = (event.checkpoint for event in bench.apply(cmd.TakeCheckpoint(7, "b")) if isinstance(event, ev.Taken))
    assert state_of(bench, "b").group.num_residencies == 2
    assert taken.num_cached_tokens == 24 == bench.scheduler.stats().num_cached_tokens
    there = Bench()
    there.apply(cmd.Submit(taken.as_request("b", ticket_of("b"), False), taken))
    there.run()
    assert there.ended("b").num_cached_tokens == 24 and there.scheduler.stats().num_cached_tokens == 0


# Eviction of pages


def test_a_path_that_was_reclaimed_under_its_holder_is_offered_again() -> None:
    """b computed its beginning itself and hangs under a's pages: when these are reclaimed, it offers its own."""
    bench = Bench(num_pages=16, max_model_len=64, max_num_batched_tokens=64)
    bench.submit("a", SHARED[:9], max_tokens=1)
    bench.submit("b", SHARED[:9], max_tokens=20, skip_reading_prefix_cache=True)
    for _ in range(5):
        bench.step()
    index = bench.scheduler.requests.cache.index
    nodes = list(state_of(bench, "b").nodes or ())
    assert nodes[1].page not in state_of(bench, "b").pages and nodes[2].page in state_of(bench, "b").pages
    bench.submit("c", [30] * 44, max_tokens=1)  # takes all that is free
    bench.step()
    assert [node.is_gone for node in nodes] == [False, True, True]
    bench.run()
    assert len(index) and bench.ended("b").num_evictions == 0
    bench.submit("d", [*SHARED[:9], *bench.ended("b").token_ids[:12]], max_tokens=1)
    bench.run()
    assert bench.ended("d").num_cached_tokens == 20
    witness("offered-again", num_cached_tokens=bench.ended("d").num_cached_tokens)


# Pins


def pin(bench: Bench, ticket: int, tokens: list[int], salt: str | None = None) -> object:
    (done,) = (event for event in bench.apply(cmd.PinPrefix(ticket, tokens, salt)) if isinstance(event, ev.Done))
    return done.value if done.failure is None else done.failure.message


def test_a_pinned_prefix_outlives_any_pressure_and_an_unpinned_one_does_not() -> None:
    found = {}
    for pinned in (False, True):
        bench = Bench(num_pages=24, max_model_len=40)
        if pinned:
            assert pin(bench, 1, [*SHARED, 30, 31]) == 24
        bench.submit("a", [*SHARED, 30], max_tokens=1)
        bench.run()
        assert bench.scheduler.stats().num_pinned_pages == 6 * pinned
        for number in range(4):
            bench.submit(number, [25 + number] * 36, max_tokens=4)
            bench.run()
        bench.submit("b", [*SHARED, 31], max_tokens=1)
        bench.run()
        found[pinned] = bench.ended("b").num_cached_tokens
        if pinned:
            bench.apply(cmd.UnpinPrefix(2, 1))
            bench.apply(cmd.UnpinPrefix(3, 1))
        bench.scheduler.check()
        stats = bench.scheduler.stats()
        assert stats.num_pinned_pages == 0 and stats.num_free_pages == 24
    assert found == {False: 0, True: 24}
    witness("pinned", num_cached_tokens=found[True])


def test_pins_are_refused_in_words_and_change_nothing() -> None:
    bench = Bench(num_pages=16, max_model_len=40)
    refusals = {
        "the prefix has 3 tokens, and pages are kept whole: page_size=4": [1, 2, 3],
        r"prompt_token_ids\[1\]=32": [1, 32, 3, 4],
        "the prefix has 41 tokens, max_model_len is 40": [1] * 41,
        "takes 7 pages, with those pinned before 7, and 6 can be pinned: of num_pages=16": [1] * 28,
    }
    for message, tokens in refusals.items():
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(pin(bench, 1, tokens))
    assert pin(bench, 1, SHARED[:16]) == 16 and pin(bench, 2, SHARED[:16]) == 16, "equal ones count once"
    with pytest.raises(AssertionError, match="takes 3 pages, with those pinned before 7, and 6"):
        raise AssertionError(pin(bench, 3, [5] * 12))
    assert pin(bench, 3, [5] * 12, None) != 12 and pin(bench, 4, [5] * 8) == 8
    off = Bench(enable_prefix_caching=False)
    assert "enable_prefix_caching=False" in str(pin(off, 1, SHARED))
    assert len(bench.scheduler.requests.cache.pins) == 3 and not len(off.scheduler.requests.cache.pins)


def test_the_longest_request_runs_beside_all_that_can_be_pinned() -> None:
    bench = Bench(num_pages=16, max_model_len=40)
    assert pin(bench, 1, SHARED) == 24
    bench.submit("a", SHARED, max_tokens=1)
    bench.submit("long", [30] * 20, max_tokens=20)
    bench.submit("other", [29] * 20, max_tokens=20)
    bench.run()
    assert [len(bench.ended(name).token_ids) for name in ("long", "other")] == [20, 20]
    assert bench.scheduler.stats().num_pinned_pages == 6


def test_what_becomes_of_a_pin_when_the_cache_goes() -> None:
    """It lets go of its pages and holds them again once they are computed anew; a reset of the engine is refused."""
    bench = Bench()
    requests = bench.scheduler.requests
    pin(bench, 1, SHARED)
    stats = bench.scheduler.stats

    def computed(name: str) -> int:
        bench.submit(name, [*SHARED, 30], max_tokens=1)
        bench.run()
        assert stats().num_pinned_pages == 6
        return bench.ended(name).num_cached_tokens

    assert computed("a") == 0
    bench.apply(cmd.ResetPrefixCache(2))
    assert stats().num_pinned_pages == 0 and stats().num_free_pages == 64
    assert computed("b") == 0
    requests.drop_kv()
    assert stats().num_free_pages == 64 and computed("c") == 0
    requests.take_weights(1, "1", "salt", "recompute")
    assert stats().num_pinned_pages == 0 and computed("d") == 0
    requests.take_weights(0, "0", "salt", "recompute")
    assert stats().num_pinned_pages == 6, "pages of the weights that came back are found and held at once"
    requests.take_weights(5, "5", "keep", "recompute")
    assert stats().num_pinned_pages == 6, "stale ones are served, and held"
    requests.take_weights(6, "6", "invalidate", "recompute")
    assert stats().num_pinned_pages == 0 and computed("e") == 0
    (refused,) = (event for event in bench.apply(cmd.Reset(3)) if isinstance(event, ev.Done))
    assert refused.failure is not None and "1 are not released" in refused.failure.message
    bench.apply(cmd.UnpinPrefix(4, 1))
    assert stats().num_free_pages == 64
    bench.scheduler.check()


def test_a_pin_of_another_salt_holds_nothing_of_this_one() -> None:
    bench = Bench()
    pin(bench, 1, SHARED, "a")
    bench.submit("plain", [*SHARED, 30], max_tokens=1)
    bench.run()
    assert bench.scheduler.stats().num_pinned_pages == 0
    bench.apply(cmd.Submit(Request("salted", 5, [*SHARED, 30], request("x", [1]).params, cache_salt="a")))
    bench.run()
    assert bench.scheduler.stats().num_pinned_pages == 6
