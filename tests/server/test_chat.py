"""`/v1/chat/completions`: templates, tools, reasoning, structure; a stream joined is what was not streamed."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from perdure import LLM, SamplingParams
from perdure.server import prompts
from tests.server.conftest import Running
from tests.server.joining import joined_chat

PATH = "/v1/chat/completions"
USER = {"role": "user", "content": "1+2?"}
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"enum": [1, 2]}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
OTHER = {"type": "function", "function": {"name": "now", "parameters": {"enum": [{"a": 1}]}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'

THINKING = [ord(letter) - 33 for letter in "<think>hm</think>yes"]
"""The tiny model's ids of single letters."""


def saying(text: str) -> dict[str, Any]:
    """Settings with which the model says this."""
    return {"structured_outputs": {"choice": [text]}, "max_tokens": 400, "include_stop_str_in_output": False}


OPTIONS: list[dict[str, Any]] = [
    {},
    {"n": 3, "logprobs": True, "top_logprobs": 2},
    {"logprobs": True, "return_tokens_as_token_ids": True},
    {"return_token_ids": True, "prompt_logprobs": 1},
    {"stop": "a", "include_stop_str_in_output": True},
    {"stream_interval": 3, "return_token_ids": True},
    {"tools": [TOOL], **saying(f"Look:\n{CALL}\n{CALL} done")},
    {"tools": [TOOL], **saying(f"{CALL}{CALL}"), "parallel_tool_calls": False},
    {"tools": [TOOL], **saying("<tool_call> no call </tool_call> <tool_"), "logprobs": True},
    {"tools": [TOOL], "tool_choice": "none", **saying(CALL)},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}, "max_tokens": 60},
    {"tools": [OTHER], "tool_choice": "required", "max_tokens": 120, "n": 2},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {"enum": ["yes", "no"]}}}},
    {"response_format": {"type": "text"}, "chat_template_kwargs": {"thinks": True}},
    {"add_generation_prompt": False, "include_reasoning": False},
    {"forced_token_ids": THINKING, "max_tokens": 30, "logprobs": True, "return_token_ids": True},
    {"forced_token_ids": THINKING, "max_tokens": 30, "include_reasoning": False},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "logit_bias": {"65": 5}, "bad_words": ["b"]},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5, "allowed_token_ids": [65, 66, 67]},
    {"stop_token_ids": [199], "min_tokens": 2, "strip_stop_tokens": True, "logprobs": True, "return_token_ids": True},
    {"stop_token_sequences": [[66, 67]], "allowed_token_ids": [66, 67], "strip_stop_tokens": True, "max_tokens": 30},
    {"detokenize": False, "return_token_ids": True, "logprobs": True, "top_logprobs": 1},
    {"skip_special_tokens": False, "ignore_eos": True, "priority": 1, "cache_salt": "salt", "reasoning_effort": "low"},
    {"logprob_token_ids": [7, 8], "logprobs": True, "logprobs_mode": "processed", "skip_reading_prefix_cache": True},
    {"max_tokens": None, "max_completion_tokens": 3, "structured_outputs": {"regex": "[ab]{9}"}},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "none")
def test_a_stream_joined_is_what_is_not_streamed(server: Running, options: dict[str, Any]) -> None:
    body = {"messages": [USER], "seed": 11, "max_tokens": 8, "request_id": "named", **options}
    whole = server.told(PATH, **body)
    events = server.stream(PATH, **body, stream_options={"include_usage": True, "continuous_usage_stats": True})
    for used in (whole["usage"], events[-1]["usage"]):
        used.pop("prompt_tokens_details")
    assert events[-1]["usage"] == whole["usage"] and events[0]["choices"][0]["delta"]["role"] == "assistant"
    for name in ("prompt_token_ids", "prompt_logprobs"):
        assert [event[name] for event in events if name in event] == ([whole[name]] if name in whole else [])
    assert joined_chat(events) == {
        choice["index"]: {
            **choice,
            "message": {name: one for name, one in choice["message"].items() if name != "refusal"},
        }
        for choice in whole["choices"]
    }


def test_a_chat_is_what_the_engine_gives(server: Running, direct: LLM) -> None:
    whole = server.told(
        PATH, messages=[USER], seed=3, n=2, max_completion_tokens=9, logprobs=True, return_token_ids=True
    )
    [result] = direct.chat([USER], SamplingParams(seed=3, n=2, max_tokens=9, logprobs=0, return_prompt=True))
    assert whole["prompt_token_ids"] == result.prompt_token_ids
    for choice, output in zip(whole["choices"], result.outputs):
        assert choice["message"]["content"] == output.text and choice["token_ids"] == output.token_ids
        assert [one["logprob"] for one in choice["logprobs"]["content"]] == output.selected_logprobs
        spelled = bytes(byte for one in choice["logprobs"]["content"] for byte in one["bytes"])
        assert spelled.decode(errors="replace") == output.text


def test_parts_of_a_content_and_names_reach_the_template(server: Running) -> None:
    parts = [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}]
    told = server.told(
        "/tokenize", messages=[{"role": "user", "content": parts}], chat_template_kwargs={"thinks": True}
    )
    assert server.told("/detokenize", tokens=told["tokens"])["prompt"] == "<s>user: 1\n2\nassistant: <think>"


