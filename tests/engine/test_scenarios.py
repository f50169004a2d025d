"""Scenario rows of the matrix of faults that concern checkpoints, results, admission and failures (s01 to s11, s18 to
s22 less what suspension and weights show), each by its id, on the tiny model or, where text matters, on SmolLM2."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from perdure import LLM, AsyncLLM, Checkpoint, InvalidValue, SamplingParams
from perdure.api.ending import Failure
from perdure.api.errors import StateError
from perdure.api.output import RequestOutput
from perdure.api.plan import StepOutput, StepPlan
from perdure.api.scores import PackedScores, TokenScores
from perdure.core.checkpoint import take
from perdure.core.state import RequestState
from tests.core.helpers import Bench
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    Brake,
    check_empty,
    check_equal,
    check_reference,
    in_thread,
    prompt,
    run_async,
    settings,
    until_stats,
)
from tests.engine.reference import Reference
from tests.engine.test_checkpoint import cut, taken
from tests.engine.test_lifecycle import held, ids_of
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2])


# s01: what a result shows of the prompt


def leaves(value: Any) -> Iterator[Any]:
    """Everything that can be reached in a value."""
    yield value
    if isinstance(value, msgspec.Struct):
        for name in value.__struct_fields__:
            yield from leaves(getattr(value, name))
    elif isinstance(value, TokenScores):
        yield list(value.token_ids)
        for name in ("spell", *TokenScores.COLUMNS):
            yield from leaves(getattr(value, name))
    elif isinstance(value, Mapping):
        for pair in value.items():
            yield from leaves(pair)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from leaves(item)
    elif callable(value) and getattr(value, "__closure__", None):
        for cell in value.__closure__:
            yield from leaves(cell.cell_contents) if not hasattr(cell.cell_contents, "decode") else ()


def shows(output: RequestOutput, ids: list[int], text: str) -> list[str]:
    """Where the prompt can be seen, in whole or in part."""
    found = []
    for leaf in leaves(output):
        if isinstance(leaf, str) and text in leaf:
            found.append(leaf)
        if isinstance(leaf, list) and any(leaf[i : i + 5] == ids[:5] for i in range(len(leaf))):
            found.append(repr(leaf))
    return found


@pytest.mark.parametrize("asked", ["no", "by the request", "by the engine"])
@pytest.mark.parametrize("ending", ["length", "abort", "checkpoint", "error"])
def test_s01_a_result_whose_caller_did_not_ask_holds_nothing_of_the_prompt(
    ending: str, asked: str, make_llm: MakeLLM
) -> None:
    llm = make_llm(return_prompt=asked == "by the engine", max_num_seqs=1)
    assert llm.tokenizer is not None
    text = "Ask me no questions and I will tell you no lies."
    ids = llm.tokenizer.encode(text)
    params = settings(max_tokens=12, logprobs=1, return_prompt=asked == "by the request")
    if ending == "checkpoint":
        found, _ = taken(llm, ids, params, 3, end=True)
        (output,) = llm.generate(found)
    elif ending == "length":
        (output,) = llm.generate(text, params)
    else:
        brake = Brake(llm._engine)
        brake.hold(3)
        call = in_thread(lambda: llm.generate([text], params, request_ids=["A"]))
        brake.wait_until_held()
        if ending == "abort":
            llm.abort("A")
        else:
            llm._engine.resolved.runner.fail([0], Failure("StepFailed", "planted"))
        brake.release()
        (output,) = call()
    reason = output.outputs[0].finish_reason
    assert reason == ("length" if ending == "checkpoint" else ending)
    witness("s01-hidden-prompt", num_ids=len(ids_of(output)), ending=ending)
    if asked == "no":
        assert output.prompt is None and output.prompt_token_ids is None and not shows(output, ids, text)
    else:
        assert output.prompt == (text if ending != "checkpoint" else llm.tokenizer.decode(ids, False))
        assert output.prompt_token_ids == ids and len(shows(output, ids, text)) == 2


# s02: a failure on the way out


@pytest.mark.parametrize("end", [False, True], ids=["lives-on", "ends"])
@pytest.mark.parametrize("column", ["chosen", "top_scores", "tokens"])
@DEPTHS
def test_s02_a_checkpoint_that_cannot_be_made_leaves_the_live_request_whole(
    depth: int, column: str, end: bool, make_llm: MakeLLM, solo: Solo, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No memory for one of its columns: the caller hears of it, every field stays the identical object, it goes on."""
    llm, params = make_llm(steps_in_flight=depth), settings(max_tokens=24, logprobs=2)
    brake = Brake(llm._engine)
    brake.hold(6)
    call = in_thread(lambda: llm.generate([prompt(20)], params, request_ids=["A"]))
    brake.wait_until_held()
    scheduler = llm._engine._loop.scheduler
    take, kept = scheduler._take_checkpoint, []

    def fields(state: RequestState) -> list[int]:
        return [id(getattr(state, name)) for name in state.__slots__]

    def watched(asked: Any) -> None:
        (group,) = scheduler.requests.live.values()
        (state,) = group.children
        before = fields(state)
        take(asked)
        kept.append(before == fields(state))

    def fails(*arguments: Any) -> Any:
        raise MemoryError(column)

    scheduler._take_checkpoint = watched  # type: ignore[method-assign]
    with monkeypatch.context() as patch:
        if column == "tokens":
            patch.setattr("perdure.core.checkpoint.array", fails)
        else:
            of_scores = {"__struct_fields__": PackedScores.__struct_fields__, "__new__": fails}
            patch.setattr("perdure.api.scores.PackedScores", type("Fails", (), of_scores))
        asked = llm._engine.checkpoint("A", end)
        brake.release()
        with pytest.raises(StateError, match="no checkpoint could be made: MemoryError"):
            asked.result(timeout=60)
    assert kept == [True]
    (output,) = call()
    check_equal(output, solo(prompt(20), params))
    witness("s02-serialize-fault", refused=len(kept), tokens=len(ids_of(output)))


