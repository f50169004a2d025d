"""Other weights in a live engine: T55, T56; what fails half-way; weights put away and dropped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from perdure import LLM, InvalidValue, ModelLoadError, StateError
from perdure.api.command import CachePolicy, InFlightPolicy, KVMode
from perdure.api.output import RequestOutput
from perdure.models.tiny import make_tiny, make_tiny_llama
from perdure.models.weight_set import WeightSet
from perdure.runner.runner import Runner
from tests.engine.conftest import MakeAsync, MakeLLM
from tests.engine.helpers import (
    Brake,
    check_equal,
    check_scores_equal,
    halted,
    in_thread,
    prompt,
    run_async,
    settings,
)
from tests.witness import witness

A = [5, 6, 7, 8]
P = prompt(40)
DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """M with other weights."""
    return make_tiny_llama(tmp_path_factory.mktemp("other-weights"), seed=1)


@pytest.fixture
def fresh(make_llm: MakeLLM, other: Path) -> LLM:
    """An engine that began with the other weights."""
    return make_llm(other, steps_in_flight=1, enable_prefix_caching=False)


def spans(output: RequestOutput) -> list[tuple[int, int]]:
    return output.outputs[0].weight_epochs


@pytest.mark.parametrize("source", ["directory", "tensors", "pairs"])
def test_T55_results_are_those_of_the_weights_that_computed_them(
    source: str, make_llm: MakeLLM, fresh: LLM, tiny: Path, other: Path
) -> None:
    """W1, W2, W1 again: with the cache invalidated; then kept apart by epoch; then kept, and the result says so."""

    def of(path: Path) -> Any:
        tensors = load_file(path / "model.safetensors")
        return {"directory": str(path), "tensors": tensors, "pairs": iter(tensors.items())}[source]

    llm, params = make_llm(), settings(logprobs=2)
    (first,) = llm.generate([P], params)
    (second,) = fresh.generate([P], params)
    assert first.outputs[0].token_ids != second.outputs[0].token_ids

    llm.update_weights(of(other))
    (now,) = llm.generate([P], params)
    check_equal(now, second)
    assert (now.num_cached_tokens, now.exact, spans(now)) == (0, True, [(0, 1)])
    llm.update_weights(of(tiny), epoch=0)
    (again,) = llm.generate([P], params)
    check_equal(again, first)
    assert (again.num_cached_tokens, spans(again)) == (0, [(0, 0)])

    llm.update_weights(of(other), epoch=1, cache="salt")
    (now,) = llm.generate([P], params)
    check_equal(now, second)
    assert now.num_cached_tokens == 0
    llm.update_weights(of(tiny), epoch=0, cache="salt")
    (again,) = llm.generate([P], params)
    check_equal(again, first)
    assert (again.num_cached_tokens, again.exact) == (32, True)

    llm.update_weights(of(other), epoch=5, cache="keep")
    (stale,) = llm.generate([P], params)
    assert (stale.num_cached_tokens, stale.exact, spans(stale)) == (32, False, [(0, 5)])
    llm.reset_prefix_cache()
    (now,) = llm.generate([P], params)
    check_equal(now, second)
    assert now.exact

    wrong = load_file(tiny / "model.safetensors") | {"model.norm.weight": torch.ones(3)}
    with pytest.raises(ModelLoadError, match=r"'model.norm.weight' has shape \[3\], expected \[64\]"):
        llm.update_weights(wrong)
    (now,) = llm.generate([P], params)
    check_equal(now, second)
    assert llm.stats().weight_epoch == 5 and now.num_cached_tokens == 32
    llm.update_weights(of(tiny))
    witness("T55", num_cached_of_own_epoch=again.num_cached_tokens, num_cached_stale=stale.num_cached_tokens)


@DEPTHS
@pytest.mark.parametrize("with_weights", [False, True])
def test_T56_a_result_says_which_epoch_each_token_came_from(
    with_weights: bool, depth: int, make_llm: MakeLLM, fresh: LLM, tiny: Path, other: Path
) -> None:
    """20 tokens, epoch 3 -> 7 in a pause after 8; one more request waits meanwhile; an idle engine moves as well."""
    llm, idle = make_llm(steps_in_flight=depth), make_llm()
    weights = other if with_weights else None
    for engine in (llm, idle):
        engine.update_weights(None, epoch=3)
        assert engine.stats().weight_epoch == 3
    (whole,) = llm.generate([P], settings(max_tokens=20, prompt_logprobs=0))
    assert spans(whole) == [(0, 3)]
    brake = Brake(llm._engine)
    brake.hold(after=8 - depth)
    call = in_thread(lambda: llm.generate([P], settings(max_tokens=20, prompt_logprobs=0)))
    brake.wait_until_held()
    _, num_in_flight = halted(llm, brake, llm.pause)
    later = in_thread(lambda: llm.generate([A], settings()))
    for engine in (llm, idle):
        engine.update_weights(weights, epoch=7)
    state, epoch = llm.stats().state, llm.stats().weight_epoch
    assert (state, epoch) == ("paused", 7)
    llm.resume()
    (output,) = call()
    (queued,) = later()
    assert spans(output) == [(0, 3), (8, 7)] and spans(queued) == [(0, 7)]
    ids, scores = output.outputs[0].token_ids, output.outputs[0].logprobs
    assert scores is not None and whole.outputs[0].logprobs is not None and output.exact
    check_scores_equal(scores.cut(0, 8), whole.outputs[0].logprobs.cut(0, 8))
    check_scores_equal(output.prompt_logprobs, whole.prompt_logprobs)
    if with_weights:
        (rest,) = fresh.generate([P + ids[:8]], settings(max_tokens=12))
        assert rest.outputs[0].logprobs is not None and ids[8:] == rest.outputs[0].token_ids
        check_scores_equal(scores.cut(8, 20), rest.outputs[0].logprobs)
        check_equal(queued, fresh.generate([A], settings())[0])
    else:
        check_equal(output, whole)
    assert idle.stats().weight_epoch == epoch
    found = {"num_in_flight": num_in_flight, "epoch": epoch, "epoch_of_idle": idle.stats().weight_epoch}
    witness("T56", **found)
    for engine in (llm, idle) if with_weights else ():
        engine.update_weights(tiny)


@DEPTHS
@pytest.mark.parametrize("in_flight", ["recompute", "keep"])
def test_an_update_of_a_running_engine_drains_first(
    in_flight: InFlightPolicy, depth: int, make_llm: MakeLLM, fresh: LLM, tiny: Path, other: Path
) -> None:
    """One request in decode, one in mid-prefill with scores of its prompt, one that waits. Prompt scores of a request
    that has no token yet are of the new weights, all of them."""
    llm = make_llm(steps_in_flight=depth, max_num_batched_tokens=16, max_num_seqs=2)
    brake = Brake(llm._engine)
    brake.hold(after=4)
    params = [settings(max_tokens=24), settings(prompt_logprobs=1), settings(prompt_logprobs=1)]
    prompts = [A, prompt(200), P]
    call = in_thread(lambda: llm.generate(prompts, params, request_ids=["decode", "prefill", "waits"]))
    brake.wait_until_held()
    live = llm._engine._loop.scheduler.requests.live
    states = {name: group.children[0] for name, group in live.items()}
    before = states["decode"].num_output, states["prefill"].num_computed, states["waits"].num_computed
    assert before[0] and 0 < before[1] < 100 and not before[2]
    halted(llm, brake, lambda: llm.update_weights(other, in_flight=in_flight))
    outputs = call()
    decode, prefill, waits = outputs
    assert spans(decode)[0] == (0, 0) and spans(decode)[1][1] == 1 and spans(prefill) == spans(waits) == [(0, 1)]
    check_equal(waits, fresh.generate([P], params[2])[0])
    assert waits.exact and [decode.exact, prefill.exact] == [in_flight == "recompute"] * 2
    if in_flight == "recompute":
        first = spans(decode)[1][0]
        ids = decode.outputs[0].token_ids
        (rest,) = fresh.generate([A + ids[:first]], settings(max_tokens=24 - first))
        assert rest.outputs[0].token_ids == ids[first:]
        check_equal(prefill, fresh.generate([prompts[1]], params[1])[0])
        assert llm.generate([prompts[1]], settings())[0].exact
    llm.update_weights(tiny)


@pytest.mark.parametrize("was_paused", [False, True])
def test_weights_written_in_part_serve_nobody_until_a_whole_update(
    was_paused: bool, make_llm: MakeLLM, fresh: LLM, tiny: Path, other: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failure after the first byte: suspended and refusing; then what was inside goes on, in the state it was in."""
    llm = make_llm(steps_in_flight=2)
    brake = Brake(llm._engine)
    brake.hold(after=5)
    call = in_thread(lambda: llm.generate([A], settings(max_tokens=24)))
    brake.wait_until_held()
    store_type = type(llm._engine.resolved.loaded.weights.open(other))
    pieces = store_type.pieces

    def breaks(self: Any, part: Any, *how: Any) -> Iterator[Any]:
        if "layers.1." in part.hf:
            raise OSError("the disk is gone")
        yield from pieces(self, part, *how)

    if was_paused:
        halted(llm, brake, llm.pause)
    with monkeypatch.context() as patch:
        patch.setattr(store_type, "pieces", breaks)
        with pytest.raises(Exception, match="OSError: the disk is gone"):
            if was_paused:
                llm.update_weights(other)
            else:
                halted(llm, brake, lambda: llm.update_weights(other))
    stats = llm.stats()
    assert (stats.state, stats.weight_epoch) == ("suspended", 0)
    with pytest.raises(StateError, match=r"suspended: update_weights\(\) before"):
        llm.generate(A)
    with pytest.raises(StateError, match=r"not whole: update_weights\(\) first"):
        llm.resume()
    llm.update_weights(None, epoch=4)
    assert llm.stats().state == "suspended"
    llm.update_weights(other, epoch=9)
    assert llm.stats().state == ("paused" if was_paused else "running")
    llm.resume()
    (output,) = call()
    first = spans(output)[1][0]
    assert spans(output) == [(0, 0), (first, 9)]
    (rest,) = fresh.generate([A + output.outputs[0].token_ids[:first]], settings(max_tokens=24 - first))
    assert rest.outputs[0].token_ids == output.outputs[0].token_ids[first:]
    llm.update_weights(tiny)


