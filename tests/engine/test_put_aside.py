"""Who is put aside, who comes back, and in which order: rows s13 to s17, life-abort-*, life-pressure-victim, T13."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from perdure import LLM
from perdure.api.command import KVMode
from perdure.api.plan import StepPlan
from perdure.models.tiny import make_tiny_llama
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    Brake,
    check_equal,
    check_reference,
    halted,
    in_thread,
    pressure,
    prompt,
    run_async,
    settings,
    until,
)
from tests.engine.reference import Reference
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])
NAMES = ("C", "D", "A", "B")
PROMPTS = dict(zip(NAMES, (prompt(15), prompt(14), prompt(2), prompt(3))))


def seeded(seed: int, **changes: Any) -> Any:
    return settings(temperature=1.0, seed=seed, prompt_logprobs=0, logprobs=1, **changes)


PARAMS = {
    "C": seeded(1, max_tokens=10),
    "D": seeded(2, max_tokens=10),
    "A": seeded(3, max_tokens=9),
    "B": seeded(4, max_tokens=14),
}


class Crowd:
    """C and D lack a page, one after the other, while A and B run: four pages, one each."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.scheduler = llm._engine._loop.scheduler
        self.admitted: list[int] = []
        """Serial numbers, as they were given slots."""
        runner = llm._engine.resolved.runner
        execute = runner.execute

        def executed(plan: StepPlan) -> Any:
            self.admitted += [init.request for init in plan.row_inits]
            return execute(plan)

        runner.execute = executed  # type: ignore[method-assign]
        self.brake = Brake(llm._engine)
        self.brake.hold(after=1)
        self.call = in_thread(
            lambda: llm.generate(list(PROMPTS.values()), list(PARAMS.values()), request_ids=list(NAMES))
        )
        self.brake.wait_until_held()

    def watch(self, num_steps: int) -> list[list[Any]]:
        """Who is paused now and after each further step, as the engine's statistics name them."""
        seen = [list(self.scheduler.stats().paused_ids)]
        for _ in range(num_steps):
            self.brake.hold(after=1)
            self.brake.wait_until_held()
            seen.append(list(self.scheduler.stats().paused_ids))
        return seen

    def check(self, solo: Solo) -> None:
        self.brake.release()
        for name, output in zip(NAMES, self.call()):
            assert output.request_id == name
            check_equal(output, solo(PROMPTS[name], PARAMS[name]))


