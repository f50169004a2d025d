"""Rows sample-torch-*, optin-* and bos-stop-* of the matrix, driven directly; T31, T33, T44, halves of T46 and T47."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from perdure import InvalidValue, SamplingParams
from perdure.api.plan import StepPlan
from perdure.core.admission import derived_seed
from perdure.models.tiny import BOS_ID
from perdure.ops import sampling_reference as oracle
from perdure.ops.philox import uniforms
from tests.engine.conftest import MakeAsync, MakeLLM, Solo
from tests.engine.helpers import (
    V,
    check_equal,
    check_scores_equal,
    check_stopped_late,
    constant_model,
    flatter_model,
    prompt,
    run_async,
    settings,
    stopping_late,
    whole_rows,
)
from tests.engine.reference import Reference
from tests.engine.test_scores import EPS, Watched, log_softmax
from tests.witness import witness

# sample-torch: base seed 7, this engine has index 1

FILTERS = {"top-k": {"top_k": 4}, "top-p": {"top_p": 0.7}, "joint": {"top_k": 4, "top_p": 0.7}}
SAMPLE = [
    f"sample-torch-{name}-{policy}-{mode}"
    for name in FILTERS
    for policy in ("shared", "per_replica")
    for mode in ("raw", "processed")
]


@pytest.fixture(scope="module")
def flatter(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return flatter_model(tiny, tmp_path_factory.mktemp("flatter") / "model")


@pytest.mark.parametrize("row", SAMPLE)
def test_sample_torch(row: str, make_llm: MakeLLM, flatter: Path) -> None:
    """One token at temperature 0.7: the draw is keyed by the seed that the policy gives, from the kept ids of the first
    step's logits, and its score is the mode's within 8 eps."""
    name, policy, mode = row.removeprefix("sample-torch-").rsplit("-", 2)
    llm = make_llm(flatter, seed=7, seed_policy=policy, replica=1)
    watched = Watched(llm)
    asked: dict[str, Any] = {"temperature": 0.7, **FILTERS[name]}
    params = SamplingParams(max_tokens=1, logprobs=0, logprobs_mode=mode, **asked)
    (output,) = llm.generate([prompt(20)], params)
    (logits,) = (step[0] for step in watched.logits_seen)
    kept = oracle.kept_ids(logits, **asked)
    seed = derived_seed(7, 1 if policy == "per_replica" else 0, 0)
    u = float(uniforms(np.array([seed], np.uint64), np.array([0]))[0])
    mass = np.exp((logits[kept].astype(np.float64) - logits.max()) / 0.7)
    token = kept[int(np.searchsorted(np.cumsum(mass) / mass.sum(), u, side="right"))]
    assert output.outputs[0].token_ids == [token]
    scores = {
        "raw": log_softmax(logits.astype(np.float64))[token],
        "processed": oracle.processed(logits, **asked)[token],
    }
    assert output.outputs[0].selected_logprobs is not None
    found = output.outputs[0].selected_logprobs[0]
    assert abs(found - scores[mode]) <= 8 * EPS * max(1.0, float(np.abs(logits).max()) / 0.7)
    assert scores["raw"] != scores["processed"]
    assert len(kept) > 1
    witness(row, seed=seed, num_kept=len(kept), token=token)


def test_T47_policies_of_seeds(make_llm: MakeLLM, flatter: Path) -> None:
    """Two engines as replicas 0 and 1: shared seeds give equal tokens for the same prompt, per replica they differ, and
    that is the default; replica 0 draws the same under both."""
    params = settings(temperature=1.0, max_tokens=16)
    drawn: dict[tuple[str | None, int], list[int]] = {}
    for policy in ("shared", "per_replica", None):
        for replica in (0, 1):
            given = {} if policy is None else {"seed_policy": policy}
            (output,) = make_llm(flatter, replica=replica, **given).generate([prompt(9)], params)
            drawn[policy, replica] = output.outputs[0].token_ids
    assert drawn["shared", 0] == drawn["shared", 1] == drawn["per_replica", 0] == drawn[None, 0]
    assert drawn["per_replica", 1] == drawn[None, 1] != drawn["shared", 1]
    assert drawn["per_replica", 1][0] != drawn["shared", 1][0]


def test_T46_requests_with_one_seed_are_equal(make_llm: MakeLLM) -> None:
    outputs = make_llm().generate([prompt(9)] * 4, settings(temperature=1.0, seed=42))
    for output in outputs[1:]:
        check_equal(output, outputs[0])


# optin


@pytest.fixture
def ending(tiny: Path, reference: Reference, tmp_path: Path) -> Path:
    """M whose end id is the first token of the reference."""
    directory = tmp_path / "ending"
    shutil.copytree(tiny, directory)
    first = reference(prompt(20), 1).token_ids[0]
    for name in ("config.json", "generation_config.json"):
        values = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**values, "eos_token_id": first}))
    return directory


@pytest.mark.parametrize(
    "row",
    ["optin-echo0-detok0-eos0", "optin-echo1-detok1-eos0", "optin-echo1-detok0-eos0", "optin-echo0-detok0-eos1"],
)
def test_optin(row: str, make_llm: MakeLLM, ending: Path, reference: Reference) -> None:
    """Five ids; prompt and text stand in the result exactly where asked. With the first token as end id: that one."""
    echo, detokenize, eos = (f"{name}1" in row for name in ("echo", "detok", "eos"))
    llm, ids = make_llm(ending) if eos else make_llm(), prompt(20)
    params = SamplingParams(temperature=0.0, max_tokens=5, return_prompt=echo, detokenize=detokenize)
    (output,) = llm.generate([ids], params)
    truth, found = reference(ids, 5).token_ids, output.outputs[0]
    assert found.token_ids == (truth[:1] if eos else truth)
    assert (found.finish_reason, found.stop_reason) == ("stop" if eos else "length", None)
    assert output.prompt_token_ids == (ids if echo else None) and (output.prompt is not None) == echo
    assert bool(found.text) == detokenize
    witness(row, token_ids=found.token_ids)


# bos-stop


@pytest.mark.parametrize("row", [f"bos-stop-keep{keep}-skip{skip}" for keep in (0, 1) for skip in (0, 1)])
def test_bos_stop(row: str, make_llm: MakeLLM, solo: Solo) -> None:
    """BOS before the text. A short drawn request before the greedy target ends first, and another takes its slot while
    the target runs: the target keeps its slot and its top_k=1. Ids, chosen scores and rows are as many, and each chosen
    score is its row's entry."""
    keep, skip = "keep1" in row, "skip1" in row
    llm = make_llm(max_num_seqs=2)
    runner, slots = llm._engine.resolved.runner, dict[int, list[int]]()
    execute = runner.execute

    def watched(plan: StepPlan) -> Any:
        for init in plan.row_inits:
            slots.setdefault(init.slot, []).append(init.request)
            assert (init.top_k == 1) == (init.request == 1)
        return execute(plan)

    runner.execute = watched  # type: ignore[method-assign]
    plain = solo("The target", settings(max_tokens=20)).outputs[0].token_ids
    at, target = stopping_late(plain, keep, skip)
    short = settings(temperature=1.0, max_tokens=3)
    _, output, _ = llm.generate(["A short one", "The target", "The next"], [short, target, short])
    assert sorted(slots.values()) == [[0, 2], [1]], "the ended request's slot went on to another"
    check_stopped_late(output, plain, at, keep, skip)
    check_equal(output, solo("The target", target))
    witness(row, slots=[*slots], num_tokens=len(output.outputs[0].token_ids))