@pytest.mark.parametrize("backend", ["auto", "packed", "plain"])
@pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
def test_T61_weights_are_put_away_and_dropped(
    kv: KVMode, backend: str, make_llm: MakeLLM, tiny: Path, other: Path
) -> None:
    """Away and back to the bit with requests inside; dropped weights must be updated before the KV wakes."""
    llm = make_llm(linear_backend=backend, batch_invariant=backend != "plain")
    (whole,) = llm.generate([P], settings(max_tokens=24))
    brake = Brake(llm._engine)
    brake.hold(after=5)
    call = in_thread(lambda: llm.generate([P], settings(max_tokens=24)))
    brake.wait_until_held()
    halted(llm, brake, lambda: llm.suspend(kv, weights="offload"))
    with pytest.raises(StateError, match=r"resume\(tags=\['weights'\]\) first"):
        llm.update_weights(other)
    llm.resume(tags=["kv"])
    assert llm.stats().state == "suspended"
    with pytest.raises(StateError, match="suspended"):
        llm.generate(A)
    llm.resume(tags=["weights"])
    check_equal(call()[0], whole) if backend != "plain" else call()
    assert llm.stats().state == "running"

    llm.suspend(kv, weights="drop")
    for tags in (None, ["kv"], ["weights", "kv"]):
        with pytest.raises(StateError, match="not whole"):
            llm.resume(tags)
    with pytest.raises(StateError, match="awake"):
        llm.update_weights(tiny)
    llm.resume(tags=["weights"])
    with pytest.raises(StateError, match=r"update_weights\(\) first"):
        llm.resume()
    assert llm.stats().state == "suspended"
    llm.update_weights(tiny)
    llm.resume()
    (again,) = llm.generate([P], settings(max_tokens=24))
    if backend != "plain":
        check_equal(again, whole)
    assert (again.num_cached_tokens, spans(again)) == (0, [(0, 1)])


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_really_falls_while_suspended(make_llm: MakeLLM, tmp_path: Path) -> None:
    """A pool that was written all over and weights of some 50 MB: the process gives both back, and takes them again."""
    model = make_tiny("llama", tmp_path, hidden_size=512, intermediate_size=1408, num_hidden_layers=4)
    llm = make_llm(model, num_pages=4096, max_num_batched_tokens=64)
    resolved = llm._engine.resolved
    pool, weights = resolved.runner.kv_bytes, resolved.loaded.num_bytes
    resolved.runner._kv._pool.fill_(0.5)
    (whole,) = llm.generate([P], settings())
    before = resident_bytes()
    llm.suspend("offload", weights="offload")
    fell = before - resident_bytes()
    assert fell > 0.9 * (pool + weights), (fell, pool, weights)
    llm.resume()
    (again,) = llm.generate([P], settings())
    check_equal(again, whole)
    assert again.num_cached_tokens == 32
    witness("memory-falls", megabytes_before=before >> 20, megabytes_fallen=fell >> 20, pool=pool >> 20)