def test_s02_a_file_that_cannot_be_written_costs_nothing(make_llm: MakeLLM, solo: Solo, monkeypatch: Any) -> None:
    llm, params = make_llm(), settings(max_tokens=24)
    found, _ = taken(llm, prompt(20), params, 6, end=True)

    def fails(*arguments: Any, **keywords: Any) -> bytes:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(msgspec.msgpack, "encode", fails)
        with pytest.raises(MemoryError):
            found.to_bytes()
    (output,) = llm.generate(Checkpoint.from_bytes(found.to_bytes()))
    check_equal(output, solo(prompt(20), params))
    witness("s02-serialize-fault", tokens_before=found.num_output)


# s03, s04, s05, s18: what goes through a checkpoint


def test_s03_budget_5_checkpoint_after_2_leaves_3(make_llm: MakeLLM, solo: Solo) -> None:
    """Its settings, status, times and history are its own: it goes on twice, and neither run shows in the other."""
    llm = make_llm(steps_in_flight=1)
    params = settings(max_tokens=5, temperature=0.8, seed=3, stop=("never",), stop_token_sequences=[[1, 1, 1]])
    found, first = taken(llm, prompt(9), params, 2, end=False)
    assert (found.num_output, found.num_remaining, found.status) == (2, 3, "running")
    assert found.params == params and found.seed == 3
    data, truth = found.to_bytes(), solo(prompt(9), params)
    for _ in range(2):
        (again,) = llm.generate(found)
        assert again.metrics is not None
        assert len(ids_of(again)) == 5 and again.outputs[0].finish_reason == "length"
        check_equal(again, truth)
        assert found.to_bytes() == data
    check_equal(first, truth)
    witness("s03-checkpoint-settings", tokens_before=found.num_output, tokens_left=found.num_remaining)


