"""Suspension in its three modes, reset, and orders that are refused: rows life-*, s06, s07, T10, T61."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from perdure import DeviceError, InvalidValue, PerdureError, StateError
from perdure.api import command as cmd
from perdure.api.command import KVMode
from perdure.api.event import Ended, Event
from perdure.api.output import RequestOutput
from perdure.api.request import Request
from perdure.engine.llm import Call
from tests.engine.conftest import DEVICES, Check, MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    Brake,
    PoolWatch,
    check_equal,
    check_reference,
    halted,
    in_thread,
    num_replays,
    prompt,
    run_async,
    settings,
)
from tests.engine.reference import Reference
from tests.witness import witness

A = [5, 6, 7, 8]
MODES = pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])


def num_scheduled(output: RequestOutput) -> int:
    """How often it was given a slot and pages."""
    assert output.metrics is not None
    return sum(event.kind == "scheduled" for event in output.metrics.events)


@DEVICES
@pytest.mark.parametrize("depth", [1, 2])
@MODES
def test_life_a_request_suspended_after_generation_began(
    kv: KVMode, depth: int, make_llm: MakeLLM, reference: Reference, solo: Solo, check_as_promised: Check
) -> None:
    """Rows life-sync-* and life-async-*, and T61: 16 tokens, suspended after 6 with steps in flight. On a GPU graphs
    that were captured before are replayed after."""
    llm = make_llm(steps_in_flight=depth, num_pages=4000)
    watch, brake = PoolWatch(llm._engine), Brake(llm._engine)
    ids, params = prompt(20), settings(max_tokens=16, prompt_logprobs=1, logprobs=2)
    brake.hold(after=6)
    call = in_thread(lambda: llm.generate([ids], params, request_ids=["A"]))
    brake.wait_until_held()
    _, num_in_flight = halted(llm, brake, lambda: llm.suspend(kv))

    stats = llm.stats()
    scheduler = llm._engine._loop.scheduler
    pages, address, resident = list(scheduler.requests.live["A"].children[0].pages), watch.address, watch.resident_bytes
    replays = num_replays(llm)
    assert stats.state == "suspended" and scheduler.steps_in_flight == 0
    with pytest.raises(StateError, match=r"suspended: resume\(\) before requests"):
        llm.generate(A)
    llm.suspend("persist")  # suspending twice is suspending once
    llm.resume(tags=["weights"])
    assert llm.stats() == stats
    with pytest.raises(StateError, match="suspended"):
        llm.generate(A)

    llm.resume()
    (output,) = call()
    check_reference(output, ids, reference)
    check_as_promised(output, solo(ids, params))
    assert watch.address == address
    row = f"life-{'sync' if depth == 1 else 'async'}-{kv}"
    found: dict[str, int] = {"num_in_flight": num_in_flight, "address": address}
    if watch.is_on_gpu:
        found |= {"replays_after": num_replays(llm) - replays}
    if kv == "persist":
        assert len(pages) == 2 and resident > 0 and num_scheduled(output) == 1
        found |= {"num_pages_kept": len(pages), "resident_bytes": resident}
    elif kv == "offload":
        assert resident == 0 and watch.before == watch.after and {*watch.after} >= {*pages}
        assert num_scheduled(output) == 1
        found |= {"num_pages_restored": len(watch.after)}
    else:
        assert resident == 0 and not pages and num_scheduled(output) == 2
        found |= {"times_prefilled": num_scheduled(output)}
    witness(row, **found)
    witness("T61", **found)


@DEVICES
@DEPTHS
@MODES
def test_T61_everything_comes_back_from_a_suspension(
    kv: KVMode, depth: int, make_llm: MakeLLM, reference: Reference, solo: Solo, check_as_promised: Check
) -> None:
    """Requests in decode and mid-prefill, without a page, evicted and queued; then the cache, which offload keeps."""
    config: dict[str, Any] = {"num_pages": 14, "paused_pages": 4, "max_num_batched_tokens": 24}
    llm = make_llm(steps_in_flight=depth, **config)
    brake = Brake(llm._engine)
    lengths, params = (60, 17, 33, 90, 5), settings(max_tokens=40, prompt_logprobs=0)
    prompts = [prompt(length) for length in lengths]
    brake.hold(after=3)
    call = in_thread(lambda: llm.generate(prompts, params))
    seen: set[str] = set()
    for steps in (7, 13, 19, 25):
        brake.wait_until_held()
        stats = llm._engine._loop.scheduler.stats()  # the loop itself waits for a step
        halted(llm, brake, lambda: llm.suspend(kv))
        assert llm.stats().num_running == 0 or kv != "recompute"
        seen |= {name for name in ("running", "waiting", "paused") if getattr(stats, f"num_{name}")}
        brake.hold(after=steps)
        llm.resume()
    brake.release()
    outputs = call()
    for output, ids in zip(outputs, prompts):
        check_reference(output, ids, reference)
        check_as_promised(output, solo(ids, params))
    (first,) = llm.generate([prompt(40)], settings())
    llm.pause()
    llm.suspend(kv)
    llm.resume()
    (again,) = llm.generate([prompt(40)], settings())
    check_as_promised(again, first)
    assert again.num_cached_tokens == (0 if kv == "recompute" else 32)
    assert seen >= {"running", "waiting"}
    witness("T61", num_states=len(seen), num_scheduled=sum(map(num_scheduled, outputs)))


@DEPTHS
def test_T10_illegal_orders_are_refused_before_anything_changes(
    depth: int, make_llm: MakeLLM, reference: Reference
) -> None:
    """(a) the prefix cache may go while paused requests hold KV; (b) no reset, (c) nothing generated while suspended;
    (d) resume of a running engine and (e) a second suspension do nothing."""
    llm = make_llm(steps_in_flight=depth)
    scheduler = llm._engine._loop.scheduler
    llm.generate([prompt(40)], settings(max_tokens=1))
    llm.resume()  # (d)
    brake = Brake(llm._engine)
    brake.hold(after=4)
    call = in_thread(lambda: llm.generate([prompt(40), A], settings(max_tokens=24), request_ids=["P", "A"]))
    brake.wait_until_held()
    halted(llm, brake, llm.pause)
    pages = list(scheduler.requests.live["P"].children[0].pages)
    assert llm.stats().state == "paused"
    llm.reset_prefix_cache()  # (a)
    assert list(scheduler.requests.live["P"].children[0].pages) == pages
    assert not scheduler.requests.cache.index._nodes
    with pytest.raises(StateError, match="2 are outstanding"):
        llm.reset()
    llm.suspend("offload")
    before = llm.stats()
    with pytest.raises(StateError, match="reset is refused while the engine is suspended"):
        llm.reset()  # (b)
    with pytest.raises(StateError, match="suspended"):
        llm.generate(A)  # (c)
    refused = llm.generate([A, [9]])
    assert [type(output.error) for output in refused] == [StateError, StateError]
    llm.suspend("recompute")  # (e)
    llm.pause()
    assert llm.stats() == before and list(scheduler.requests.live["P"].children[0].pages) == pages
    llm.resume()
    for output, ids in zip(call(), (prompt(40), A)):
        check_reference(output, ids, reference)
    witness("T10", num_pages_held=len(pages), num_running=before.num_running)


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (lambda llm: llm.suspend("disk"), "kv='disk' is none of persist, offload, recompute"),
        (lambda llm: llm.resume(tags=["cache"]), "tags='cache' is none of weights, kv"),
        (lambda llm: llm.resume(tags="kv"), "tags='kv' is no list"),
        (lambda llm: llm.resume(3), "tags=3 is no list"),
        (lambda llm: llm.resume(tags=[["kv"]]), r"tags=\['kv'\] is none of weights, kv"),
    ],
)
def test_what_no_order_can_be_is_refused_by_name(wrong: Any, named: str, make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidValue, match=named):
        wrong(llm)
    assert llm.stats().state == "running"


def test_s06_a_waiter_from_before_a_reset_is_woken_by_work_after_it(make_llm: MakeLLM, reference: Reference) -> None:
    """Who waits on the engine when it is reset hears of work that comes afterwards: nothing was replaced."""
    llm = make_llm()
    llm.generate([prompt(40)], settings(max_tokens=4))
    engine = llm._engine
    objects = [engine._inbox, engine._inbox._arrived, engine._receivers, engine._loop, engine._thread]
    objects += [engine._loop.scheduler, engine._loop.scheduler._control, engine.resolved.runner._kv._arena]
    cached = len(engine._loop.scheduler.requests.cache.index._nodes)

    call, waiting = Call(), threading.Event()
    request = Request("later", engine.ticket(), prompt(40), settings())
    wanted = cmd.Submit(request)
    receiver = call.receiver(wanted)

    def wait() -> dict[int, Event | PerdureError]:
        waiting.set()
        return call.wait(1)

    woken = in_thread(wait)
    waiting.wait()
    llm.reset()
    stats = llm.stats()
    assert (stats.num_requests, stats.num_steps, stats.num_cached_tokens) == (0, 0, 0)
    assert not engine._loop.scheduler.requests.cache.index._nodes
    engine.submit([(wanted, receiver)])
    end = woken()[request.ticket]
    assert isinstance(end, Ended) and end.record.num_cached_tokens == 0
    assert end.record.token_ids == reference(prompt(40), 16).token_ids
    after = [engine._inbox, engine._inbox._arrived, engine._receivers, engine._loop, engine._thread]
    after += [engine._loop.scheduler, engine._loop.scheduler._control, engine.resolved.runner._kv._arena]
    assert all(one is other for one, other in zip(objects, after))
    witness(
        "s06-reset-waiter",
        num_tokens_after=len(end.record.token_ids),
        cached_pages_forgotten=cached,
        num_objects=len(objects),
    )


def test_s06_an_engine_that_was_reset_draws_as_a_new_one(make_llm: MakeLLM) -> None:
    """Requests without a seed derive theirs from how many came before."""
    llm = make_llm()
    params = settings(temperature=1.0)
    first = llm.generate([A, A], params)
    llm.pause()
    llm.reset()
    assert llm.stats().state == "paused"
    llm.resume()
    for output, before in zip(llm.generate([A, A], params), first):
        check_equal(output, before)
    assert first[0].outputs[0].token_ids != first[1].outputs[0].token_ids


@MODES
def test_s07_a_reset_while_suspended_is_refused_before_anything_changes(kv: KVMode, make_llm: MakeLLM) -> None:
    llm = make_llm()
    llm.generate([prompt(40)], settings(max_tokens=4))
    llm.suspend(kv)
    scheduler = llm._engine._loop.scheduler

    def fingerprint() -> Any:
        return (
            llm.stats(),
            dict(scheduler.requests.cache.index._nodes),
            list(scheduler.requests.pool._free),
            list(scheduler.requests.pool._idle),
        )

    before = fingerprint()
    with pytest.raises(StateError, match="reset is refused while the engine is suspended"):
        llm.reset()
    assert fingerprint() == before
    llm.resume()
    assert llm.generate([prompt(40)], settings())[0].num_cached_tokens == (0 if kv == "recompute" else 32)
    witness("s07-reset-suspended", state=before[0].state, num_pages=before[0].num_pages)


@DEPTHS
def test_what_cannot_be_copied_out_stays_and_goes_on(
    depth: int, make_llm: MakeLLM, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for the copy: the suspension fails, the engine runs on as it was."""
    llm = make_llm(steps_in_flight=depth)
    brake = Brake(llm._engine)
    brake.hold(after=5)
    call = in_thread(lambda: llm.generate([A], settings(max_tokens=24)))
    brake.wait_until_held()

    def no_memory(pages: list[int]) -> None:
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(llm._engine.resolved.runner._kv, "offload", no_memory)
    with pytest.raises(DeviceError, match="MemoryError: no room for a copy"):
        halted(llm, brake, lambda: llm.suspend("offload"))
    assert llm.stats().state == "running"
    (output,) = call()
    check_reference(output, A, reference)


