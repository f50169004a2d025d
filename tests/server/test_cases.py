"""Cases of the interface over HTTP on every endpoint, where another file shows them on one; and that no option is left
out where streams are compared with whole answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from perdure import LLM, SamplingParams
from perdure.server.protocol.chat import ChatRequest
from perdure.server.protocol.completions import CompletionRequest
from tests.server import test_chat, test_completions
from tests.server.conftest import Running, running
from tests.server.joining import joined_chat
from tests.witness import witness

COMPLETIONS, CHATS, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
CHANGE_NOTHING = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"}
ELSEWHERE = {"model", "checkpoint", "request_id"}


@pytest.mark.parametrize(
    ("kind", "options", "always"),
    [
        (CompletionRequest, test_completions.OPTIONS, {"prompt", "seed", "max_tokens", "stream", "stream_options"}),
        (ChatRequest, test_chat.OPTIONS, {"messages", "seed", "max_tokens", "stream", "stream_options"}),
    ],
    ids=["completions", "chats"],
)
def test_every_option_is_streamed_and_joined(kind: Any, options: list[dict[str, Any]], always: set[str]) -> None:
    compared = {name for one in options for name in one} | always
    assert set(kind.__struct_fields__) - CHANGE_NOTHING - ELSEWHERE - {"add_special_tokens"} <= compared


def generated(server: Running, path: str, text: str, max_tokens: int | None, **options: Any) -> tuple[int, int, str]:
    """Tokens of the prompt and of the output, and why it ended."""
    body: dict[str, Any] = {"ignore_eos": True, **options}
    if path == RESPONSES:
        body |= {"input": text, "max_output_tokens": max_tokens}
        told = server.told(path, **body)
        used = told["usage"]
        why = (told["incomplete_details"] or {}).get("reason", "")
        return used["input_tokens"], used["output_tokens"], "length" if why == "max_output_tokens" else why
    asked = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    told = server.told(path, **body, **asked, max_tokens=max_tokens)
    return told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"], told["choices"][0]["finish_reason"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS, RESPONSES])
def test_t21_and_t22_one_rule_of_lengths_on_every_endpoint(short_server: Running, path: str) -> None:
    server = short_server
    around = generated(server, path, "", 1)[0]
    for length, max_tokens, expected in ((255, 5, 1), (250, 100, 6), (250, 2**31, 6), (20, 0, 0), (20, 1, 1)):
        num_prompt, num_output, why = generated(server, path, "~" * (length - around), max_tokens)
        assert (num_prompt, num_output, why) == (length, expected, "length")
    if path != COMPLETIONS:
        assert generated(server, path, "~" * (240 - around), None)[1] == 16
    name = "max_output_tokens" if path == RESPONSES else "max_tokens"
    too_long: dict[str, Any] = {
        COMPLETIONS: {"prompt": "~" * 300},
        CHATS: {"messages": [{"role": "user", "content": "~" * 300}]},
        RESPONSES: {"input": "~" * 300},
    }[path]
    steps = server.stats()["num_steps"]
    for value in (1, 5):
        error = server.refused(path, **too_long, **{name: value})
        assert error["code"] == "context_length_exceeded" and "256" in error["message"]
    for value in (-1, "5", 1.5, True):
        assert server.refused(path, **too_long, **{name: value})["param"] == name.replace(
            "output_tokens", "tokens"
        ) or (name == "max_output_tokens")
    assert server.stats()["num_steps"] == steps
    assert generated(server, path, "a", 2)[1] == 2
    witness("T21-T22-http", path=path, room=6)


def test_t44_every_endpoint_tells_the_ids(server: Running, direct: LLM) -> None:
    ids: dict[str, tuple[list[int], list[int]]] = {}
    told = server.told(CHATS, messages=[{"role": "user", "content": "HAVING"}], max_tokens=4, return_token_ids=True)
    ids[CHATS] = told["prompt_token_ids"], told["choices"][0]["token_ids"]
    told = server.told(RESPONSES, input="HAVING", max_output_tokens=4, return_token_ids=True)
    ids[RESPONSES] = told["prompt_token_ids"], told["token_ids"]
    laid_out = server.told("/tokenize", messages=[{"role": "user", "content": "HAVING"}])["tokens"]
    for path, (prompt, output) in ids.items():
        assert prompt == laid_out and len(output) == 4, path
        again = server.told(COMPLETIONS, prompt=prompt + output, max_tokens=1, return_token_ids=True)["choices"][0]
        assert again["prompt_token_ids"] == prompt + output
    streamed = server.stream(
        CHATS, messages=[{"role": "user", "content": "HAVING"}], max_tokens=4, return_token_ids=True, seed=1
    )
    assert [event["prompt_token_ids"] for event in streamed if "prompt_token_ids" in event] == [laid_out]
    assert len(joined_chat(streamed)[0]["token_ids"]) == 4
    witness("T44-endpoints", prompt=laid_out)


@pytest.mark.parametrize("stop", ["\u00e9\u4e16", "\u4e16", "\U0001f600", "b\u00e9"])
def test_t25_a_stop_of_several_bytes(server: Running, stop: str) -> None:
    """Over several tokens, some of which end inside a character; in chats and completions."""
    text = "a b\u00e9\u4e16 c\U0001f600!"
    kept = text[: text.index(stop)]
    base: dict[str, Any] = {"structured_outputs": {"choice": [text]}, "max_tokens": 40, "stop": ["zz", stop]}
    num_events = 0
    for include in (False, True):
        shown = kept + (stop if include else "")
        body = {**base, "include_stop_str_in_output": include, "return_token_ids": True}
        asked = {"messages": [{"role": "user", "content": "a"}]}
        for path, own in ((COMPLETIONS, {"prompt": [256, 7]}), (CHATS, asked)):
            choice = server.told(path, **body, **own)["choices"][0]
            events = server.stream(path, **body, **own)
            num_events += len(events)
            parts = [part for event in events for part in event["choices"]]
            if path == COMPLETIONS:
                found, said = choice["text"], [part["text"] for part in parts]
            else:
                found, said = choice["message"]["content"], [part["delta"].get("content") or "" for part in parts]
            assert found == "".join(said) == shown and not any("\ufffd" in part for part in said)
            assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
    witness("T25-bytes", events=num_events)


@pytest.fixture(scope="module")
def wider(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Whose tokenizer knows fewer ids than the logits have."""
    directory = tmp_path_factory.mktemp("wider")
    for file in tiny.iterdir():
        (directory / file.name).write_bytes(file.read_bytes())
    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    dropped = {piece for piece, token_id in tokenizer["model"]["vocab"].items() if token_id >= 500}
    assert len(dropped) == 12
    tokenizer["model"]["vocab"] = {
        piece: token_id for piece, token_id in tokenizer["model"]["vocab"].items() if piece not in dropped
    }
    tokenizer["model"]["merges"] = [
        pair
        for pair in tokenizer["model"]["merges"]
        if "".join(pair if isinstance(pair, list) else pair.split(" ")) not in dropped
    ]
    path.write_text(json.dumps(tokenizer))
    with running(directory, {}, num_pages=64) as server:
        yield server
        server.check_empty()


