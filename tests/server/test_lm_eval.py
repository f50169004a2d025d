"""lm-evaluation-harness through `local-completions`, unchanged, against what it gives with transformers itself; and its
requests in the shape in which it sends them, where it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.server.conftest import Running
from tests.witness import witness

DOCS = [
    {"query": "A bird has two", "choices": [" wings.", " wheels.", " doors and a roof."], "gold": 0},
    {"query": "The sea is full of", "choices": [" sand", " water", " w"], "gold": 1},
    {"query": "def add(a, b):\n    return", "choices": [" a + b", " a - b"], "gold": 0},
    {"query": "Straße und Schnee \u2744:", "choices": [" weiß", " 白い", " blanc"], "gold": 0},
]
TASK = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{validation: {file}}}}}
output_type: multiple_choice
validation_split: validation
doc_to_text: query
doc_to_choice: choices
doc_to_target: gold
target_delimiter: ""
metric_list:
  - metric: acc
  - metric: acc_norm
"""


@pytest.fixture(scope="module")
def reference(tiny: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.float32)


def scores_by_transformers(reference: Any, ids: list[int]) -> list[tuple[float, bool]]:
    """Of each id but the first: its log-probability, and whether it is the likeliest."""
    with torch.no_grad():
        scores = reference(torch.tensor([ids])).logits[0].log_softmax(-1)
    found = [(float(row[token]), int(row.argmax()) == token) for row, token in zip(scores, ids[1:])]
    return found


@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_its_request_of_scores_gives_those_of_transformers(server: Running, reference: Any, as_text: bool) -> None:
    """The context and its continuation as one prompt that comes back with its scores, and one token that is dropped."""
    prompts: list[list[int]] = []
    lengths = []
    for doc in DOCS[:3]:
        for choice in doc["choices"]:  # type: ignore[attr-defined]
            context, whole = (
                server.told("/tokenize", prompt=text)["tokens"] for text in (doc["query"], f"{doc['query']}{choice}")
            )
            prompts.append(whole)
            lengths.append(len(context))
    texts = [server.told("/detokenize", tokens=ids[1:])["prompt"] for ids in prompts]
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True}
    choices = server.told("/v1/completions", model="tiny", prompt=texts if as_text else prompts, **asked)["choices"]
    num_scored = 0
    for ids, length, choice in zip(prompts, lengths, choices, strict=True):
        scores = choice["logprobs"]
        assert len(scores["tokens"]) == len(ids) + 1 and scores["token_logprobs"][0] is None
        expected = scores_by_transformers(reference, ids)[length - 1 :]
        for logprob, top, (score, is_greedy) in zip(
            scores["token_logprobs"][length:-1], scores["top_logprobs"][length:-1], expected, strict=True
        ):
            assert abs(logprob - score) < 1e-4
            assert (logprob == max(top.values())) == is_greedy
            num_scored += 1
    witness("lm-eval", scored=num_scored)


def test_what_it_asks_of_a_tokenizer(server: Running, tiny: Path) -> None:
    """With these two it needs no files of the model."""
    info = server.http.get("/tokenizer_info").json()
    assert (info["bos_token"], info["eos_token"], info["model_max_length"]) == ("<s>", "</s>", 1024)
    assert server.told("/tokenize", prompt=info["eos_token"], add_special_tokens=False)["tokens"] == [257]


@pytest.mark.parametrize("tokenizer", ["huggingface", "remote"])
def test_a_task_gives_the_scores_that_transformers_gives(
    server: Running, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokenizer: str
) -> None:
    lm_eval = pytest.importorskip("lm_eval", reason="not installed: pip install 'perdure[eval]'")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in DOCS))
    (tmp_path / "local_choices.yaml").write_text(TASK.format(file=tmp_path / "docs.jsonl"))
    tasks = TaskManager(include_path=str(tmp_path), include_defaults=False)

    def evaluated(kind: str, **given: Any) -> dict[str, Any]:
        found: dict[str, Any] = lm_eval.simple_evaluate(
            kind, model_args=given, tasks=["local_choices"], task_manager=tasks, log_samples=True, bootstrap_iters=0
        )
        return found

    ours = evaluated(
        "local-completions",
        model="tiny",
        base_url=f"{server.url}/v1/completions",
        tokenizer_backend=tokenizer,
        num_concurrent=2,
        max_length=1024,
        **({"tokenizer": str(tiny)} if tokenizer == "huggingface" else {}),
    )
    theirs = evaluated("hf", pretrained=str(tiny), dtype="float32", device="cpu", batch_size=1, add_bos_token=False)
    num_scored = 0
    for mine, other in zip(ours["samples"]["local_choices"], theirs["samples"]["local_choices"], strict=True):
        for (score, is_greedy), (expected, expected_greedy) in zip(
            mine["filtered_resps"], other["filtered_resps"], strict=True
        ):
            assert abs(score - expected) < 1e-3 and is_greedy == expected_greedy
            num_scored += 1
    for name in ("acc,none", "acc_norm,none"):
        assert ours["results"]["local_choices"][name] == theirs["results"]["local_choices"][name]
    witness(f"lm-eval-{tokenizer}", scored=num_scored)