@pytest.mark.parametrize(
    ("settings_of_update", "named"),
    [
        ({"epoch": -1}, "epoch=-1 is no integer"),
        ({"epoch": True}, "epoch=True is no integer"),
        ({"cache": "stale"}, "cache='stale' is none of invalidate, salt, keep"),
        ({"in_flight": "wait"}, "in_flight='wait' is none of recompute, keep"),
        ({"epoch": 0, "cache": "salt"}, "cache='salt' tells weights apart by epoch"),
    ],
)
def test_what_no_update_can_be_is_refused_by_name(
    settings_of_update: dict[str, Any], named: str, make_llm: MakeLLM, other: Path
) -> None:
    llm = make_llm()
    with pytest.raises((InvalidValue, StateError), match=named):
        llm.update_weights(other, **settings_of_update)
    with pytest.raises(InvalidValue, match="epoch alone"):
        llm.update_weights(None)
    assert llm.stats().weight_epoch == 0 and not llm._engine.resolved.runner.staged


def emptied(tensor: torch.Tensor) -> torch.Tensor:
    copy = tensor.clone()
    copy.untyped_storage().resize_(0)
    return copy


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (torch.Tensor.to_sparse, "no plain one"),
        (torch.Tensor.to_mkldnn, "no plain one"),
        (torch._neg_view, "no plain one"),
        (emptied, "given its memory away"),
    ],
    ids=["sparse", "mkldnn", "negative view", "emptied"],
)
def test_a_tensor_that_cannot_be_read_is_refused_before_the_first_byte(
    spoil: Callable[[torch.Tensor], torch.Tensor], words: str, make_llm: MakeLLM, tiny: Path
) -> None:
    llm, tensors = make_llm(), load_file(tiny / "model.safetensors")
    name = next(name for name, tensor in tensors.items() if tensor.dim() == 2)
    with pytest.raises(ModelLoadError, match=f"{name}.*{words}"):
        llm.update_weights({**tensors, name: spoil(tensors[name])})
    for pairs in ({3: tensors[name]}, [1, 2], [(name,)]):
        with pytest.raises(InvalidValue, match="no pair of a name and a tensor"):
            llm.update_weights(pairs)  # type: ignore[arg-type]
    assert llm.stats().state == "running"
    assert len(llm.generate([A], settings(max_tokens=3))[0].outputs[0].token_ids) == 3