# T31, T33, T37, T44


@pytest.mark.parametrize("stop", ["end id", "second end id", "stop id", "sequence", "string"])
@pytest.mark.parametrize("depth", [1, 2])
def test_T31_min_tokens_against_every_stop(
    stop: str, depth: int, make_llm: MakeLLM, tiny: Path, tmp_path: Path
) -> None:
    """What would come at step 2 does not come before step 6, if it is an id that ends; other stops do not count then.
    After it they end the request as usual."""
    free = make_llm(steps_in_flight=depth).generate([prompt(20)], settings(max_tokens=2))[0].outputs[0].token_ids[1]
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    for name in ("config.json", "generation_config.json"):
        ends = {"end id": free, "second end id": [BOS_ID, free]}.get(stop, BOS_ID)
        values = json.loads((model / name).read_text())
        (model / name).write_text(json.dumps({**values, "eos_token_id": ends}))
    llm = make_llm(model, steps_in_flight=depth)
    assert llm.tokenizer is not None
    text = llm.tokenizer.decode([free], False)
    given: dict[str, Any] = {
        "stop id": {"stop_token_ids": [free]},
        "sequence": {"stop_token_sequences": [[free]]},
        "string": {"stop": [text]},
    }.get(stop, {})
    asked = {"ignore_eos": False, "max_tokens": 40, **given, "logit_bias": {free: 100.0}}
    (early,) = llm.generate([prompt(20)], settings(**asked))
    assert len(early.outputs[0].token_ids) == 1 and early.outputs[0].finish_reason == "stop"
    (output,) = llm.generate([prompt(20)], settings(**asked, min_tokens=6))
    ids = output.outputs[0].token_ids
    assert output.outputs[0].finish_reason == "stop" and len(ids) >= 6
    if stop in ("sequence", "string"):
        assert ids == [free] * 6
    else:
        assert free not in ids[:6] and ids[6:] == [free]
    assert output.outputs[0].stop_reason == {"stop id": free, "sequence": (free,), "string": text}.get(stop)


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("strip", [False, True])
def test_T33_ids_and_scores_of_a_stop(strip: bool, include: bool, make_llm: MakeLLM) -> None:
    """By end id, stop id and string: ids as the rule says, scores as many, text with the stop only if included."""
    llm = make_llm()
    (free,) = llm.generate([prompt(20)], settings(max_tokens=30))
    ids, tokenizer = free.outputs[0].token_ids, llm.tokenizer
    assert tokenizer is not None
    texts = [tokenizer.decode([token], True) for token in ids]
    at = next(
        at for at in range(3, 30) if texts[at].isalnum() and texts[at - 1].isascii() and texts[at] not in texts[:at]
    )
    for asked in ({"stop_token_ids": [ids[at]]}, {"stop": [texts[at]]}):
        more = {"strip_stop_tokens": strip, "include_stop_str_in_output": include, "logprobs": 2}
        (output,) = llm.generate([prompt(20)], settings(max_tokens=30, **asked, **more))
        found = output.outputs[0]
        assert found.token_ids == ids[: at + (not strip)]
        assert found.logprobs is not None and len(found.logprobs) == len(found.token_ids)
        check_scores_equal(
            found.logprobs,
            llm.generate([prompt(20)], settings(max_tokens=30, logprobs=2))[0]
            .outputs[0]
            .logprobs.cut(0, len(found.token_ids)),
        )  # type: ignore[union-attr]
        assert found.text == tokenizer.decode(ids[: at + include], True)
        assert found.stop_reason == (ids[at] if "stop_token_ids" in asked else texts[at])