def test_t20_ids_that_only_the_logits_have_are_ids(wider: Running) -> None:
    body: dict[str, Any] = {
        "prompt": [256, 505],
        "logit_bias": {"506": 100},
        "temperature": 0,
        "return_token_ids": True,
    }
    choice = wider.told(COMPLETIONS, **body, stop_token_ids=[507], logprobs=1, max_tokens=3)["choices"][0]
    assert choice["token_ids"] == [506] * 3 and choice["text"] == "" and choice["prompt_token_ids"] == [256, 505]
    assert len(choice["logprobs"]["tokens"]) == 3
    assert wider.told("/detokenize", tokens=[64, 505, 65])["prompt"] == "ab"
    for value in (512, -1):
        assert str(value) in wider.refused(COMPLETIONS, prompt=[256, value])["message"]
    witness("T20-width", generated=choice["token_ids"])


def test_t20_a_neighbour_does_not_see_what_is_refused(server: Running, direct: LLM) -> None:
    shape: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True, "seed": 20, "logprobs": 0}
    [alone] = direct.generate([[256, 20]], SamplingParams(**shape))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(server.told, COMPLETIONS, prompt=[256, 20], return_token_ids=True, **shape)
        server.wait_until(lambda stats: stats["num_running"] > 0)
        refused = 0
        for value in (-1, 512, 2**31, 2**63 - 1):
            for body in ({"prompt": [1, value]}, {"stop_token_ids": [value]}, {"logit_bias": {str(value): 1}}):
                server.refused(COMPLETIONS, **{"prompt": [256], "max_tokens": 1, **body})
                refused += 1
        choice = running.result()["choices"][0]
    assert choice["token_ids"] == alone.outputs[0].token_ids
    assert choice["logprobs"]["token_logprobs"] == alone.outputs[0].selected_logprobs
    witness("T20-neighbour", refused=refused, tokens=len(choice["token_ids"]))