@DEPTHS
def test_s13_paused_requests_are_named_by_their_ids(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """A flat list of the ids as given, with one paused request and with two."""
    crowd = Crowd(make_llm(num_pages=4, paused_pages=4, steps_in_flight=depth))
    seen = crowd.watch(3)
    crowd.check(solo)
    assert (["C"] in seen or depth == 4) and seen[-1] == ["C", "D"]
    assert dict.fromkeys(seen[-1], 1) == {"C": 1, "D": 1}
    witness("s13-paused-id", num_paused=len(seen[-1]), num_pauses=crowd.llm.stats().num_pauses)


@DEPTHS
def test_s14_only_who_resumes_leaves_the_paused(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """A ends and gives one page back: C goes on with it, D waits on."""
    crowd = Crowd(make_llm(num_pages=4, paused_pages=4, steps_in_flight=depth))
    seen = crowd.watch(12)
    crowd.check(solo)
    both, alone = seen.index(["C", "D"]), seen.index(["D"])
    assert both < alone
    witness("s14-resume-removes", num_paused_before=len(seen[both]), num_paused_after=len(seen[alone]))


@DEPTHS
def test_s15_dropped_kv_is_computed_again_in_order(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """Residents C and D (paused), A and B: A, B, D, C come again, and draws and scores stay with their requests."""
    crowd = Crowd(make_llm(num_pages=4, paused_pages=4, steps_in_flight=depth))
    seen = crowd.watch(3)
    late = in_thread(lambda: crowd.llm.generate([prompt(5)], settings(priority=-1), request_ids="late"))
    until(lambda: bool(crowd.llm._engine._inbox._commands))
    halted(crowd.llm, crowd.brake, lambda: crowd.llm.suspend("recompute"))
    names = [state.request.request_id for state in crowd.scheduler.requests.waiting]
    before = len(crowd.admitted)
    crowd.llm.resume()
    crowd.check(solo)
    late()
    assert seen[-1] == ["C", "D"] and names == ["A", "B", "D", "C", "late"]
    again = [NAMES[arrival] for arrival in crowd.admitted[before:] if arrival < 4]
    assert again[:4] == ["A", "B", "D", "C"]
    witness("s15-recompute-order", replayed=" ".join(again), num_pauses=crowd.llm.stats().num_pauses)


@DEPTHS
@pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
def test_s16_prompt_scores_are_not_doubled(
    kv: KVMode, depth: int, make_llm: MakeLLM, solo: Solo, reference: Reference
) -> None:
    """Suspended in mid-prefill: what was scored is not asked again."""
    llm = make_llm(max_num_batched_tokens=3, steps_in_flight=depth)
    brake = Brake(llm._engine)
    brake.hold(after=1)
    ids, params = prompt(30), settings(prompt_logprobs=2)
    call = in_thread(lambda: llm.generate([ids], params, request_ids="A"))
    brake.wait_until_held()
    halted(llm, brake, lambda: llm.suspend(kv))
    state = llm._engine._loop.scheduler.requests.live["A"].children[0]
    assert state.prompt_scores is not None
    num_scored, num_output = state.prompt_scores.num_scored, state.num_output
    assert num_scored == 3 * (1 + depth) and not num_output
    llm.resume()
    (output,) = call()
    check_equal(output, solo(ids, params))
    check_reference(output, ids, reference)
    assert output.prompt_logprobs is not None and output.prompt_logprobs.num_scored == 29
    witness("s16-partial-scores", num_scored_before=num_scored, num_scored=output.prompt_logprobs.num_scored)


@DEPTHS
@pytest.mark.parametrize("kv", ["persist", "offload", "recompute"])
def test_s17_finished_prompt_scores_are_not_erased(kv: KVMode, depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """Suspended after the first token of a prompt that came in chunks."""
    llm = make_llm(max_num_batched_tokens=3, steps_in_flight=depth)
    brake = Brake(llm._engine)
    brake.hold(after=4)
    ids, params = prompt(9), settings(prompt_logprobs=2)
    call = in_thread(lambda: llm.generate([ids], params, request_ids="A"))
    brake.wait_until_held()
    halted(llm, brake, lambda: llm.suspend(kv))
    state = llm._engine._loop.scheduler.requests.live["A"].children[0]
    assert state.prompt_scores is not None and state.num_output >= 2
    num_scored = state.prompt_scores.num_scored
    assert num_scored == 8
    llm.resume()
    (output,) = call()
    check_equal(output, solo(ids, params))
    witness("s17-complete-scores", num_scored_before=num_scored, num_output_before=depth + 2)


@DEPTHS
def test_T13_preemption_inside_a_chunked_prompt_with_scores(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """100 tokens in chunks of 32 at most, evicted after two of them for the one before it."""
    llm = make_llm(num_pages=8, paused_pages=0, max_num_batched_tokens=32, steps_in_flight=depth)
    prompts, params = [prompt(15), prompt(100)], [settings(max_tokens=8), settings(max_tokens=8, prompt_logprobs=1)]
    outputs = llm.generate(prompts, params)
    for output, ids, one in zip(outputs, prompts, params):
        check_equal(output, solo(ids, one))
    scores, metrics = outputs[1].prompt_logprobs, outputs[1].metrics
    assert scores is not None and scores[0] is None and scores.num_scored == 99 and metrics is not None
    kinds = [event.kind for event in metrics.events]
    num_chunks = kinds[: kinds.index("evicted")].count("chunk")  # those whose results were in
    assert num_chunks == 2 or depth > 1
    witness("T13", num_evictions=pressure(outputs[1])[0], num_chunks=kinds.count("chunk"))


@DEPTHS
@pytest.mark.parametrize("where", ["queued", "active"])
def test_life_abort(where: str, depth: int, make_async: MakeAsync, reference: Reference) -> None:
    """A's request is aborted while it waits or runs; B's goes on. A has one end, with what it had."""

    async def main() -> None:
        llm = make_async(steps_in_flight=depth, max_num_seqs=1 if where == "queued" else 4)
        brake = Brake(llm._engine)
        brake.hold(after=8)
        other = llm.submit(prompt(12), settings(max_tokens=20), request_id="B/0")
        await asyncio.sleep(0)
        mine = llm.submit(prompt(20), settings(max_tokens=20), request_id="A/0")
        await asyncio.get_running_loop().run_in_executor(None, brake.wait_until_held)
        scheduler = llm._engine._loop.scheduler
        held = len(scheduler.requests.live["A/0"].children[0].pages)
        free = scheduler.stats().num_free_pages
        assert bool(held) == (where == "active")
        mine.abort()
        brake.release()
        parts = [part async for part in mine]
        output = await mine
        assert [part.finished for part in parts].count(True) == 1
        assert output.outputs[0].finish_reason == "abort"
        num_tokens = len(output.outputs[0].token_ids)
        assert bool(num_tokens) == (where == "active")
        check_reference(output, prompt(20), reference)
        check_reference(await other, prompt(12), reference)
        after = (await llm.stats()).num_free_pages
        assert after == 128
        witness(f"life-abort-{where}", pages_free_at_abort=free, pages_free_after=after, num_in_queue=1 + held)

    run_async(main())


@DEPTHS
def test_life_pressure_victim(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    """Five pages, a paused budget of one, three requests: the last is paused, then evicted, and prefilled again."""
    llm = make_llm(num_pages=5, paused_pages=1, steps_in_flight=depth, enable_prefix_caching=False)
    prompts, params = [prompt(20), prompt(30), prompt(15)], settings(max_tokens=8, prompt_logprobs=0)
    outputs = llm.generate(prompts, params, request_ids=["X", "Y", "Z"])
    for output, ids in zip(outputs, prompts):
        check_equal(output, solo(ids, params))
    assert [pressure(output) for output in outputs] == [(0, 0), (0, 0), (1, 1)]
    victim = outputs[2]
    assert victim.metrics is not None
    kinds = [event.kind for event in victim.metrics.events]
    assert kinds.index("paused") < kinds.index("evicted") and kinds.count("scheduled") == 2
    witness("life-pressure-victim", victim=str(victim.request_id), times_prefilled=kinds.count("scheduled"))


@DEPTHS
def test_a_companion_evicted_without_a_paused_budget(depth: int, make_llm: MakeLLM, tmp_path: Path) -> None:
    """255 + 6 tokens beside a chunk of 513, in pages of 256: it needs a second page, and there is none."""
    model = make_tiny_llama(tmp_path, max_position_embeddings=2048)
    config: dict[str, Any] = {"page_size": 256, "max_num_batched_tokens": 768, "enable_prefix_caching": False}
    prompts, params = [prompt(768 + 513), prompt(255)], settings(max_tokens=6, prompt_logprobs=0)
    roomy = make_llm(model, num_pages=16, steps_in_flight=1, **config).generate(prompts, params)
    llm = make_llm(model, num_pages=7, paused_pages=0, steps_in_flight=depth, **config)
    outputs = llm.generate(prompts, params, request_ids=["target", "companion"])
    for output, other in zip(outputs, roomy):
        check_equal(output, other)
    assert [pressure(output) for output in outputs] == [(0, 0), (1, 0)]
    assert outputs[0].metrics is not None and outputs[1].metrics is not None
    chunks = [event.num_tokens for event in outputs[0].metrics.events if event.kind == "chunk"]
    assert chunks == [768, 513]
    witness("cross-companion", num_evictions=pressure(outputs[1])[0], last_chunk=chunks[-1])