def test_T37_stop_strings_without_text_are_refused(
    tiny: Path, tmp_path: Path, make_llm: MakeLLM, make_async: MakeAsync, solo: Solo
) -> None:
    """Never ignored: with detokenize=False where the settings are made, without a tokenizer at admission, that request
    alone. Ids and sequences stop without any text."""
    with pytest.raises(InvalidValue, match=r"stop=\['x'\] needs text, but detokenize=False"):
        SamplingParams(stop="x", detokenize=False)
    bare = tmp_path / "bare"
    shutil.copytree(tiny, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    llm = make_llm(bare)
    assert llm.tokenizer is None
    refused, beside = llm.generate([prompt(20)] * 2, [settings(stop=["x"]), settings()])
    assert isinstance(refused.error, InvalidValue) and "stop=['x'] needs text" in str(refused.error)
    check_equal(beside, solo(prompt(20), settings(detokenize=False)))
    assert beside.outputs[0].text == "" and llm.stats().num_requests == 1
    free = beside.outputs[0].token_ids
    at = next(at for at in range(3, 16) if free[at] not in free[:at])
    for detokenize in (True, False):
        for asked in ({"stop_token_ids": [free[at]]}, {"stop_token_sequences": [free[at - 1 : at + 1]]}):
            (stopped,) = llm.generate([prompt(20)], settings(detokenize=detokenize, **asked))
            assert stopped.outputs[0].token_ids == free[: at + 1] and stopped.outputs[0].finish_reason == "stop"

    async def main() -> None:
        with pytest.raises(InvalidValue, match="needs text"):
            await make_async(bare).submit(prompt(20), settings(stop=["x"]))

    run_async(main())
    witness("T37", refused=str(refused.error))


def test_T50_what_filters_keep_beside_each_other(make_llm: MakeLLM, tmp_path: Path) -> None:
    """[.35, .25, .22, .18]: top_k first, then renormalised, then top_p; each row of a mixed batch by its own."""
    logits = [*np.log([0.35, 0.25, 0.22, 0.18]).tolist(), *[-1e4] * (V - 4)]
    asked: list[tuple[dict[str, Any], list[int]]] = [
        ({"top_p": 0.73, "top_k": 3}, [0, 1]),
        ({"top_p": 0.55}, [0, 1]),
        ({"top_p": 1.0, "top_k": 4}, [0, 1, 2, 3]),
        ({"top_p": 1e-9}, [0]),
        ({"min_p": 0.6, "top_p": 0.7}, [0, 1]),
    ]
    llm = make_llm(constant_model(tmp_path / "constant", logits), steps_in_flight=2)
    common = {"temperature": 1.0, "seed": 3, "max_tokens": 60, "logprobs": -1, "logprobs_mode": "processed"}
    outputs = llm.generate([[1]] * len(asked), [settings(**common, **one) for one, _ in asked])
    for output, (_, kept) in zip(outputs, asked):
        rows = whole_rows(output.outputs[0].logprobs)
        assert all(np.flatnonzero(np.isfinite(row)).tolist() == kept for row in rows.numpy())
        assert {*output.outputs[0].token_ids} == {*kept}
    for wrong in (0, 1.5, -0.1, float("nan")):
        with pytest.raises(InvalidValue, match=r"top_p=.* is not (in \(0, 1\]: 1 turns|a finite number)"):
            SamplingParams(top_p=wrong)
    witness("T50", num_rows=len(outputs))


def test_T44_tokens_in_tokens_out(make_llm: MakeLLM, make_async: MakeAsync) -> None:
    """Ids that the tokenizer would not give for their text go in and come out unchanged; a second call begins with the
    first one's prompt and output."""
    llm = make_llm()
    assert llm.tokenizer is not None
    ids = [*llm.tokenizer.encode("th"), *llm.tokenizer.encode("e", add_special_tokens=False)]
    assert ids != llm.tokenizer.encode("the") and llm.tokenizer.decode(ids) == "the"
    asked = settings(return_prompt=True, max_tokens=9)
    (first,) = llm.generate([ids], asked)
    assert first.prompt_token_ids == ids
    again = [*ids, *first.outputs[0].token_ids]
    (second,) = llm.generate([{"prompt_token_ids": again}], asked)
    assert second.prompt_token_ids == again
    (whole,) = llm.generate([ids], settings(max_tokens=18))
    assert first.outputs[0].token_ids + second.outputs[0].token_ids == whole.outputs[0].token_ids
    messages = [{"role": "user", "content": "the"}]
    (chat,) = llm.chat(messages, asked)
    laid_out = llm.tokenizer.apply_chat_template(messages)
    text = laid_out if isinstance(laid_out, str) else llm.tokenizer.decode(laid_out, False)
    assert chat.prompt_token_ids is not None and llm.tokenizer.decode(chat.prompt_token_ids, False) == text

    async def main() -> None:
        found = await make_async().submit(ids, asked)
        assert found.prompt_token_ids == ids
        check_equal(found, first)

    run_async(main())


def test_main_multi_eos(tiny: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
    """Each of a model's whole set of end ids ends a request, at the place where it would have gone on."""
    free = make_llm().generate([prompt(20)], settings(max_tokens=40))[0].outputs[0].token_ids
    ends = [token for at, token in enumerate(free) if token not in free[:at]][3:9]
    for token in ends:
        model = tmp_path / f"ends-{token}"
        shutil.copytree(tiny, model)
        others = [other for other in range(V - 5, V) if other not in free]
        values = json.loads((model / "generation_config.json").read_text())
        (model / "generation_config.json").write_text(json.dumps({**values, "eos_token_id": [*others, token]}))
        (output,) = make_llm(model).generate([prompt(20)], SamplingParams(temperature=0.0, max_tokens=40))
        assert output.outputs[0].token_ids == free[: free.index(token) + 1]
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", None)
    witness("main-multi-eos", ends=ends)