def test_tools_are_shown_and_calls_read(server: Running) -> None:
    shown = server.told("/tokenize", messages=[USER], tools=[TOOL])
    assert f"tools: {json.dumps(TOOL)}\n" in server.told("/detokenize", tokens=shown["tokens"])["prompt"]
    choice = server.told(PATH, messages=[USER], tools=[TOOL], **saying(f"Look:\n{CALL}\n{CALL} done"))["choices"][0]
    message = choice["message"]
    assert message["content"] == "Look:done" and choice["finish_reason"] == "tool_calls"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "add"]
    assert [json.loads(call["function"]["arguments"]) for call in message["tool_calls"]] == [{"a": 1, "b": "x"}] * 2
    ids = [call["id"] for call in message["tool_calls"]]
    assert len(set(ids)) == 2
    answer = {"role": "tool", "tool_call_id": ids[0], "content": "3"}
    assert server.told(PATH, messages=[USER, message, answer], tools=[TOOL], max_tokens=1)["choices"]


def test_a_forced_call_is_one(server: Running) -> None:
    named = {"type": "function", "function": {"name": "add"}}
    for choice, count in ((named, 1), ("required", 1)):
        told = server.told(
            PATH,
            messages=[USER],
            tools=[TOOL],
            tool_choice=choice,
            max_tokens=400,
            seed=1,
            temperature=0,
            parallel_tool_calls=False,
        )
        calls = told["choices"][0]["message"]["tool_calls"]
        arguments = json.loads(calls[0]["function"]["arguments"])
        assert len(calls) == count and set(arguments) == {"a", "b"} and arguments["b"] in ("x", "y")
        assert told["choices"][0]["message"]["content"] is None


def test_reasoning_stands_apart(server: Running) -> None:
    said = "<think>\nhm\n</think>\n\nyes"
    forced = server.told("/tokenize", prompt=said, add_special_tokens=False)["tokens"]
    message = server.told(PATH, messages=[USER], forced_token_ids=forced)["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    begun = server.told("/tokenize", prompt="hm</think>yes", add_special_tokens=False)["tokens"]
    body = {"messages": [USER], "forced_token_ids": begun, "chat_template_kwargs": {"thinks": True}}
    whole = server.told(PATH, **body)["choices"][0]["message"]
    assert (whole["reasoning_content"], whole["content"]) == ("hm", "yes")
    streamed = joined_chat(server.stream(PATH, **body))[0]["message"]
    assert (streamed["reasoning_content"], streamed["content"]) == ("hm", "yes")
    hidden = server.told(PATH, **body, include_reasoning=False)["choices"][0]["message"]
    assert "reasoning_content" not in hidden and hidden["content"] == "yes"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"messages": []}, "messages=[]"),
        ({"messages": "a"}, "messages='a'"),
        ({"messages": [{"content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content"),
        ({"messages": [USER], "max_tokens": 1, "max_completion_tokens": 2}, "two names"),
        ({"messages": [USER], "top_logprobs": 2}, "needs logprobs"),
        ({"messages": [USER], "logprobs": True, "top_logprobs": -5}, "top_logprobs=-5"),
        ({"messages": [USER], "tool_choice": "required"}, "tools is empty"),
        ({"messages": [USER], "tools": [TOOL, TOOL]}, "two functions of one name"),
        ({"messages": [USER], "tools": [{"type": "function"}]}, "tools[0].function is missing"),
        (
            {"messages": [USER], "tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice names 'f'",
        ),
        (
            {
                "messages": [USER],
                "tools": [TOOL],
                "tool_choice": "required",
                "response_format": {"type": "json_object"},
            },
            "tool_choice forces",
        ),
        ({"messages": [USER], "chat_template_kwargs": {"messages": []}}, "none of the template's own"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]}, "no"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_body_is_refused(server: Running, body: dict[str, Any], words: str) -> None:
    assert words in server.refused(PATH, **body)["message"]


LONG = "a " * 20_000


class Watched:
    """An engine and its tokenizer in one. threads: those that made something ids, which are how many had before."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []

    @property
    def tokenizer(self) -> Watched:
        return self

    def encode(self, *_: Any) -> list[int]:
        self.threads.append(threading.current_thread())
        return [len(self.threads)]

    lay_out = encode


@pytest.mark.parametrize(
    ("messages", "tools", "is_long"),
    [
        ([USER], None, False),
        ([{**USER, "content": LONG}], None, True),
        ([{**USER, "content": [{"type": "text", "text": LONG}]}], None, True),
        ([{"role": LONG, "content": "a"}], None, True),
        ([USER, {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": LONG}}]}], None, True),
        ([USER], [{"type": "function", "function": {"name": "f", "description": LONG}}], True),
    ],
)
def test_long_texts_are_laid_out_beside_the_event_loop(messages: Any, tools: Any, is_long: bool) -> None:
    """Wherever they stand: nobody else waits meanwhile."""
    watched: Any = Watched()
    (found,) = asyncio.run(prompts.of_chats(watched, [messages], tools=tools))
    assert found.token_ids == [1] and (watched.threads[0] is not threading.main_thread()) == is_long


@pytest.mark.parametrize("count", [2, 512])
def test_many_texts_of_one_body_are_made_ids_of_beside_the_event_loop(count: int) -> None:
    """Each of them is short, and all together are long."""
    watched: Any = Watched()

    async def both() -> None:
        told = await prompts.of_completion(watched, ["a " * 50, [7]] * count, True)
        assert [one.token_ids for one in told] == [ids for n in range(count) for ids in ([n + 1], [7])]
        assert len(await prompts.of_chats(watched, [[{**USER, "content": "a " * 50}]] * count)) == count

    asyncio.run(both())
    assert len(watched.threads) == 2 * count
    assert all((thread is not threading.main_thread()) == (count > 2) for thread in watched.threads)
