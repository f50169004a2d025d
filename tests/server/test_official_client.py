"""The official `openai` client, and the commands of the README, against servers that know nothing of them."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pydantic
import pytest

from perdure import LLM, SamplingParams
from tests.server.conftest import Running, running
from tests.server.test_chat import CALL, TOOL, USER, saying

README = Path(__file__).parents[2] / "README.md"
QUESTION: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Iterator[Running]:
    with running(None, {"served_model_name": "smollm2"}, num_pages=64) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_completions(client: openai.OpenAI, direct: LLM) -> None:
    [expected] = direct.generate(["abc"], SamplingParams(seed=4, max_tokens=12, logprobs=2))
    asked: dict[str, Any] = {"model": "tiny", "prompt": "abc", "seed": 4, "max_tokens": 12, "logprobs": 2}
    whole = client.completions.create(**asked, extra_body={"top_k": 0, "return_token_ids": True})
    assert whole.choices[0].text == expected.outputs[0].text
    assert whole.choices[0].logprobs is not None and whole.usage is not None
    assert whole.choices[0].logprobs.token_logprobs == expected.outputs[0].selected_logprobs
    parts = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for part in parts for choice in part.choices) == expected.outputs[0].text
    assert parts[-1].usage is not None and parts[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_chats_and_tools(client: openai.OpenAI) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "seed": 4, "max_completion_tokens": 9}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    parts = client.chat.completions.create(**asked, stream=True)
    said = [choice.delta.content or "" for part in parts for choice in part.choices]
    assert "".join(said) == whole.choices[0].message.content
    assert whole.choices[0].logprobs is not None and len(whole.choices[0].logprobs.content or []) == 9
    tools: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": [TOOL]}
    called = client.chat.completions.create(**tools, extra_body=saying(f"ok {CALL}"))
    assert called.choices[0].finish_reason == "tool_calls" and called.choices[0].message.tool_calls is not None
    call: Any = called.choices[0].message.tool_calls[0]
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 1, "b": "x"})
    with client.chat.completions.stream(**tools, extra_body=saying(f"ok {CALL}")) as stream:
        message: Any = stream.get_final_completion().choices[0].message
    assert message.content == "ok" and message.tool_calls[0].function.arguments == call.function.arguments


def test_errors_are_the_clients_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="temperature=-1") as bad:
        client.completions.create(model="tiny", prompt="a", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="a")
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_many_at_once(server: Running, direct: LLM) -> None:
    """The asynchronous client, streaming."""
    prompts = [[256, first, first] for first in range(12)]
    expected = direct.generate(prompts, SamplingParams(max_tokens=10, seed=1))

    async def one(client: openai.AsyncOpenAI, prompt: list[int]) -> str:
        parts = await client.completions.create(model="tiny", prompt=prompt, max_tokens=10, seed=1, stream=True)
        return "".join([choice.text async for part in parts for choice in part.choices])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(all_at_once()) == [result.outputs[0].text for result in expected]


class Capital(pydantic.BaseModel):
    """What a caller wants to have."""

    city: Literal["Paris", "Rome"]
    is_large: bool
    rank: Literal[1, 2, 3]


def test_answers_in_the_callers_own_classes(client: openai.OpenAI) -> None:
    """`parse` and `stream` of chats and responses, which send the class's schema and read the answer into it."""
    asked: dict[str, Any] = {"model": "tiny", "messages": QUESTION}
    whole = client.chat.completions.parse(**asked, response_format=Capital, seed=5, max_completion_tokens=100)
    found = whole.choices[0].message.parsed
    assert isinstance(found, Capital) and whole.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked, response_format=Capital, seed=5) as stream:
        assert stream.get_final_completion().choices[0].message.parsed == found
    response = client.responses.parse(model="tiny", input="?", text_format=Capital, extra_body={"seed": 5})
    assert isinstance(response.output_parsed, Capital)
    tool = openai.pydantic_function_tool(Capital)
    called = client.chat.completions.parse(**asked, tools=[tool], tool_choice="required", parallel_tool_calls=False)
    [call] = called.choices[0].message.tool_calls or []
    assert call.function.name == "Capital" and isinstance(call.function.parsed_arguments, Capital)


