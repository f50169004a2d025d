"""`/v1/responses` by the official client: text, tools, structure, reasoning; a stream's end is what is not streamed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import requests

from tests.server.conftest import Running
from tests.server.test_chat import CALL, THINKING, TOOL, saying

FUNCTION = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]
PATH = "/v1/responses"


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


OPTIONS: list[dict[str, Any]] = [
    {"max_output_tokens": 9},
    {"instructions": "Be kind.", "temperature": 0.5, "max_output_tokens": 9},
    {"tools": [FUNCTION], "extra_body": saying(f"so {CALL}{CALL} done")},
    {"tools": [FUNCTION], "tool_choice": {"type": "function", "name": "add"}, "max_output_tokens": 90},
    {"tools": [FUNCTION], "tool_choice": "required", "max_output_tokens": 200, "parallel_tool_calls": False},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes", "no"]}}}},
    {"extra_body": {"forced_token_ids": THINKING, "max_tokens": 30, "return_token_ids": True}},
    {"top_p": 0.9, "max_output_tokens": 30, "extra_body": {"stop": ["a", "bc"], "top_k": 40, "max_tokens": 30}},
    {"max_output_tokens": 5, "extra_body": {"stream_interval": 2, "logit_bias": {"65": 9}, "max_tokens": 5}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options))
def test_a_streams_end_is_what_is_not_streamed(client: openai.OpenAI, options: dict[str, Any]) -> None:
    extra = {"seed": 3, "request_id": "resp_1", "ignore_eos": False, **options.get("extra_body", {})}
    extra["max_output_tokens"] = options.get("max_output_tokens", extra.pop("max_tokens", None))
    asked: dict[str, Any] = {"model": "tiny", "input": "1+2?", **options, "extra_body": extra}
    whole = client.responses.create(**asked)
    with client.responses.stream(**asked) as stream:  # the client keeps its own account of the items
        events: list[Any] = list(stream)
    assert events[-1].type == f"response.{whole.status}"
    streamed = events[-1].response
    ignored = {"created_at", "parsed", "parsed_arguments", "input_tokens_details"}
    expected = _without(whole.model_dump(), ignored)
    assert _without(streamed.model_dump(), ignored) == expected and whole.output
    assert [event.sequence_number for event in events] == sorted(event.sequence_number for event in events)
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert said == whole.output_text


def _without(value: Any, names: set[str]) -> Any:
    if isinstance(value, dict):
        return {name: _without(one, names) for name, one in value.items() if name not in names}
    if isinstance(value, list):
        return [_without(one, names) for one in value]
    return value


def test_calls_and_what_came_of_them_go_back_in(server: Running, client: openai.OpenAI) -> None:
    said = saying(f"so {CALL}")
    said["max_output_tokens"] = said.pop("max_tokens")
    first: Any = client.responses.create(model="tiny", input="1+2?", tools=[FUNCTION], extra_body=said)  # type: ignore[list-item]
    message, call = first.output
    assert (message.content[0].text, call.name, json.loads(call.arguments)) == ("so", "add", {"a": 1, "b": "x"})
    items: list[Any] = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "input_text", "text": "1+2?"}]},
        *(one.model_dump(exclude_none=True) for one in first.output),
        {"type": "function_call_output", "call_id": call.call_id, "output": "3"},
    ]
    extra = {"return_token_ids": True}
    second: Any = client.responses.create(model="tiny", input=items, max_output_tokens=2, extra_body=extra)
    laid_out = server.told("/detokenize", tokens=second.prompt_token_ids)["prompt"]
    assert laid_out == (
        "<s>system: Be kind.\nuser: 1+2?\n"
        'assistant: so<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>\ntool: 3\nassistant: '
    )
    assert second.status == "incomplete" and second.incomplete_details.reason == "max_output_tokens"
    assert second.usage.output_tokens == len(second.token_ids) == 2 and second.weight_epochs == [[0, 0]]


def test_reasoning_is_an_item(server: Running) -> None:
    ids = server.told("/tokenize", prompt="<think>hm</think>yes", add_special_tokens=False)["tokens"]
    body = {"input": "a", "forced_token_ids": ids, "request_id": "r"}
    output = server.told(PATH, **body)["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    assert output[0]["content"][0]["text"] == "hm" and output[1]["content"][0]["text"] == "yes"
    with server.http.stream("POST", PATH, json={**body, "stream": True}) as answer:
        lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
    assert json.loads(lines[-1].removeprefix("data: "))["response"]["output"] == output
    laid_out = server.told(PATH, input=[*output, {"role": "user", "content": "b"}], max_output_tokens=1)
    assert laid_out["output"]


WRONG = {"type": "json_schema", "name": "n", "schema": {"type": "strin"}}


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"input": []}, "input=[]"),
        ({"input": [{"type": "image"}]}, "input[0] is of type 'image'"),
        ({"input": [{"type": "reasoning", "content": [1]}]}, "input[0] is reasoning"),
        ({"input": "a", "n": 2}, "n=2"),
        ({"input": "a", "text": {"format": {"type": "json_schema"}}}, "text.format.schema is missing"),
        (
            {"input": "a", "text": {"format": {"type": "json_schema", "name": "n", "schema": {"$ref": "#"}}}},
            "text.format.schema=",
        ),
        ({"input": "a", "text": {"format": WRONG}}, 'text.format.schema={"type": "strin"}: Invalid type'),
        ({"input": "a", "text": {"format": WRONG}, "structured_outputs": {"regex": "a"}}, "text.format and struct"),
        ({"input": "a", "text": {"format": WRONG}, "tools": [FUNCTION], "tool_choice": "required"}, "text.format some"),
        ({"input": "a", "max_output_tokens": -1}, "max_output_tokens=-1"),
        ({"input": "a", "previous_response_id": "r"}, "previous_response_id is no field"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "tools[0].type='web_search'"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_body_is_refused(server: Running, body: dict[str, Any], words: str) -> None:
    assert words in server.refused(PATH, **body)["message"]


def test_a_body_nested_too_deeply_is_no_fault_of_its_json(server: Running) -> None:
    data = b'{"input": "a", "chat_template_kwargs": {"a": ' + b"[" * 5000 + b"]" * 5000 + b"}}"
    answer = requests.post(f"{server.url}{PATH}", data=data, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400 and "the body is nested more deeply" in answer.json()["error"]["message"]


def test_a_fault_names_the_field_that_the_client_gave(server: Running) -> None:
    """In the words of each endpoint, also where it is found once the answer would have begun."""
    wrong = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "strin"}}}
    messages = [{"role": "user", "content": "a"}]
    for path, body, field in (
        (PATH, {"input": "a", "text": {"format": WRONG}, "stream": True}, "text.format.schema"),
        (PATH, {"input": "a", "structured_outputs": {"json": {"type": "strin"}}}, "structured_outputs"),
        (PATH, {"input": [{"content": "a", "role": 5}]}, "input[0]"),
        (PATH, {"input": [*messages, {"role": "user"}], "instructions": "be good"}, "input[1]"),
        (
            "/v1/chat/completions",
            {"messages": messages, "response_format": wrong},
            "response_format.json_schema.schema",
        ),
        ("/v1/chat/completions", {"messages": messages, "max_completion_tokens": -3}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": ["a", "b"], "response_format": wrong}, "response_format.json_schema.schema"),
    ):
        error = server.refused(path, **body)
        assert error["param"] == field and error["message"].startswith(field), error
