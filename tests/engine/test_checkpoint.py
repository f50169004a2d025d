"""Checkpoints through the faces: here, in another engine, in another process; as files; their size and time."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from perdure import LLM, Checkpoint, InvalidValue, SamplingParams
from perdure.api.output import RequestOutput
from perdure.engine.async_llm import Handle
from perdure.engine.prompts import Prompt
from perdure.models.tiny import make_tiny_llama
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    Brake,
    changed_tensors,
    check_empty,
    check_equal,
    in_thread,
    prompt,
    run_async,
    settings,
)
from tests.engine.test_lifecycle import check_parts, held, ids_of
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])
MODES = {
    "greedy": settings(max_tokens=24, logprobs=2, prompt_logprobs=1),
    "drawn": settings(max_tokens=24, logprobs=2, prompt_logprobs=1, temperature=0.9, top_p=0.9, seed=5),
}
X = prompt(37)


def taken(llm: LLM, ids: list[int], params: SamplingParams, after: int, end: bool) -> tuple[Checkpoint, RequestOutput]:
    """A checkpoint when so many steps of a request have run, and what the request gave."""
    return cut(llm, ids, params, after, end)


def cut(
    llm: LLM, given: Prompt, params: SamplingParams | None, after: int, end: bool
) -> tuple[Checkpoint, RequestOutput]:
    """The same of a request that may go on from a checkpoint itself."""
    llm.pause()  # until nothing is in flight of those before
    brake = Brake(llm._engine)
    brake.hold(after)
    llm.resume()
    call = in_thread(lambda: llm.generate([given], params, request_ids=["A"]))
    try:
        brake.wait_until_held()
        asked = llm._engine.checkpoint("A", end)
    finally:
        brake.release()
    found = asked.result(timeout=60)
    assert isinstance(found, Checkpoint)
    return found, call()[0]


@DEPTHS
@pytest.mark.parametrize("end", [False, True], ids=["lives-on", "ends"])
@pytest.mark.parametrize("mode", MODES)
def test_a_request_goes_on_here_and_in_another_engine(
    mode: str, end: bool, depth: int, make_llm: MakeLLM, solo: Solo
) -> None:
    """In mid-prefill, just begun and far on; the other engine has another depth, chunk budget, page size and pool."""
    params, truth = MODES[mode], solo(X, MODES[mode])
    here = make_llm(steps_in_flight=depth, max_num_batched_tokens=16)
    there = make_llm(steps_in_flight=5 - depth, max_num_batched_tokens=7, page_size=32, num_pages=8, max_num_seqs=3)
    for after in (1, 4, 15):
        found, first = taken(here, X, params, after, end)
        count = found.num_output
        assert found.num_remaining == 24 - count and found.status == "running" and found.num_tokens == 37 + count
        assert (after == 1) == (count == 0)
        if end:
            assert first.outputs[0].finish_reason == "abort"
            check_equal(first, truth, count)
        else:
            check_equal(first, truth)
        data = found.to_bytes()
        (again,) = here.generate(found)
        assert again.request_id == "A"
        check_equal(again, truth)
        outputs = there.generate(
            [prompt(9), Checkpoint.from_bytes(data), found], settings(), request_ids=[None, "B", None]
        )
        for output, name in zip(outputs[1:], ("B", "A"), strict=True):
            check_equal(output, truth)
            assert output.request_id == name and output.exact and output.metrics is not None
            witness("checkpoint", depth=depth, num_checkpoints=output.metrics.num_checkpoints, num_bytes=len(data))
        check_equal(outputs[0], solo(prompt(9), settings()))


OTHER_PROCESS = """
import json, sys
from pathlib import Path
from perdure import LLM, Checkpoint
import torch
torch.set_num_threads(1)
with LLM(sys.argv[1], num_pages=64, steps_in_flight=3) as llm:
    result = llm.generate(Checkpoint.from_bytes(Path(sys.argv[2]).read_bytes()))[0]