def test_one_loop_chats_streams_calls_and_responds(server: Running, client: openai.OpenAI) -> None:
    """The asynchronous client, all of it at once, gives what the other gives."""
    asked: dict[str, Any] = {"model": "tiny", "messages": [USER], "seed": 4, "max_completion_tokens": 9}
    tools: dict[str, Any] = {"model": "tiny", "messages": [USER], "tools": [TOOL], "extra_body": saying(f"ok {CALL}")}
    answer: dict[str, Any] = {"model": "tiny", "input": "1+2?", "max_output_tokens": 9, "extra_body": {"seed": 4}}
    expected = [
        client.chat.completions.create(**asked).choices[0].message.content,
        client.chat.completions.create(**tools).choices[0].message.tool_calls[0].function.arguments,  # type: ignore
        client.responses.create(**answer).output_text,
    ]

    async def chatted(client: openai.AsyncOpenAI) -> str:
        parts = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        found = [part async for part in parts]
        assert found[-1].usage is not None and found[-1].usage.completion_tokens == 9
        return "".join(choice.delta.content or "" for part in found for choice in part.choices)

    async def called(client: openai.AsyncOpenAI) -> str:
        async with client.chat.completions.stream(**tools) as stream:
            message = (await stream.get_final_completion()).choices[0].message
        return message.tool_calls[0].function.arguments  # type: ignore[index]

    async def responded(client: openai.AsyncOpenAI) -> str:
        async with client.responses.stream(**answer) as stream:
            said = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        return "".join(said)

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(chatted(client), called(client), responded(client))

    assert asyncio.run(all_at_once()) == expected


def test_headers_many_samples_and_a_stream_that_is_left(server: Running, client: openai.OpenAI) -> None:
    raw = client.chat.completions.with_raw_response.create(
        model="tiny", messages=QUESTION, n=3, max_tokens=4, extra_body={"request_id": "mine"}
    )
    assert raw.headers["x-request-id"] == "mine" and raw.parse().id == "mine"
    assert [choice.index for choice in raw.parse().choices] == [0, 1, 2]
    body: dict[str, Any] = {"ignore_eos": True}
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=900, stream=True, extra_body=body)
    assert next(iter(stream)).choices
    stream.close()
    server.check_empty()


def test_a_real_model_answers(smollm2: Running) -> None:
    with openai.OpenAI(base_url=f"{smollm2.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(model="smollm2", messages=QUESTION, temperature=0, max_tokens=16)
        assert "Paris" in (answer.choices[0].message.content or "")
        schema = {"type": "object", "properties": {"capital": {"enum": ["Paris", "Rome"]}}, "required": ["capital"]}
        structured = client.chat.completions.create(
            model="smollm2",
            messages=QUESTION,
            temperature=0,
            max_tokens=40,
            response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
        )
        assert json.loads(structured.choices[0].message.content or "")["capital"] == "Paris"


def test_the_commands_of_the_readme(smollm2: Running) -> None:
    if shutil.which("curl") is None:
        pytest.skip("no curl here")
    [block] = re.findall(r"```\n(curl .*?)```", README.read_text(), re.DOTALL)
    commands = re.findall(r"^curl (?:.|\n(?!curl))*", block, re.MULTILINE)
    assert len(commands) == 4
    shown = []
    for command in commands:
        command = command.strip().replace("http://127.0.0.1:8000", smollm2.url)
        done = subprocess.run(["bash", "-c", f"{command} -sS --fail"], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        shown.append(done.stdout)
    assert "Paris" in shown[0] and "token_ids" in shown[1] and shown[2].rstrip().endswith("data: [DONE]")
    assert "vllm:time_to_first_token_seconds_count" in shown[3]