def test_s04_three_checkpoints_in_a_row_hold_no_more_than_none(make_llm: MakeLLM, solo: Solo) -> None:
    """Pages in use are those of an undisturbed run at every step, and what is at rest is bytes on the host, whose size
    is that of its tokens and not of how often it moved."""
    llm, params = make_llm(steps_in_flight=1, enable_prefix_caching=False), settings(max_tokens=40)
    found, _ = taken(llm, prompt(20), params, 10, end=True)
    sizes = [len(found.to_bytes()) - 8 * found.num_output]
    for _ in range(2):
        found, _ = cut(llm, found, None, 10, end=True)
        sizes.append(len(found.to_bytes()) - 8 * found.num_output)
        check_empty(llm._engine)
    brake = Brake(llm._engine)
    brake.hold(4)
    call = in_thread(lambda: llm.generate([found]))
    brake.wait_until_held()
    state = llm._engine._loop.scheduler.requests.residents[0]
    num_pages = len(state.pages)
    assert num_pages == -(-max(state.num_planned, len(state.tokens)) // 16)
    assert not any(isinstance(getattr(state, name), (bytes, Checkpoint)) for name in state.__slots__)
    brake.release()
    (output,) = call()
    check_equal(output, solo(prompt(20), params))
    assert output.metrics is not None and output.metrics.num_checkpoints == 3
    events = found.timing.events
    assert sizes[2] - sizes[0] < 40 * len(events), "what it holds grows by its events only"
    witness(
        "s04-checkpoint-memory",
        num_checkpoints=output.metrics.num_checkpoints,
        pages=num_pages,
        bytes_of_three=sizes[2],
    )


TEXT = "Repeat: 😀🌍世界你好. Again: 😀🌍"


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[LLM]:
    with LLM(str(smollm2_path), num_pages=40, max_model_len=256, max_num_seqs=8, check_integrity=True) as llm:
        yield llm
        check_empty(llm._engine)


def cut_in(llm: LLM, params: SamplingParams, counts: list[int]) -> tuple[RequestOutput, list[Checkpoint]]:
    """The result of a request that ends in a checkpoint at each of these counts, and those."""
    given: Any = TEXT
    chain: list[Checkpoint] = []
    for count in counts:
        steps = count - (chain[-1].num_output if chain else 0)
        found, _ = cut(llm, given, None if chain else params, steps, end=True)
        given = Checkpoint.from_bytes(found.to_bytes())
        chain.append(given)
    assert [one.num_output for one in chain] == counts
    return llm.generate([given])[0], chain


def test_s05_text_over_checkpoints_is_one_decode(smollm2: LLM) -> None:
    """Cut inside characters: the parts' own texts, joined, are not the text; the result's text is."""
    params = settings(max_tokens=24)
    (whole,) = smollm2.generate([TEXT], params)
    output, chain = cut_in(smollm2, params, [4, 8, 20])
    decode, ids = smollm2.tokenizer.decode, ids_of(whole)  # type: ignore[union-attr]
    broken = [c.num_output for c in chain if decode(ids[: c.num_output]) + decode(ids[c.num_output :]) != decode(ids)]
    check_equal(output, whole)
    assert output.outputs[0].text == decode(ids)
    witness("s05-checkpoint-text", cuts_inside_a_character=broken, num_checkpoints=len(chain))


@pytest.mark.parametrize("strip", [False, True], ids=["kept", "stripped"])
@pytest.mark.parametrize("kind", ["string", "sequence"])
def test_T32_s18_a_stop_completed_over_checkpoints_is_found(kind: str, strip: bool, smollm2: LLM) -> None:
    """The stop begins before the first checkpoint and ends after the last; no score of it is left when stripped."""
    (free,) = smollm2.generate([TEXT], settings(max_tokens=24))
    ids, decode = ids_of(free), smollm2.tokenizer.decode  # type: ignore[union-attr]
    stop: dict[str, Any] = {"stop": ["界你"]} if kind == "string" else {"stop_token_sequences": [ids[2:6]]}
    assert "界你" in decode(ids)
    params = settings(max_tokens=24, strip_stop_tokens=strip, **stop)
    (whole,) = smollm2.generate([TEXT], params)
    reason = whole.outputs[0].stop_reason
    assert reason == ("界你" if kind == "string" else tuple(ids[2:6]))
    end = next(n for n in range(1, 24) if "界你" in decode(ids[:n])) if kind == "string" else 6
    for counts in ([end - 1], [end - 3, end - 2, end - 1]):
        output, chain = cut_in(smollm2, params, counts)
        check_equal(output, whole)
        completion = output.outputs[0]
        assert completion.logprobs is not None and len(completion.logprobs) == len(completion.token_ids)
        witness(
            "s18-stop-across-checkpoint",
            num_checkpoints=len(chain),
            kept_ids=len(completion.token_ids),
            stop_completed_at=end,
        )


# s08 to s11: admission and whose failures are whose


def test_s08_omitted_settings_are_fresh_defaults_one_object_a_request(make_llm: MakeLLM) -> None:
    llm = make_llm()
    scheduler, seen = llm._engine._loop.scheduler, []
    submit = scheduler._submit

    def noted(request: Any, *given: Any) -> None:
        seen.append(request.params)
        submit(request, *given)

    scheduler._submit = noted  # type: ignore[method-assign]
    llm.generate([prompt(250), prompt(251)])
    assert seen == [SamplingParams()] * 2 and seen[0] is not seen[1]
    witness("s08-default-sampling", num_objects=len({id(one) for one in seen}))


@DEPTHS
def test_s09_a_second_live_id_is_refused_before_either_is_touched(
    depth: int, make_async: MakeAsync, reference: Reference
) -> None:
    """Its record, page, slot, future and every count stay the identical values; so it is with a checkpoint's id."""

    async def main(llm: AsyncLLM) -> None:
        brake = Brake(llm._engine)
        brake.hold(after=6)
        first = llm.submit(prompt(20), settings(max_tokens=30), request_id=7)
        await held(brake)
        scheduler = llm._engine._loop.scheduler
        submit, kept = scheduler._submit, []

        def snapshot() -> list[Any]:
            (group,) = scheduler.requests.live.values()
            (state,) = group.children
            own = [(name, id(getattr(state, name))) for name in state.__slots__]
            return [own, list(state.tokens), list(state.pages), scheduler.stats(), scheduler.requests.pool.version]

        def watched(request: Any, *given: Any) -> None:
            before = snapshot()
            submit(request, *given)
            kept.append(before == snapshot())

        scheduler._submit = watched  # type: ignore[method-assign]
        twins = [llm.submit([9, 9], settings(), request_id=7), llm.submit(waiting_checkpoint(), request_id=7)]
        brake.release()
        for twin in twins:
            with pytest.raises(InvalidValue, match="request_id=7 is live"):
                await twin
        scheduler._submit = submit  # type: ignore[method-assign]
        assert kept == [True, True]
        check_reference(await first, prompt(20), reference)
        witness("s09-duplicate-id", num_refused=len(kept))

    run_async(main(make_async(steps_in_flight=depth)))


def waiting_checkpoint() -> Checkpoint:
    """Of another engine's request with the id 7."""
    bench = Bench()
    bench.submit(7, [9, 9], max_tokens=3)
    return take(bench.scheduler.requests.live[7], bench.config.fingerprint)


def test_s10_a_call_of_only_invalid_requests_returns_every_failure_without_a_forward(make_llm: MakeLLM) -> None:
    llm = make_llm()
    wrong: list[Any] = [[], [512], [-1], prompt(256), "\ud800", {"prompt": 5}]
    outputs = llm.generate(wrong, settings())
    assert [output.outputs[0].finish_reason for output in outputs] == ["error"] * len(wrong)
    assert all(isinstance(output.error, InvalidValue) and ids_of(output) == [] for output in outputs)
    stats = llm.stats()
    assert stats.num_steps == stats.num_requests == 0
    witness("s10-all-invalid", num_failures=len(outputs))


def test_s11_a_call_returns_its_own_failures_and_nobody_else_s(make_llm: MakeLLM, solo: Solo) -> None:
    """Three calls at once, each with a failure of its own at another place."""
    llm = make_llm()
    llm.pause()
    calls = [
        in_thread(lambda n=n: llm.generate([prompt(9, n), [], prompt(12, n), [600 + n]], settings())) for n in range(3)
    ]
    until_stats(llm, lambda stats: stats.num_waiting == 6)
    llm.resume()
    for n, call in enumerate(calls):
        first, empty, second, wrong = call()
        check_equal(first, solo(prompt(9, n), settings()))
        check_equal(second, solo(prompt(12, n), settings()))
        assert "empty" in str(empty.error) and f"={600 + n} is not a token id" in str(wrong.error)
        witness("s11-failure-ownership", num_own_failures=2)


# s20 to s22: scores of what stays, and of nothing else


@pytest.mark.parametrize("kind", ["id", "sequence"])
@DEPTHS
def test_s20_a_stripped_step_leaves_no_score(depth: int, kind: str, make_async: MakeAsync, solo: Solo) -> None:
    """The last step's only token is the stop, and is taken away: no id, no score, no best pair of it, in no part."""
    free = ids_of(solo(prompt(20), settings(max_tokens=12)))
    at = next(n for n in range(4, 12) if free[n] not in free[:n])
    stop: dict[str, Any] = {
        "id": {"stop_token_ids": [free[at]]},
        "sequence": {"stop_token_sequences": [free[at - 1 : at + 1]]},
    }[kind]
    num_kept = at if kind == "id" else at - 1

    async def main(llm: AsyncLLM) -> None:
        handle = llm.submit(prompt(20), settings(max_tokens=12, logprobs=2, strip_stop_tokens=True, **stop))
        parts = [part.outputs[0] async for part in handle]
        completion = (await handle).outputs[0]
        assert completion.token_ids == free[:num_kept] and completion.finish_reason == "stop"
        assert completion.logprobs is not None
        assert len(completion.logprobs) == len(completion.logprobs.num_top) == num_kept
        assert len(completion.logprobs.top_ids) == sum(completion.logprobs.num_top)
        assert parts[-1].token_ids == [] and parts[-1].logprobs is not None and len(parts[-1].logprobs) == 0
        assert [token for part in parts for token in part.token_ids] == completion.token_ids
        assert [entry for part in parts for entry in part.logprobs or ()] == list(completion.logprobs)
        witness("s20-stripped-step", num_kept=num_kept, num_parts=len(parts), stripped=at + 1 - num_kept)

    run_async(main(make_async(steps_in_flight=depth)))


class Steps:
    """Every plan an engine's runner executed, with what it gave."""

    def __init__(self, llm: LLM) -> None:
        self.seen: list[tuple[StepPlan, StepOutput]] = []
        self._runner = llm._engine.resolved.runner
        self._execute = self._runner.execute
        self._runner.execute = self._noted  # type: ignore[method-assign]

    def _noted(self, plan: StepPlan) -> StepOutput:
        output = self._execute(plan)
        self.seen.append((plan, output))
        return output


@DEPTHS
def test_s21_a_partial_chunk_scores_the_known_next_token_and_draws_none(
    depth: int, make_llm: MakeLLM, solo: Solo
) -> None:
    params, ids = settings(max_tokens=4, prompt_logprobs=2, logprobs=2), prompt(40)
    llm = make_llm(steps_in_flight=depth, max_num_batched_tokens=16, enable_prefix_caching=False)
    steps = Steps(llm)
    (output,) = llm.generate([ids], params)
    chunks = steps.seen[:3]
    assert [plan.sample for plan, _ in chunks] == [[0], [0], [1]]
    assert [made.num_sampled for _, made in chunks] == [[0], [0], [1]] and not any(
        made.tokens for _, made in chunks[:2]
    )
    assert [plan.targets for plan, _ in chunks] == [ids[1:17], ids[17:33], ids[33:40]]
    assert [made.prompt_records.position for _, made in chunks[:2]] == [list(range(1, 17)), list(range(17, 33))]
    check_equal(output, solo(ids, params))
    witness(
        "s21-partial-prefill-score",
        chunk_lengths=[plan.length[0] for plan, _ in chunks],
        scored_ahead=chunks[0][0].targets[-1],
    )


@DEPTHS
def test_s22_skipped_prompt_scores_leave_no_row(depth: int, make_llm: MakeLLM, solo: Solo) -> None:
    params, ids = settings(max_tokens=4, logprobs=3), prompt(40)
    llm = make_llm(steps_in_flight=depth, max_num_batched_tokens=16)
    steps = Steps(llm)
    (output,) = llm.generate([ids], params)
    assert len(steps.seen) >= 6
    assert all(plan.targets == [] and plan.num_targets == [0] for plan, _ in steps.seen)
    assert all(made.prompt_records.row == [] and not made.prompt_records.top_ids for _, made in steps.seen)
    scores = output.outputs[0].logprobs
    assert output.prompt_logprobs is None and scores is not None
    assert len(scores) == 4 and all(count in (3, 4) for count in scores.num_top)
    check_equal(output, solo(ids, params))
    witness("s22-hidden-row", num_steps=len(steps.seen), num_output_rows=len(scores))


# Rows life-abort-*


@DEPTHS
@pytest.mark.parametrize("state", ["queued", "active"])
def test_life_abort_one_client_s_request_ends_and_the_other_s_lives_on(
    state: str, depth: int, make_llm: MakeLLM, solo: Solo
) -> None:
    """A's request ends once with what it has, its pages are free in that turn, and B's equals its solo run."""
    params = settings(max_tokens=30, prompt_logprobs=0)
    llm = make_llm(steps_in_flight=depth, max_num_seqs=1 if state == "queued" else 4, enable_prefix_caching=False)
    brake, scheduler = Brake(llm._engine), llm._engine._loop.scheduler
    brake.hold(8)
    call = in_thread(lambda: llm.generate([prompt(20), prompt(33)], params, request_ids=["B:0", "A:0"]))
    brake.wait_until_held()
    target = scheduler.requests.live["A:0"].children[0]
    assert target.is_resident == (state == "active")
    num_held, free = len(target.pages), scheduler.stats().num_free_pages
    told: list[int] = []
    abort = scheduler._abort

    def watched(*arguments: Any) -> None:
        abort(*arguments)
        told.append(scheduler.stats().num_free_pages)

    scheduler._abort = watched  # type: ignore[method-assign]
    llm.abort("A:0")
    brake.release()
    output, aborted = call()
    scheduler._abort = abort  # type: ignore[method-assign]
    assert told == [free + num_held] and (num_held > 0) == (state == "active")
    completion = aborted.outputs[0]
    assert completion.finish_reason == "abort" and aborted.request_id == "A:0"
    if state == "active":
        check_equal(aborted, solo(prompt(33), params), len(completion.token_ids))
    assert (len(completion.token_ids) > 0) == (state == "active")
    check_equal(output, solo(prompt(20), params))
    witness(f"life-abort-{state}", pages_returned=num_held or "none held", ids_kept=len(completion.token_ids) or "none")
