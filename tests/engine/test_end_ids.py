"""End ids a directory names, in config.json or generation_config.json, end a request without being asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perdure import SamplingParams
from tests.engine.conftest import MakeLLM

PROMPT = [1, 2, 3]


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_directorys_end_ids_end_a_request(
    tiny: Path, tmp_path: Path, make_llm: MakeLLM, file: str, as_list: bool
) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=20)
    [free] = make_llm().generate([PROMPT], greedy)
    ids = free.outputs[0].token_ids
    assert free.outputs[0].finish_reason == "length"
    at = next(i for i in range(4, 20) if ids[i] not in ids[:i])
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    settings = json.loads((tmp_path / file).read_text())
    end = [settings["eos_token_id"], ids[at]] if as_list else ids[at]
    (tmp_path / file).write_text(json.dumps(settings | {"eos_token_id": end}))

    llm = make_llm(tmp_path)
    [ended] = llm.generate([PROMPT], greedy)
    sample = ended.outputs[0]
    assert (sample.token_ids, sample.finish_reason, sample.stop_reason) == (ids[: at + 1], "stop", None)
    [ignored] = llm.generate([PROMPT], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    assert ignored.outputs[0].token_ids == ids