@DEPTHS
@MODES
def test_aborts_and_ends_while_suspended(kv: KVMode, depth: int, make_async: MakeAsync, reference: Reference) -> None:
    """An abort is applied at once, with the tokens so far; the others go on after the resume, through AsyncLLM."""

    async def main() -> None:
        llm = make_async(steps_in_flight=depth, max_num_seqs=2)
        handles = [llm.submit(prompt(12, seed), settings(max_tokens=30)) for seed in range(3)]
        parts = [part async for part in _first(handles[0], 4)]
        assert parts
        await llm.suspend(kv)
        handles[0].abort()
        handles[2].abort()
        outputs = [await handles[0], await handles[2]]
        assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]
        assert len(outputs[0].outputs[0].token_ids) >= 4 and not outputs[1].outputs[0].token_ids
        late = llm.submit(A, settings())
        with pytest.raises(StateError, match="suspended"):
            await late
        stats = await llm.stats()
        assert (stats.state, stats.num_running + stats.num_waiting) == ("suspended", 1)
        await llm.resume()
        check_reference(await handles[1], prompt(12, 1), reference)
        check_reference(outputs[0], prompt(12, 0), reference)

    run_async(main())


async def _first(handle: Any, count: int) -> Any:
    """Its parts, until so many came."""
    async for part in handle:
        yield part
        count -= 1
        if not count:
            return
