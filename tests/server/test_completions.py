"""`/v1/completions`: what the engine gives, in OpenAI's form; a stream joined is what was not streamed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from perdure import LLM, SamplingParams
from tests.server.conftest import Running
from tests.server.joining import joined_completion
from tests.witness import witness

PATH = "/v1/completions"
IDS = [256, 10, 20, 30, 40]

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01},
    {"n": 3, "seed": 5},
    {"logprobs": 3},
    {"logprobs": 0, "return_tokens_as_token_ids": True},
    {"echo": True},
    {"echo": True, "logprobs": 2, "n": 2},
    {"echo": True, "logprobs": 1, "max_tokens": 0},
    {"prompt_logprobs": 1},
    {"return_token_ids": True, "min_tokens": 3},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    {"logit_bias": {"65": 50}},
    {"allowed_token_ids": [65, 66, 67], "ignore_eos": True},
    {"bad_words": ["a"], "stop_token_ids": [199], "return_token_ids": True},
    {"stop_token_ids": [199], "include_stop_str_in_output": True, "return_token_ids": True},
    {"stop_token_ids": [199], "strip_stop_tokens": True, "return_token_ids": True, "logprobs": 1},
    {"skip_special_tokens": False, "detokenize": True, "priority": 3, "cache_salt": "salt"},
    {"detokenize": False, "return_token_ids": True},
    {"stream_interval": 5, "logprobs": 1},
    {"logprob_token_ids": [7, 8], "logprobs": 0, "logprobs_mode": "processed"},
    {"logprob_token_ids": [7, 8], "echo": True},
    {"forced_token_ids": [60, 61, 62], "logprobs": 1, "max_tokens": 5},
    {"skip_reading_prefix_cache": True, "add_special_tokens": False},
    {"structured_outputs": {"choice": ["\U0001f600!\u4e16"]}, "return_token_ids": True},
    {"response_format": {"type": "json_object"}, "max_tokens": 12},
    {"stop": ["b", "ca"], "allowed_token_ids": [64, 65, 66], "return_token_ids": True, "max_tokens": 30},
    {"stop": "bc", "allowed_token_ids": [65, 66], "strip_stop_tokens": True, "return_token_ids": True, "logprobs": 0},
    {"stop_token_sequences": [[66, 67]], "allowed_token_ids": [66, 67], "strip_stop_tokens": True, "max_tokens": 30},
    {"prompt_logprobs": 0, "echo": True, "n": 2, "return_token_ids": True},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_a_stream_joined_is_what_is_not_streamed(server: Running, options: dict[str, Any]) -> None:
    body = {"prompt": ["abc", "hello"], "seed": 11, "max_tokens": 8, **options}
    whole = server.told(PATH, **body)
    events = server.stream(PATH, **body, stream_options={"include_usage": True})
    usage = events[-1]
    assert usage["choices"] == [] and all(event["usage"] is None for event in events[:-1])
    for used in (whole["usage"], usage["usage"]):
        used.pop("prompt_tokens_details")
    assert usage["usage"] == whole["usage"]
    assert joined_completion(events) == {choice["index"]: choice for choice in whole["choices"]}
    assert [choice["index"] for choice in whole["choices"]] == list(range(2 * options.get("n", 1)))


@pytest.mark.parametrize("prompt", ["abc", IDS, ["abc", "x"], [IDS, [256, 1]], ["abc", IDS]])
def test_a_completion_is_what_the_engine_gives(server: Running, direct: LLM, prompt: Any) -> None:
    whole = server.told(PATH, prompt=prompt, seed=3, n=2, max_tokens=9, logprobs=2, return_token_ids=True)
    params = SamplingParams(seed=3, n=2, max_tokens=9, logprobs=2, return_prompt=True)
    results = direct.generate(prompt, params)
    outputs = [(result, output) for result in results for output in result.outputs]
    assert len(whole["choices"]) == len(outputs)
    for choice, (result, output) in zip(whole["choices"], outputs):
        assert choice["text"] == output.text and choice["token_ids"] == output.token_ids
        assert choice["prompt_token_ids"] == result.prompt_token_ids
        assert choice["finish_reason"] == output.finish_reason
        assert choice["logprobs"]["token_logprobs"] == output.selected_logprobs
        assert choice["weight_epochs"] == [[0, 0]]
    assert whole["usage"]["completion_tokens"] == sum(len(output.token_ids) for _, output in outputs)
    assert whole["usage"]["prompt_tokens"] == sum(len(result.prompt_token_ids or []) for result in results)


def test_listed_ids_are_scored_where_nothing_else_is(server: Running, direct: LLM) -> None:
    """What a completion and a chat tell of `logprob_token_ids` is what the engine scores."""
    listed = [5, 199, 7]
    choice = server.told(PATH, prompt=IDS, seed=3, max_tokens=4, logprob_token_ids=listed, return_token_ids=True)
    scores, ids = choice["choices"][0]["logprobs"], choice["choices"][0]["token_ids"]
    [result] = direct.generate(IDS, SamplingParams(seed=3, max_tokens=4, logprob_token_ids=listed))
    told = [sorted(top.values()) for top in scores["top_logprobs"]]
    found = list(result.outputs[0].logprobs or ())
    assert ids == result.outputs[0].token_ids and len(found) == 4
    assert told == [sorted(one.logprob for one in entry.values()) for entry in found if entry is not None]

    chat = {"messages": [{"role": "user", "content": "a"}], "seed": 3, "max_tokens": 2, "logprob_token_ids": listed}
    answer = server.told("/v1/chat/completions", **chat, logprobs=True, return_tokens_as_token_ids=True)
    for token in answer["choices"][0]["logprobs"]["content"]:
        assert {f"token_id:{one}" for one in listed} == {top["token"] for top in token["top_logprobs"]}
    assert server.refused("/v1/chat/completions", **chat)["param"] == "logprob_token_ids"
    for name, value in (("logprob_token_ids", listed), ("prompt_logprobs", 0)):
        assert server.refused("/v1/responses", input="a", **{name: value})["param"] == name


def test_settings_that_contradict_each_other_are_the_requests_fault(server: Running) -> None:
    for wrong in (
        {"min_tokens": 5, "structured_outputs": {"choice": ["a"]}},
        {"allowed_token_ids": [5], "structured_outputs": {"regex": "ab"}},
    ):
        error = server.refused(PATH, prompt="x", **wrong)
        assert error["type"] == "invalid_request_error" and "no usable logits" in error["message"]


def test_a_refusal_has_the_requests_id_too(server: Running) -> None:
    for body, id_of in (
        ({"prompt": "a", "temperature": -1, "request_id": "mine"}, "mine"),
        ({"prompt": "a", "model": "other", "request_id": "mine"}, "mine"),
        ({"prompt": "a", "request_id": "a\r\nb"}, "refused-"),
        ({"nobody_knows": 1}, "refused-"),
    ):
        answer = server.post(PATH, **body)
        assert answer.status_code >= 400 and answer.headers["x-request-id"].startswith(id_of), answer.text
    for answer, status in ((server.http.get("/nowhere"), 404), (server.http.delete(PATH), 405)):
        assert answer.status_code == status and answer.headers["x-request-id"].startswith("refused-"), answer.text


def test_max_tokens_is_16_unless_given(server: Running) -> None:
    for extra in ({}, {"max_tokens": None}):
        choice = server.told(PATH, prompt=IDS, ignore_eos=True, return_token_ids=True, **extra)["choices"][0]
        assert len(choice["token_ids"]) == 16 and choice["finish_reason"] == "length"


def test_t44_ids_come_back_as_they_went_in(server: Running) -> None:
    """The ids of "hello" letter by letter are not those that the tokenizer makes of it."""

    def ids_of(text: str) -> list[int]:
        found: list[int] = server.told("/tokenize", prompt=text, add_special_tokens=False)["tokens"]
        return found

    canonical, spelled = ids_of("hello"), [token for letter in "hello" for token in ids_of(letter)]
    assert canonical != spelled and server.told("/detokenize", tokens=spelled)["prompt"] == "hello"
    first = server.told(PATH, prompt=spelled, return_token_ids=True, max_tokens=4)["choices"][0]
    assert first["prompt_token_ids"] == spelled
    again = [*spelled, *first["token_ids"]]
    second = server.told(PATH, prompt=again, return_token_ids=True, max_tokens=4)["choices"][0]
    assert second["prompt_token_ids"] == again
    chat = server.told(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": "hello"}],
        return_token_ids=True,
        max_completion_tokens=4,
    )
    laid_out = server.told("/tokenize", messages=[{"role": "user", "content": "hello"}])["tokens"]
    assert chat["prompt_token_ids"] == laid_out and len(chat["choices"][0]["token_ids"]) == 4
    witness("T44", canonical=canonical, sent=spelled, generated=first["token_ids"])


def test_t19_an_empty_prompt_is_refused_alone(server: Running) -> None:
    with_bos = server.told(PATH, prompt="", max_tokens=2, return_token_ids=True)["choices"][0]
    assert with_bos["prompt_token_ids"] == [256]
    for body in ({"prompt": "", "add_special_tokens": False}, {"prompt": []}, {"prompt": [[]]}):
        assert "prompt" in server.refused(PATH, **body)["message"]
    batch = server.told(PATH, prompt=["a", "", "b"], add_special_tokens=False, max_tokens=2, n=2)
    assert [choice["finish_reason"] for choice in batch["choices"]] == ["length"] * 2 + ["error"] * 2 + ["length"] * 2
    assert "prompt" in batch["choices"][2]["error"]["message"]
    streamed = joined_completion(
        server.stream(PATH, prompt=["a", "", "b"], add_special_tokens=False, max_tokens=2, n=2)
    )
    assert [streamed[i]["finish_reason"] for i in range(6)] == ["length"] * 2 + ["error"] * 2 + ["length"] * 2
    witness("T19-http", refused=batch["choices"][2]["error"]["message"])


@pytest.mark.parametrize("value", [-1, 512, 2**31, 2**63 - 1, 2**64, 2**70])
def test_t20_ids_out_of_range_are_refused(server: Running, value: int) -> None:
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("prompt", {"prompt": [1, value]}),
        ("stop_token_ids", {"stop_token_ids": [value]}),
        ("logit_bias", {"logit_bias": {str(value): 1.0}}),
        ("bad_words", {"bad_words": [[value]]}),
        ("allowed_token_ids", {"allowed_token_ids": [value]}),
        ("logprob_token_ids", {"logprob_token_ids": [value]}),
        ("forced_token_ids", {"forced_token_ids": [value]}),
    ]
    for field, body in bodies:
        for stream in (False, True):
            error = server.refused(PATH, **{"prompt": IDS, "max_tokens": 1, "stream": stream, **body})
            assert field in error["message"], error
    witness("T20-http", refused=len(bodies) * 2, value=value)


def test_t21_the_length_limit(short_server: Running) -> None:
    server = short_server
    for length, num_tokens in ((255, 1), (250, 6)):
        choice = server.told(PATH, prompt=[7] * length, max_tokens=100, ignore_eos=True, return_token_ids=True)
        choice = choice["choices"][0]
        assert len(choice["token_ids"]) == num_tokens and choice["finish_reason"] == "length"
    assert server.told(PATH, prompt=[7] * 256, max_tokens=0)["choices"][0]["finish_reason"] == "length"
    steps = server.stats()["num_steps"]
    for length in (256, 257):
        for body in ({}, {"max_tokens": 1}, {"max_tokens": 5}):
            error = server.refused(PATH, prompt=[7] * length, **body)
            assert error["code"] == "context_length_exceeded"
            assert "256" in error["message"] and str(length) in error["message"]
    assert server.stats()["num_steps"] == steps
    chat = server.refused("/v1/chat/completions", messages=[{"role": "user", "content": "~" * 300}])
    assert chat["code"] == "context_length_exceeded"
    witness("T21-http", refused=7)


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_t22_values_of_max_tokens(short_server: Running, path: str) -> None:
    server = short_server
    prompt: dict[str, Any] = {"prompt": IDS} if path == PATH else {"messages": [{"role": "user", "content": "a"}]}
    for value, shown in ((-1, "-1"), ("5", "'5'"), (1.5, "1.5"), (True, "True"), (2**63, str(2**63))):
        error = server.refused(path, **prompt, max_tokens=value)
        assert error["param"] == "max_tokens" and f"max_tokens={shown}" in error["message"]
    for value in (0, 1, 2**31):
        told = server.told(path, **prompt, max_tokens=value, ignore_eos=True, return_token_ids=True)
        found, room = len(told["choices"][0]["token_ids"]), 256 - told["usage"]["prompt_tokens"]
        assert found == min(value, room) and told["choices"][0]["finish_reason"] == "length"
    if path != PATH:
        told = server.told(path, **prompt, ignore_eos=True)
        assert told["usage"]["total_tokens"] == 256
    witness("T22-http", path=path)


def text_of(server: Running, **body: Any) -> dict[str, Any]:
    choice: dict[str, Any] = server.told(PATH, temperature=0, return_token_ids=True, **body)["choices"][0]
    return choice


def test_t25_a_stop_string_over_several_tokens(server: Running) -> None:
    """Forced letters, so that the text is known; then a stop inside one token, and across two to five."""
    num_deltas = 0
    text = " ABCDEFGHIJK"
    base = {"prompt": IDS, "structured_outputs": {"choice": [text]}, "max_tokens": 40}
    for stop, kept in (("DEFGHIJ", " ABC"), ("B", " A"), ("CD", " AB"), ("\u00e9", text)):
        for include in (False, True):
            body = {**base, "stop": ["zzz", stop], "include_stop_str_in_output": include, "return_token_ids": True}
            whole = server.told(PATH, **body)["choices"][0]
            events = server.stream(PATH, **body)
            num_deltas += len(events)
            assert joined_completion(json.loads(json.dumps(events)))[0] == whole
            assert whole["text"] == kept + (stop if include and kept != text else "")
            if kept != text:
                assert (whole["finish_reason"], whole["stop_reason"]) == ("stop", stop)
            if not include and kept != text:
                assert not any(set(part["text"]) & set(stop) for event in events for part in event["choices"])
    witness("T25-http", num_deltas=num_deltas)


def test_t33_what_stopped_it_and_whether_it_is_shown(server: Running) -> None:
    text = "ab!cd"
    base = {"prompt": IDS, "structured_outputs": {"choice": [text]}, "max_tokens": 40, "logprobs": 0}
    mark = server.told("/tokenize", prompt="!", add_special_tokens=False)["tokens"]
    shown = []
    for stops, reason in (({}, None), ({"stop_token_ids": mark}, mark[0]), ({"stop": "!"}, "!")):
        for include in (False, True):
            choice = text_of(server, **base, **stops, include_stop_str_in_output=include)
            assert choice["finish_reason"] == "stop" and choice["stop_reason"] == reason
            assert choice["text"].removesuffix("</s>") == (text if reason is None else "ab!" if include else "ab")
            assert len(choice["token_ids"]) == len(choice["logprobs"]["tokens"])
            shown.append(choice["text"])
    witness("T33-http", shown=len(shown), stop_ids=mark)


def test_t34_a_character_split_over_tokens(server: Running) -> None:
    text = "\U0001f600!\u4e16"
    body = {"prompt": IDS, "structured_outputs": {"choice": [text]}, "max_tokens": 40, "logprobs": 0}
    events = server.stream(PATH, **body, return_token_ids=True)
    parts = [event["choices"][0] for event in events]
    ids = [token for part in parts for token in part["token_ids"]]
    said = [part["text"] for part in parts if part["text"]]
    assert said == ["\U0001f600", "!", "\u4e16"] and max(len(part["token_ids"]) for part in parts) == 1
    offsets = [offset for part in parts for offset in part["logprobs"]["text_offset"]]
    assert offsets == sorted(offsets)
    witness("T34-http", ids=len(ids), deltas=len(said))


def test_t37_what_cannot_be_honoured_is_refused(server: Running) -> None:
    """Never passed over: stops without text, fields that nobody knows, parts that are no text."""
    assert server.refused(PATH, prompt=IDS, detokenize=False, stop="a")["param"] == "stop"
    unknown = server.refused(PATH, prompt=IDS, best_of=4)
    assert unknown["param"] == "best_of" and "is no field" in unknown["message"]
    image = [{"type": "image_url", "image_url": {"url": "http://a/b.png"}}]
    error = server.refused("/v1/chat/completions", messages=[{"role": "user", "content": image}])
    assert "messages[0].content[0]" in error["message"] and "image_url" in error["message"]
    assert server.told(PATH, prompt=IDS, max_tokens=1, user="me", metadata={"a": "b"}, store=False)["choices"]
    witness("T37-http", refused=3)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b"[]", "expected `object`"),
        (b'{"prompt": "a", "seed": NaN}', "no JSON"),
        (b'{"prompt": "\xff"}', "no JSON"),
        (b'{"prompt": "\\ud800"}', "no JSON"),
        (b'{"max_tokens": 1}', "prompt is missing"),
        (b'{"prompt": {"a": 1}}', "prompt="),
        (b'{"prompt": [1, "a"]}', "prompt[0]=1"),
        (b'{"prompt": [1, [2]]}', "prompt[0]=1"),
        (b'{"prompt": [["a"]]}', "prompt[0][0]='a'"),
        (b'{"prompt": "a", "stop": [""]}', "stop holds ''"),
        (b'{"prompt": "a", "temperature": -1}', "temperature=-1"),
        (b'{"prompt": "a", "temperature": 1e999}', "temperature: number out of range"),
        (b'{"prompt": "a", "top_p": 0}', "top_p=0"),
        (b'{"prompt": "a", "n": 0}', "n=0"),
        (b'{"prompt": "a", "logprobs": -2}', "logprobs=-2"),
        (b'{"prompt": "a", "stream_options": {}}', "stream_options"),
        (b'{"prompt": "a", "stream": true, "stream_options": {"x": 1}}', "stream_options.x is no field"),
        (b'{"prompt": "a", "response_format": {"type": "json_schema"}}', "json_schema"),
        (b'{"prompt": "a", "structured_outputs": {"json": {"type": 3}}}', "structured_outputs"),
        (b'{"prompt": "a", "structured_outputs": {"what": 1}}', "structured_outputs has no field"),
        (b'{"prompt": "a", "cache_salt": ""}', "cache_salt"),
        (b'{"prompt": "a", "logit_bias": {"a": 1}}', "logit_bias"),
        (b'{"prompt": ' + b"[" * 10_000, "prompt"),
    ],
    ids=lambda value: value[:40].decode("latin-1") if isinstance(value, bytes) else "",
)
def test_a_wrong_body_is_refused_with_field_and_value(server: Running, body: bytes, words: str) -> None:
    answer = server.http.post(PATH, content=body)
    assert answer.status_code == 400 and words in answer.json()["error"]["message"], answer.text


def test_a_model_of_another_name_is_not_here(server: Running) -> None:
    error = server.refused(PATH, 404, prompt="a", model="gpt-4")
    assert error["code"] == "model_not_found" and error["param"] == "model"
    assert server.told(PATH, prompt="a", model="tiny", max_tokens=1)["model"] == "tiny"
