"""Threads that compile: what takes too long is given up, and costs nobody else more than a moment."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator

import pytest

from perdure.api.errors import InvalidValue
from perdure.runner import compilers
from perdure.runner.compilers import MAX_THREADS, NUM_THREADS, Compilers
from tests.witness import witness

TIMEOUT_S = 0.4


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What waits for it hangs until it is opened, as it is in the end."""
    made = threading.Event()
    yield made
    made.set()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[Compilers[int]]:
    monkeypatch.setattr(compilers, "SLOW_S", TIMEOUT_S / 4)
    pool = Compilers[int](TIMEOUT_S)
    yield pool
    pool.close()


def hang(gate: threading.Event) -> int:
    assert gate.wait(60)
    return 0


def test_results_and_errors_come_to_who_asked(made: Compilers[int]) -> None:
    futures = [made.submit(lambda at=at: 60 // at, f"job {at}") for at in range(20)]
    with pytest.raises(ZeroDivisionError):
        futures[0].result(timeout=60)
    assert [future.result(timeout=60) for future in futures[1:]] == [60 // at for at in range(1, 20)]


def test_what_takes_too_long_is_given_up_and_others_go_past(made: Compilers[int], gate: threading.Event) -> None:
    """More that hang than there are threads at first; who comes after them is served before they are given up."""
    hanging = [made.submit(lambda: hang(gate), f"job {at}") for at in range(NUM_THREADS + 1)]
    others = [made.submit(lambda: 7, "quick") for _ in range(3)]
    assert [other.result(timeout=60) for other in others] == [7] * 3
    for at, future in enumerate(hanging):
        with pytest.raises(InvalidValue, match=f"job {at}: not compiled within grammar_timeout_s=0.4"):
            future.result(timeout=60)
    assert made.submit(lambda: 8, "after").result(timeout=60) == 8
    witness("grammar-given-up", given_up=len(hanging), others=len(others))


def test_threads_are_bounded_and_nobody_waits_for_those_that_hang(made: Compilers[int], gate: threading.Event) -> None:
    hanging = [made.submit(lambda: hang(gate), "hangs") for _ in range(MAX_THREADS)]
    behind = made.submit(lambda: 7, "behind")
    with pytest.raises(InvalidValue, match=f"behind: all {MAX_THREADS} threads still compile"):
        behind.result(timeout=60)
    assert all(future.done() for future in hanging) and len(made._threads) == MAX_THREADS
    gate.set()
    while made._begun:
        time.sleep(0.01)
    assert made.submit(lambda: 9, "again").result(timeout=60) == 9, "threads that were held up serve again"


def test_closing_waits_for_a_moment_only(made: Compilers[int], gate: threading.Event) -> None:
    hanging, waiting = (made.submit(lambda: hang(gate), "hangs") for _ in range(2))
    begun = time.monotonic()
    made.close()
    assert time.monotonic() - begun < 3 and hanging.cancelled() and waiting.cancelled()
    assert made.submit(lambda: 1, "late").cancelled()
    assert all(thread.daemon for thread in made._threads)


def test_a_thread_has_a_deep_stack_and_others_keep_theirs() -> None:
    """Deeper than a usual stack of 8 MiB: the interpreter itself runs on it."""
    before, limit = threading.stack_size(), sys.getrecursionlimit()

    def deep(left: int) -> int:
        return 0 if not left else 1 + max(map(deep, [left - 1]))  # through C, so that the stack is used

    patient = Compilers[int](60)
    sys.setrecursionlimit(200_000)
    try:
        assert patient.submit(lambda: deep(40_000), "deep").result(timeout=60) == 40_000
    finally:
        sys.setrecursionlimit(limit)
        patient.close()
    assert threading.stack_size() == before


def test_a_thread_ends_when_nothing_waits(made: Compilers[int]) -> None:
    made.submit(lambda: 1, "one").result(timeout=60)
    until = time.monotonic() + 60
    while (made._threads or made._watcher) and time.monotonic() < until:
        time.sleep(0.01)
    assert not made._threads and made._watcher is None
