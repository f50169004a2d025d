"""The library half of T68: how an engine ends, and what remains of it. And a call that is interrupted."""

from __future__ import annotations

import gc
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest

from perdure import LLM
from perdure.api import command as cmd
from perdure.api.errors import EngineDead, PerdureError
from perdure.api.event import Event
from perdure.api.request import Request
from tests.engine.conftest import MakeLLM
from tests.engine.helpers import Brake, check_reference, in_thread, prompt, settings, until
from tests.engine.reference import Reference
from tests.witness import witness


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_T68_shutdown_ends_requests_and_threads(make_llm: MakeLLM, reference: Reference) -> None:
    """Running and waiting requests end with what they have; later calls raise within a second; twice is once."""
    before = threading.active_count()
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    llm = make_llm(max_num_seqs=2)
    brake = Brake(llm._engine)
    brake.hold(after=4)
    prompts = [prompt(5, seed) for seed in range(4)]
    call = in_thread(lambda: llm.generate(prompts, settings(max_tokens=None)))
    brake.wait_until_held()
    closing = in_thread(llm.shutdown)
    until(lambda: len(llm._engine._inbox._commands) > 0)
    brake.release()
    closing()
    outputs = call()
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort"] * 4
    assert [len(output.outputs[0].token_ids) for output in outputs] == [4, 4, 0, 0]
    for output, ids in zip(outputs, prompts):
        check_reference(output, ids, reference)
    begin = time.monotonic()
    for later in (llm.stats, llm.pause, llm.abort, lambda: llm.generate([[1]], settings())):
        with pytest.raises(EngineDead, match="closed"):
            later()
    llm.shutdown()
    assert time.monotonic() - begin < 1
    until(lambda: threading.active_count() == before)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


def test_T68_weights_go_with_the_last_reference(tiny: Path, one_thread: None, no_collector: None) -> None:
    """No circle keeps them until a collector comes, whether the engine was shut down or just dropped."""
    for shut_down in (True, False):
        llm = LLM(str(tiny), num_pages=16)
        llm.generate([[1, 2]], settings())
        model = weakref.ref(llm._engine.resolved.loaded.model)
        if shut_down:
            llm.shutdown()
        del llm
        assert model() is None


class Collecting:
    """A receiver that collects garbage on the engine's own thread, where the engine may be part of it."""

    def __init__(self) -> None:
        self.failure: PerdureError | None = None

    def deliver(self, event: Event, time: float) -> None:
        gc.collect()

    def fail(self, error: PerdureError) -> None:
        self.failure = error


def test_T68_an_engine_dropped_on_its_own_thread_still_ends(tiny: Path, one_thread: None, no_collector: None) -> None:
    """A collector runs on any thread; on the engine's own it must not wait for that thread."""
    llm = LLM(str(tiny), num_pages=16)
    closed_by: list[str] = []
    engine, gone = llm._engine, weakref.ref(llm, lambda _: closed_by.append(threading.current_thread().name))
    circle: list[object] = [llm]
    circle.append(circle)
    del llm, circle
    receiver = Collecting()
    engine.submit([(cmd.Submit(Request("a", engine.ticket(), [1, 2, 3], settings(max_tokens=200))), receiver)])
    engine._thread.join(timeout=30)
    assert gone() is None and not engine._thread.is_alive()
    assert closed_by == [engine._thread.name]
    witness("T68", closed_by=closed_by[0])


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what it puts in the background with SIGINT ignored; then nothing would raise KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_ends_the_interrupted_call_only(make_llm: MakeLLM, reference: Reference, interruptible: None) -> None:
    """The call's own requests end, another call's go on, and the engine serves the next one."""
    llm = make_llm()
    brake = Brake(llm._engine)
    brake.hold(after=3)
    other = in_thread(lambda: llm.generate([prompt(7)], settings(max_tokens=40)))
    brake.wait_until_held()

    def interrupt() -> None:
        until(lambda: len(llm._engine._receivers) == 3)
        main = threading.main_thread().ident
        assert main is not None
        signal.pthread_kill(main, signal.SIGINT)
        until(lambda: len(llm._engine._inbox._commands) == 3)  # the two requests, and their abort
        brake.release()

    interrupting = in_thread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([prompt(5), prompt(6)], settings(max_tokens=None), request_ids=["mine", "too"])
    interrupting()
    (kept,) = other()
    check_reference(kept, prompt(7), reference)
    assert len(kept.outputs[0].token_ids) == 40
    (again,) = llm.generate([prompt(5)], settings(), request_ids=["mine"])
    check_reference(again, prompt(5), reference)