output = result.outputs[0]
scores = [list(column) for column in (output.logprobs.chosen, output.logprobs.top_ids, output.logprobs.top_scores)]
print(json.dumps([output.token_ids, output.text, scores, result.exact, result.metrics.num_checkpoints]))
"""


def test_a_request_goes_on_in_another_process(tiny: Path, tmp_path: Path, make_llm: MakeLLM, solo: Solo) -> None:
    found, _ = taken(make_llm(), X, MODES["drawn"], 9, end=True)
    file = tmp_path / "A.checkpoint"
    file.write_bytes(found.to_bytes())
    run = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, tiny, file],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
    )
    assert not run.returncode, run.stderr
    token_ids, text, scores, exact, num_checkpoints = json.loads(run.stdout)
    truth = solo(X, MODES["drawn"]).outputs[0]
    assert truth.logprobs is not None
    assert (token_ids, text) == (truth.token_ids, truth.text) and exact
    assert scores == [list(truth.logprobs.chosen), list(truth.logprobs.top_ids), list(truth.logprobs.top_scores)]
    witness("checkpoint-process", num_checkpoints=num_checkpoints, tokens_before=found.num_output)


@DEPTHS
@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_a_stream_that_goes_on_begins_with_all_it_has(kind: Any, depth: int, make_async: MakeAsync, solo: Solo) -> None:
    """Through the handle, which means its own request even when the id was taken again. Parts joined are the result."""
    params = settings(max_tokens=30, logprobs=1, output_kind=kind)

    async def main() -> None:
        llm = make_async(steps_in_flight=depth)
        brake = Brake(llm._engine)
        brake.hold(after=8)
        first = llm.submit(X, params, request_id="A")
        await held(brake)
        first.abort()
        second = llm.submit(prompt(5), params, request_id="A")
        gone, kept = (asyncio.ensure_future(handle.checkpoint(end=True)) for handle in (first, second))
        await asyncio.sleep(0)
        brake.release()
        with pytest.raises(InvalidValue, match="is not live"):
            await gone
        found = await kept
        assert found.prompt_token_ids == prompt(5)
        assert (await second).outputs[0].finish_reason == "abort"
        with pytest.raises(InvalidValue, match="request_id='A' is not live"):
            await llm.checkpoint("A")
        again = llm.submit(found)
        parts = [part async for part in again]
        output = await again
        check_equal(output, solo(prompt(5), params))
        check_parts(kind, parts, output)
        assert ids_of(parts[0])[: found.num_output] == found.token_ids

    run_async(main())


def test_a_stream_goes_on_with_its_first_part_at_once(make_async: MakeAsync, solo: Solo) -> None:
    """A request with tokens already: the engine is paused, and the handle gives them all the same."""

    async def main() -> None:
        llm = make_async()
        brake = Brake(llm._engine)
        brake.hold(after=8)
        first: Handle = llm.submit(X, MODES["drawn"], request_id="A")
        await held(brake)
        asked = asyncio.ensure_future(llm.checkpoint("A", end=True))
        await asyncio.sleep(0)
        brake.release()
        found = await asked
        assert found.num_output >= 7
        await first
        await llm.pause()
        again = llm.submit(found)
        part = await anext(aiter(again))
        assert ids_of(part) == found.token_ids and not part.finished
        assert part.outputs[0].logprobs is not None and len(part.outputs[0].logprobs) == found.num_output
        await llm.resume()
        check_equal(await again, solo(X, MODES["drawn"]))

    run_async(main())


def test_times_and_events_go_with_the_request(make_llm: MakeLLM) -> None:
    """The time it lay as a checkpoint does not count; what happened before is still told."""
    llm = make_llm()
    found, _ = taken(llm, X, MODES["greedy"], 9, end=True)
    kinds = [event.kind for event in found.timing.events]
    assert kinds[0] == "queued" and kinds[-1] == "checkpoint" and kinds.count("first_token") == 1
    assert 0 < found.timing.events[-1].time <= found.timing.elapsed_s
    time.sleep(0.3)
    begin = time.monotonic()
    (again,) = llm.generate(found)
    metrics, took = again.metrics, time.monotonic() - begin
    assert metrics is not None and metrics.finished_time is not None and metrics.first_token_time is not None
    assert [event.kind for event in metrics.events][: len(kinds)] == kinds
    assert [event.kind for event in metrics.events].count("first_token") == 1
    total = metrics.finished_time - metrics.arrival_time
    assert found.timing.elapsed_s < total < found.timing.elapsed_s + took + 0.01
    assert metrics.first_token_time - metrics.arrival_time < found.timing.elapsed_s
    witness("checkpoint-times", events_before=len(kinds), num_checkpoints=metrics.num_checkpoints)


def test_other_kernels_are_marked_or_refused(make_llm: MakeLLM) -> None:
    """The products of the other engine are another form: its result is not called exact, or nothing is begun."""
    llm = make_llm()
    found, _ = taken(llm, X, MODES["greedy"], 9, end=True)
    other = make_llm(linear_backend="reference")
    differences = found.fingerprint.differences(other._engine.resolved.core.fingerprint)
    witness("fingerprint", differences=differences)
    assert differences.startswith("kernels: ") and "'reference products" in differences and ";" not in differences
    (output,) = other.generate(found)
    assert output.error is None and not output.exact and len(ids_of(output)) == 24
    assert ids_of(output)[: found.num_output] == found.token_ids
    strict = make_llm(linear_backend="reference", on_mismatch="refuse")
    with pytest.raises(InvalidValue, match="on_mismatch='refuse': kernels"):
        strict.generate(found)
    (refused,) = strict.generate([found])
    assert isinstance(refused.error, InvalidValue) and strict.stats().num_requests == 0


def test_a_fingerprint_tells_weights_and_threads_apart(tiny: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
    """One changed number in one tensor is another model; the same weights from another path are not."""
    same, changed = tmp_path / "same", tmp_path / "changed"
    shutil.copytree(tiny, same)
    shutil.copytree(tiny, changed)
    with changed_tensors(changed) as tensors:
        name = sorted(tensors)[3]
        tensors[name].view(-1)[-1] += 2**-20
    prints = [make_llm(path)._engine.resolved.core.fingerprint for path in (tiny, same, changed)]
    assert prints[0] == prints[1] != prints[2]
    assert prints[0].differences(prints[2]).startswith("weights: ")
    tiled = [make_llm(page_size=size, attention_backend="tiled") for size in (1, 16, 64, 128)]
    pages = [llm._engine.resolved.core.fingerprint for llm in tiled]
    assert pages[0] == pages[1] == pages[2] != pages[3]  # 128 is a tile of its own


def test_a_checkpoint_knows_the_weights_of_its_time(tiny: Path, tmp_path: Path, make_llm: MakeLLM, solo: Solo) -> None:
    """Taken under weights 1, it goes on under weights 2 with both epochs and exact=False; back under 1, exactly."""
    other, params = make_tiny_llama(tmp_path / "other", seed=1), MODES["greedy"]
    llm, strict = make_llm(), make_llm(on_mismatch="refuse")
    found, _ = taken(llm, X, params, 9, end=True)
    llm.update_weights(other, epoch=5)
    (mixed,) = llm.generate(found)
    assert mixed.error is None and not mixed.exact
    assert mixed.outputs[0].weight_epochs == [(0, 0), (found.num_output, 5)]
    mixed_again, _ = taken(llm, X, params, 9, end=True)
    assert mixed_again.samples[0].epochs == ((0, 5),) and mixed_again.fingerprint.weights != found.fingerprint.weights
    strict.update_weights(other)
    with pytest.raises(InvalidValue, match="on_mismatch='refuse': weights: "):
        strict.generate(found)
    strict.update_weights(tiny)
    llm.update_weights(tiny, epoch=7)
    for back in (llm, strict):
        (output,) = back.generate(found)
        check_equal(output, solo(X, params))
        assert output.exact and output.outputs[0].weight_epochs[0] == (0, 0)
    witness("checkpoint-weights", epochs_of_the_mixed=[epoch for _, epoch in mixed.outputs[0].weight_epochs])


def test_misuse_is_refused_by_name(make_llm: MakeLLM) -> None:
    llm = make_llm()
    found, _ = taken(llm, X, MODES["greedy"], 9, end=True)
    for params in (settings(), [settings()]):
        with pytest.raises(InvalidValue, match=r"sampling_params.* is given, but a checkpoint"):
            llm.generate([found], params)
    with pytest.raises(InvalidValue, match="sampling_params holds None"):
        llm.generate([X], [None])
    with pytest.raises(InvalidValue, match="no prompt to be scored"):
        llm.logprobs(found)
    for name in ("nobody", 7, "A"):
        with pytest.raises(InvalidValue, match=f"request_id={name!r} is not live"):
            llm.checkpoint(name)
    for wrong, message in (((None,), "request_id=None"), (("A", 1), "end=1 is not a bool"), ((1.5,), "request_id=1.5")):
        with pytest.raises(InvalidValue, match=message):
            llm.checkpoint(*wrong)
    small = make_llm(num_pages=2)
    with pytest.raises(InvalidValue, match="may grow to 61 tokens, this engine has room for 32"):
        small.generate(found)
    assert small.stats().num_requests == 0
    one, two = llm.generate([found, found])
    assert one.error is None and isinstance(two.error, InvalidValue) and "request_id='A' is live" in str(two.error)


def test_what_stands_in_a_checkpoint_s_place_is_refused_in_a_line(make_llm: MakeLLM, make_async: MakeAsync) -> None:
    """Its bytes are no prompt and it is no conversation; what is told quotes no more of either than can be read."""
    llm = make_llm()
    found, _ = taken(llm, prompt(100), settings(max_tokens=9, prompt_logprobs=-1), 3, end=True)
    data = found.to_bytes()
    assert len(data) > 100_000
    wrong: list[tuple[Callable[[], Any], str]] = [
        (lambda: llm.generate(data), "^prompts=b'perdure checkpoint.*is neither a prompt nor a list of prompts$"),
        (lambda: llm.generate(data.hex), "is neither a prompt"),  # type: ignore[arg-type]
        (lambda: llm.chat(found), "^messages=Checkpoint.*is neither a conversation nor a list of conversations$"),  # type: ignore[arg-type]
        (lambda: llm.chat([{"role": "user", "content": "a"}], tools=3), "tools=3 is not a list"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", 3), "sampling_params=3 is neither"),  # type: ignore[arg-type]
        (lambda: llm.generate("a", request_ids=1.5), "request_ids=1.5 is neither"),  # type: ignore[arg-type]
    ]
    for call, message in wrong:
        with pytest.raises(InvalidValue, match=message) as refusal:
            call()
        assert len(str(refusal.value)) < 1000
    (refused,) = llm.generate([data], settings())
    assert "neither text nor" in str(refused.error) and len(repr(refused)) < 2000
    assert llm.stats().num_requests == 1

    async def main() -> None:
        for one in (make_async().submit(data, settings()), make_async().chat(found)):  # type: ignore[arg-type]
            with pytest.raises(InvalidValue) as refusal:
                await one
            assert len(str(refusal.value)) < 1000

    run_async(main())


def test_a_checkpoint_s_own_id_meets_no_made_up_one(make_llm: MakeLLM) -> None:
    """A guest brings a name that its own engine made up, even the one its host would give next: nobody is refused."""
    host = make_llm()
    assert [output.request_id for output in host.generate([X, X], settings(max_tokens=1))] == ["request-0", "request-1"]
    found, _ = taken(make_llm(), X, MODES["greedy"], 9, end=True)
    for number in (2, 7):
        guest = replace(found, request_id=f"request-{number}")
        outputs = host.generate([X, guest, X], settings(max_tokens=1))
        assert [output.error for output in outputs] == [None] * 3
        assert [output.request_id for output in outputs] == [f"request-{number + n}" for n in (1, 0, 2)]


@pytest.mark.alone
def test_a_checkpoint_of_4000_tokens_is_small_and_quick(tmp_path: Path, one_thread: None) -> None:
    """Under 2 ms (best of 5) on the loop's thread, and there and back; 12 bytes a token and 4 KB beyond scores."""
    model = make_tiny_llama(tmp_path / "long", seed=0, num_layers=1, max_position_embeddings=8192)
    with LLM(str(model), num_pages=260, max_num_seqs=1, max_num_batched_tokens=2048) as llm:
        scheduler = llm._engine._loop.scheduler
        spent: list[float] = []
        take = scheduler._take_checkpoint

        def timed(asked: Any) -> None:
            begin = time.perf_counter()
            take(asked)
            spent.append(time.perf_counter() - begin)

        scheduler._take_checkpoint = timed  # type: ignore[method-assign]
        params = settings(max_tokens=150, logprobs=0, prompt_logprobs=0)
        found, _ = taken(llm, prompt(3900), params, 102, end=False)
        call = in_thread(lambda: llm.generate([found]))
        while not llm.stats().num_running:
            time.sleep(0.001)
        llm.pause()
        whole = []
        for _ in range(5):
            begin = time.perf_counter()
            found = llm.checkpoint("A")
            whole.append(time.perf_counter() - begin)
        data = found.to_bytes()
        llm.resume()
        call()
        check_empty(llm._engine)
    num_scored = found.num_tokens - 1
    beyond = len(data) - 8 * num_scored  # a score and a rank each
    witness(
        "checkpoint-4000",
        num_tokens=found.num_tokens,
        loop_ms=round(min(spent) * 1e3, 3),
        call_ms=round(min(whole) * 1e3, 3),
        bytes_beyond_scores=beyond,
        bytes_a_token=round(beyond / found.num_tokens, 2),
    )
    assert found.num_tokens >= 4000
    assert min(spent) < 0.002 and min(whole) < 0.002
    assert beyond <= 12 * found.num_tokens + 4096
