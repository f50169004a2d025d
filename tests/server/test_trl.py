"""The requests that TRL's client of a vLLM server sends (trl 1.16.0, `trl/generation/vllm_client.py` and the clients of
its asynchronous trainers), in the shape in which they were recorded from it, and what it reads of the answers."""

from __future__ import annotations

from typing import Any

import pytest

from perdure import LLM, SamplingParams
from tests.server.conftest import Running
from tests.witness import witness

SAMPLING: dict[str, Any] = {
    "repetition_penalty": 1.1,
    "temperature": 0.8,
    "top_p": 0.9,
    "top_k": 50,
    "min_p": 0.01,
    "max_tokens": 6,
}
OF_COMPLETIONS = {"model": "tiny", "return_token_ids": True, "return_tokens_as_token_ids": True}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def ids_of(names: list[str]) -> list[int]:
    """As the client reads them."""
    return [int(name.removeprefix("token_id:")) for name in names]


def test_it_finds_the_server_its_model_and_its_settings(server: Running) -> None:
    assert server.http.get("/health").status_code == 200
    [model] = server.http.get("/v1/models").json()["data"]
    assert model["id"] == "tiny" and model["max_model_len"] == 1024
    info = server.http.get("/server_info", params={"config_format": "json"}).json()["vllm_config"]
    assert info["model_config"]["dtype"] == "torch.float32"
    assert info["model_config"]["logprobs_mode"] == "raw_logprobs"
    assert info["weight_transfer_config"] is None  # for which the client has words of its own
    assert server.http.get("/get_world_size").json() == {"world_size": 1}


@pytest.mark.parametrize("prompts", [["abc", "hello"], [[256, 7, 8], [256, 9]]], ids=["texts", "ids"])
@pytest.mark.parametrize("num_scores", [0, 2])
def test_generate(server: Running, direct: LLM, prompts: Any, num_scores: int) -> None:
    """`VLLMClient.generate`: the choices of a prompt follow each other, and each score has its token's id."""
    body = {**OF_COMPLETIONS, "prompt": prompts, "n": 2, **SAMPLING, "logprobs": num_scores, "seed": 5}
    choices = server.told("/v1/completions", **body)["choices"]
    results = direct.generate(prompts, SamplingParams(n=2, **SAMPLING, logprobs=num_scores, seed=5, return_prompt=True))
    assert [choice["prompt_token_ids"] for choice in choices[::2]] == [result.prompt_token_ids for result in results]
    outputs = [output for result in results for output in result.outputs]
    assert [choice["token_ids"] for choice in choices] == [output.token_ids for output in outputs]
    for choice, output in zip(choices, outputs, strict=True):
        scores = choice["logprobs"]
        assert ids_of(scores["tokens"]) == output.token_ids
        assert scores["token_logprobs"] == output.selected_logprobs
        for token, top in zip(scores["tokens"], scores["top_logprobs"], strict=True):
            assert token in top and len(top) in (num_scores, num_scores + 1)


def test_generate_by_a_pattern(server: Running) -> None:
    body = {**OF_COMPLETIONS, "prompt": ["abc"], "n": 1, **SAMPLING, "structured_outputs": {"regex": "(a|b)+c"}}
    [choice] = server.told("/v1/completions", **body, logprobs=0)["choices"]
    assert set(choice["text"]) <= set("abc") and len(choice["token_ids"]) == len(choice["logprobs"]["tokens"])


def test_chat(server: Running) -> None:
    """`VLLMClient.chat`: tools are shown to the model, and the client reads calls out of the ids by itself."""
    body = {
        "model": "tiny",
        "n": 2,
        **SAMPLING,
        "logprobs": True,
        "top_logprobs": 0,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "messages": [{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    }
    plain = server.told("/v1/chat/completions", **body)
    shown = server.told("/v1/chat/completions", **body, tools=[TOOL], tool_choice="none", chat_template_kwargs={"x": 1})
    laid_out = {name: value for name, value in body.items() if name in ("messages", "model")}
    assert shown["prompt_token_ids"] == server.told("/tokenize", **laid_out, tools=[TOOL])["tokens"]
    assert len(shown["prompt_token_ids"]) > len(plain["prompt_token_ids"])
    for choice in (*plain["choices"], *shown["choices"]):
        assert ids_of([entry["token"] for entry in choice["logprobs"]["content"]]) == choice["token_ids"]
        assert all(entry["top_logprobs"] is not None for entry in choice["logprobs"]["content"])


def test_one_turn_of_an_asynchronous_rollout(server: Running, direct: LLM) -> None:
    body = {"model": "tiny", "prompt": [256, 7, 8], **SAMPLING, "n": 1, "return_token_ids": True, "logprobs": 0}
    [choice] = server.told("/v1/completions", **body, seed=2**63 - 1)["choices"]
    [result] = direct.generate([256, 7, 8], SamplingParams(**SAMPLING, seed=2**63 - 1, logprobs=0))
    assert choice["token_ids"] == result.outputs[0].token_ids
    assert choice["logprobs"]["token_logprobs"] == result.outputs[0].selected_logprobs


def test_scores_of_a_teacher(server: Running, direct: LLM) -> None:
    """`VLLMClient.get_sequence_logprobs`: whole sequences with one token that is thrown away."""
    sequences = [[256, 5, 6, 7], [256, 8, 9]]
    body = {"model": "tiny", "prompt": sequences, "max_tokens": 1, "temperature": 0.7, "prompt_logprobs": 4}
    choices = server.told("/v1/completions", **body)["choices"]
    found = [choice["prompt_logprobs"] for choice in choices]
    expected = direct.logprobs(sequences)
    for sequence, entries, result in zip(sequences, found, expected, strict=True):
        assert entries[0] is None and len(entries) == len(sequence)
        for at in range(1, len(sequence)):
            ranked = sorted(entries[at].values(), key=lambda one: one["rank"])[:4]
            assert [one["rank"] for one in ranked] == [1, 2, 3, 4]
            assert ranked == sorted(ranked, key=lambda one: -one["logprob"])
            assert result.prompt_logprobs is not None
            own = result.prompt_logprobs[at]
            assert own is not None and entries[at][str(sequence[at])]["logprob"] == own[sequence[at]].logprob
    witness("TRL", scored=sum(map(len, sequences)))


def test_between_two_steps_of_training(server: Running) -> None:
    """Pause with its mode in the query, clear the cache, go on; a mode that there is not is refused."""
    assert server.http.post("/pause", params={"mode": "keep"}).status_code == 200
    assert server.stats()["state"] == "paused"
    assert server.http.post("/reset_prefix_cache").json()["success"] is True
    assert server.http.post("/resume").status_code == 200
    wrong = server.http.post("/pause", params={"mode": "soon"})
    assert wrong.status_code == 400 and "mode='soon'" in wrong.json()["error"]["message"]
    assert server.refused("/update_weights", update_info={"names": []})["param"] == "update_info.dtype_names"
