"""Real models through the whole engine, against what others computed: SmolLM2's recorded runs and stories260K."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perdure import LLM
from perdure.api.output import RequestOutput
from tests.engine.conftest import DEVICES, MakeLLM
from tests.engine.helpers import check_empty, replays_on, settings
from tests.engine.reference import CLEAR_LEAD
from tests.models.helpers import convert_stories260k, gguf_to_bf16_directory
from tests.witness import witness

RECORDS = Path(__file__).parents[1] / "data"
GOLDEN: list[dict[str, Any]] = json.loads((RECORDS / "smollm2_golden.json").read_text())["gguf_fp32"]
CPU16: dict[str, Any] = json.loads((RECORDS / "cpu16.json").read_text())
GOLDEN_TOLERANCE = 1e-3
ON_BOTH = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
CONFIG: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "num_pages": 350, "max_num_seqs": 16}


# The GGUF in fp32


def engine_on(device: str, model: Path) -> LLM:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    return LLM(str(model), device=device, **CONFIG)


@pytest.fixture(scope="module", params=ON_BOTH)
def smollm2(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[LLM]:
    with engine_on(request.param, smollm2_path) as llm:
        yield llm
        check_empty(llm._engine)


def test_smollm2_gives_what_was_recorded(smollm2: LLM) -> None:
    """All 32 ids of each prompt, their scores and five best, and the prompt's scores; text and chat prompts as ids."""
    params = settings(max_tokens=32, logprobs=5, prompt_logprobs=0)
    for output, case in zip(smollm2.generate([case["prompt_ids"] for case in GOLDEN], params), GOLDEN):
        completion, prompt_scores = output.outputs[0], output.prompt_logprobs
        assert min(case["top1_top2_gap"]) > CLEAR_LEAD
        assert completion.token_ids == case["generated_ids"]
        assert completion.finish_reason == "length"
        assert completion.selected_logprobs == pytest.approx(case["logprobs"], abs=GOLDEN_TOLERANCE)
        assert prompt_scores is not None and prompt_scores[0] is None is case["prompt_logprobs"][0]
        assert list(prompt_scores.chosen) == pytest.approx(case["prompt_logprobs"][1:], abs=GOLDEN_TOLERANCE)
        assert completion.logprobs is not None
        for entry, recorded in zip(completion.logprobs, case["top5"]):
            assert entry is not None
            assert {id_: one.logprob for id_, one in entry.items()} == pytest.approx(
                dict(recorded), abs=GOLDEN_TOLERANCE
            )


def test_smollm2_gives_the_recorded_text(smollm2: LLM) -> None:
    """From text and from messages; it ends at the model's own end id."""
    texts = [case for case in GOLDEN if case["messages"] is None]
    chats = [case for case in GOLDEN if case["messages"] is not None]
    assert texts and chats
    params = settings(max_tokens=32, ignore_eos=False)
    outputs = smollm2.generate([case["prompt"] for case in texts], params)
    outputs += smollm2.chat([case["messages"] for case in chats], params)
    for output, case in zip(outputs, [*texts, *chats]):
        completion, end = output.outputs[0], case["first_eos_index"]
        assert completion.text == case["text"]
        assert completion.token_ids == (case["generated_ids"] if end is None else case["generated_ids"][: end + 1])
        assert completion.finish_reason == ("length" if end is None else "stop") and completion.stop_reason is None


# The same weights rounded to bf16, run in fp32


@pytest.fixture(scope="module", params=ON_BOTH)
def rounded(
    request: pytest.FixtureRequest, smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LLM]:
    directory = gguf_to_bf16_directory(smollm2_path, tmp_path_factory.mktemp("rounded") / "model")
    with engine_on(request.param, directory) as llm:
        yield llm
        check_empty(llm._engine)


def check_cpu16(outputs: list[RequestOutput], generated_ids: list[list[int]]) -> float:
    """All ids are the recorded ones; returns the least lead of a best logit over the second."""
    assert [output.outputs[0].token_ids for output in outputs] == generated_ids
    rows = [output.outputs[0].logprobs for output in outputs]
    leads = [row.top_scores[i] - row.top_scores[i + 1] for row in rows if row for i in range(0, len(row.top_scores), 2)]
    assert len(leads) == sum(len(ids) for ids in generated_ids)
    return min(leads)


def test_cpu16_all_at_once(rounded: LLM) -> None:
    """16 prompts of Python's manual, 1,024 ids on which six engines agree."""
    outputs = rounded.generate(CPU16["prompt_ids"], settings(max_tokens=64, logprobs=2))
    lead = check_cpu16(outputs, CPU16["generated_ids"])
    device = rounded._engine.resolved.config.device
    witness("cpu16", num_ids=1024, least_lead=lead, device=device, **replays_on(device, rounded))


def test_cpu16_one_by_one(rounded: LLM) -> None:
    """The same ids when each prompt is alone in the engine, and its pages come from the prefix cache."""
    rounded.generate(CPU16["prompt_ids"], settings(max_tokens=1))
    num_cached = 0
    for ids, generated in zip(CPU16["prompt_ids"], CPU16["generated_ids"]):
        outputs = rounded.generate([ids], settings(max_tokens=64, logprobs=2))
        check_cpu16(outputs, [generated])
        num_cached += outputs[0].num_cached_tokens
    witness("cpu16", num_cached_tokens=num_cached)


# stories260K


@DEVICES
def test_stories260k_tells_of_lily(data_dir: Path, tmp_path: Path, make_llm: MakeLLM) -> None:
    """Greedy from BOS, as text, through `LLM.generate`."""
    stories = data_dir / "stories260K"
    directory = convert_stories260k(stories / "stories260K.bin", stories / "tok512.bin", tmp_path / "model")
    (output,) = make_llm(directory).generate("", settings(max_tokens=200))
    text = output.outputs[0].text
    assert text.startswith("Once upon a time, there was a little girl named Lily.") and "red ball" in text