@pytest.mark.parametrize("kind", ["delta", "cumulative"])
def test_parts_of_a_stream_have_their_epochs(kind: str, make_async: MakeAsync, tiny: Path, other: Path) -> None:
    """Parts joined are the result; policies of cache and of requests inside, through AsyncLLM."""

    async def main() -> None:
        llm = make_async()
        handle = llm.submit(P, settings(max_tokens=30, output_kind=kind, stream_interval=3))
        parts: list[RequestOutput] = []
        async for part in handle:
            parts.append(part)
            if len(parts) == 2:
                await llm.update_weights(other, epoch=4)
        output = await handle
        found = spans(parts[-1]) if kind == "cumulative" else [span for part in parts for span in spans(part)]
        assert found == spans(output) and [epoch for _, epoch in found] == [0, 4]
        await llm.update_weights(tiny, epoch=0)

    run_async(main())


CACHES: tuple[CachePolicy, ...] = ("invalidate", "salt", "keep")


@pytest.mark.parametrize("cache", CACHES)
def test_stripped_tokens_take_their_epochs_with_them(cache: CachePolicy, make_llm: MakeLLM, tiny: Path) -> None:
    """The stop is drawn by other weights than all before it, and is stripped."""
    llm = make_llm(steps_in_flight=1)
    (whole,) = llm.generate([P], settings(max_tokens=12))
    stop = whole.outputs[0].token_ids[6]
    assert stop not in whole.outputs[0].token_ids[:6]
    brake = Brake(llm._engine)
    brake.hold(after=5)
    params = settings(max_tokens=12, stop_token_ids=[stop], strip_stop_tokens=True)
    call = in_thread(lambda: llm.generate([P], params))
    brake.wait_until_held()
    halted(llm, brake, lambda: llm.update_weights(tiny, epoch=2, cache=cache))
    (output,) = call()
    assert output.outputs[0].token_ids == whole.outputs[0].token_ids[:6] and spans(output) == [(0, 0)]


def test_a_start_whose_weights_end_on_the_way_gives_its_pool_back(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of a GPU are waited for when the pool is there."""
    release, released = Runner.release, []

    def ends(self: WeightSet) -> None:
        raise ModelLoadError("the file ended inside tensor 'model.norm.weight'")

    def given_back(self: Runner) -> None:
        release(self)
        released.append(self)

    monkeypatch.setattr(WeightSet, "finish", ends)
    monkeypatch.setattr(Runner, "release", given_back)
    with pytest.raises(ModelLoadError, match="ended inside tensor"):
        LLM(str(tiny), max_num_seqs=2)
    assert len(released) == 1
