"""The books notice: each kind of loss, planted by hand, is found by the check that should find it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from perdure.core.pins import Pin
from perdure.core.prefix import NO_PAGE
from perdure.core.scheduler import Scheduler
from perdure.engine.loop import Inbox, Loop
from tests.core.helpers import Bench


def decoding() -> Bench:
    """Two that decode, with scores and a published page, and nothing in flight."""
    bench = Bench()
    bench.submit("a", [1, 2, 3, 4, 5], max_tokens=20, logprobs=0, prompt_logprobs=0)
    bench.submit("b", [6, 7, 8], max_tokens=20)
    for _ in range(4):
        bench.step()
    return bench


def first(scheduler: Scheduler) -> Any:
    return scheduler.requests.residents[0]


PLANTED: dict[str, Callable[[Scheduler], object]] = {
    "a page left behind": lambda s: first(s).pages.pop(),
    "a page of two requests": lambda s: first(s).pages.append(s.requests.residents[1].pages[0]),
    "a slot given back early": lambda s: s.requests.slots.release(first(s).slot),
    "a slot lost": lambda s: s.requests.slots.take(),
    "a score lost": lambda s: first(s).scores.chosen.pop(),
    "a prompt score lost": lambda s: first(s).prompt_scores.chosen.pop(),
    "a token lost": lambda s: first(s).tokens.pop(),
    "a request out of its order": lambda s: s.requests.residents.reverse(),
    "a live request nobody serves": lambda s: s.requests.residents.pop(),
    "a step counted twice": lambda s: setattr(first(s), "in_flight", 1),
    "a node whose page is given away": lambda s: setattr(first(s).nodes[0], "page", NO_PAGE),
    "a node that cannot be found": lambda s: s.requests.cache.index._nodes.pop(first(s).nodes[0].key),
    "a page expected of nobody": lambda s: s.requests.cache._key_of.update({99: first(s).nodes[0].key}),
    "a pin that holds no page": lambda s: s.requests.cache.pins._pins.update({1: Pin([1, 2, 3, 4], None)}),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_loss_is_noticed(name: str) -> None:
    bench = decoding()
    bench.scheduler.check()
    PLANTED[name](bench.scheduler)
    with pytest.raises(AssertionError):
        bench.scheduler.check()


ROWS: dict[str, Callable[[Any], object]] = {
    "position": lambda device: device._position.__setitem__(0, 3),
    "last token": lambda device: device._last_token.__setitem__(0, -5),
    "table": lambda device: device._tables[0].pop(),
}


@pytest.mark.parametrize("name", ROWS)
def test_a_device_row_that_differs_is_noticed(name: str) -> None:
    bench = decoding()
    bench.device.check(bench.scheduler.device_rows())
    ROWS[name](bench.device)
    with pytest.raises(AssertionError):
        bench.device.check(bench.scheduler.device_rows())


@pytest.mark.parametrize("leak", ["page", "slot", "state"])
def test_an_idle_engine_that_holds_something_says_so_once_and_serves_on(
    leak: str, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    told: list[Any] = []
    inbox = Inbox()
    loop = Loop(bench.scheduler, bench.device, inbox, lambda events, time: told.extend(events), steps_in_flight=2)
    with caplog.at_level(logging.ERROR, logger="perdure"):
        loop.turn(block=False)
        assert not caplog.records
        if leak == "page":
            bench.scheduler.requests.pool.take(1)
        elif leak == "slot":
            bench.scheduler.requests.slots.take()
        else:
            bench.scheduler.requests.states[99] = None  # type: ignore[assignment]
        loop.turn(block=False)
        loop.turn(block=False)
    assert len(caplog.records) == 1 and "the books are wrong" in caplog.records[0].message
    bench.submit("a", [1, 2], max_tokens=3)
    for _ in range(5):
        loop.turn(block=False)
    assert [type(event).__name__ for event in told][-1] == "Ended"
