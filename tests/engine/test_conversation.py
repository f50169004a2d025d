"""What reaches a chat template: messages, tools, tool calls, from every face and for both kinds of tokenizer."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from perdure import AsyncLLM, InvalidValue, SamplingParams
from perdure.engine.chat_template import render
from perdure.engine.conversation import laid_out
from tests.engine.conftest import MakeLLM

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "adds <two> numbers",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
TEMPLATE = (
    "{{ greeting or '' }}{% for tool in tools or [] %}[{{ tool | tojson }}]{% endfor %}"
    "{% for message in messages %}{{ message.role }}={{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}"
    " {{ call.function.arguments.a }}){% endfor %};{% endfor %}"
    "{% if add_generation_prompt %}go:{% endif %}"
)
USER = {"role": "user", "content": "1+2?"}
CALLED = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}],
    },
    {"role": "tool", "content": "3"},
]
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
ONE_TOKEN = SamplingParams(max_tokens=1, return_prompt=True)


@pytest.fixture
def printing(tiny: Path, tmp_path: Path) -> Path:
    """M with the template that prints all it is given."""
    for path in tiny.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return tmp_path


class Plain:
    """A tokenizer whose ids are letters, laying out as a GGUF's does."""

    def apply_chat_template(
        self, messages: Any, add_generation_prompt: bool = True, tools: Any = None, template_kwargs: Any = None
    ) -> list[int]:
        return list(map(ord, render(TEMPLATE, messages, add_generation_prompt, tools, {}, template_kwargs)))


def test_tools_and_calls_reach_the_template(printing: Path, make_llm: MakeLLM) -> None:
    llm = make_llm(printing)
    expected = f'[{json.dumps(TOOL)}]user=1+2?;assistant=(add {{"a": 1, "b": 2}} 1);tool=3;'
    assert llm.tokenizer is not None
    for generation_prompt in (True, False):
        [result] = llm.chat(CALLED, ONE_TOKEN, tools=[TOOL], add_generation_prompt=generation_prompt)
        assert result.prompt_token_ids is not None
        assert llm.tokenizer.decode(result.prompt_token_ids) == expected + ("go:" if generation_prompt else "")
    letters = laid_out(Plain(), CALLED, True, [TOOL])  # type: ignore[arg-type]
    assert "".join(map(chr, letters)) == expected + "go:"
    assert CALLED[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1, "b": 2}'  # type: ignore[index]


def test_without_tools_the_template_has_none(printing: Path, make_llm: MakeLLM) -> None:
    llm = make_llm(printing)
    assert llm.tokenizer is not None
    for tools in (None, []):
        [result] = llm.chat([USER], ONE_TOKEN, tools=tools)
        assert llm.tokenizer.decode(result.prompt_token_ids or []) == "user=1+2?;go:"


def test_further_names_reach_the_template(printing: Path, make_llm: MakeLLM) -> None:
    """From a directory and from a GGUF's renderer; those that are ours are refused."""
    llm = make_llm(printing)
    assert llm.tokenizer is not None
    [result] = llm.chat([USER], ONE_TOKEN, chat_template_kwargs={"greeting": "hello "})
    assert llm.tokenizer.decode(result.prompt_token_ids or []) == "hello user=1+2?;go:"
    letters = laid_out(Plain(), [USER], template_kwargs={"greeting": "hello "})  # type: ignore[arg-type]
    assert "".join(map(chr, letters)) == "hello user=1+2?;go:"
    for wrong, words in (({"messages": []}, "'messages', which is none"), ([1], "is no dictionary")):
        with pytest.raises(InvalidValue, match=words):
            llm.chat([USER], ONE_TOKEN, chat_template_kwargs=wrong)  # type: ignore[arg-type]


def test_arguments_that_are_objects_or_none_stay(printing: Path) -> None:
    for arguments, shown in (({"a": 5}, '{"a": 5} 5'), ("", "{} ")):
        call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
        letters = laid_out(Plain(), [call], False)  # type: ignore[arg-type]
        assert "".join(map(chr, letters)) == f"assistant=(f {shown});"


@pytest.mark.parametrize(
    ("messages", "tools", "words"),
    [
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}],
            None,
            "'f' are not JSON",
        ),
        ([USER], [1], "tools="),
        ([USER], TOOL, "tools="),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 2000}}]}],
            None,
            "'f' are not JSON",
        ),
        ([{"role": "user", "content": "\ud800"}], None, "not valid Unicode"),
        ([{"role": "user", "content": [{"type": "text", "text": 5}]}], None, r"content\[0\].text=5 is not a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], None, r"content\[0\].text=None is not a text"),
        ([USER, 5], None, r"messages\[1\]=5 is no message"),
        ([{"content": "a"}], None, r"messages\[0\].role=None is not a text"),
        ([{"role": "user"}], None, r"messages\[0\].content is missing"),
        ([{"role": "user", "contents": "a"}], None, r"messages\[0\].content is missing"),
        ([{"role": "user", "content": 5}], None, r"messages\[0\].content=5 is neither a text nor a list of parts"),
        ([{"role": "user", "content": [IMAGE]}], None, r"messages\[0\].content\[0\] is of type 'image_url'"),
        ([{"role": "user", "content": ["a"]}], None, r"messages\[0\].content\[0\] is of type None"),
    ],
)
def test_what_cannot_be_laid_out(make_llm: MakeLLM, messages: Any, tools: Any, words: str) -> None:
    with pytest.raises(InvalidValue, match=words) as caught:
        make_llm().chat(messages, ONE_TOKEN, tools=tools)
    assert "\n" not in str(caught.value)


def test_parts_of_a_content_are_its_lines(printing: Path, make_llm: MakeLLM) -> None:
    """As over HTTP; an assistant's message may have none."""
    llm = make_llm(printing)
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    others = [{"role": "assistant"}, {"role": "assistant", "content": None}]
    (found,) = llm.chat([{"role": "user", "content": parts}, *others], ONE_TOKEN)
    nothing = {"role": "assistant", "content": ""}
    (right,) = llm.chat([{"role": "user", "content": "one\ntwo"}, nothing, nothing], ONE_TOKEN)
    assert found.prompt_token_ids == right.prompt_token_ids


def test_of_several_conversations_a_bad_one_is_refused_alone(make_llm: MakeLLM) -> None:
    """In its place, and said which; alone it is raised. Tools serve all: wrong ones are the call's fault."""
    llm = make_llm()
    good = [USER]
    (expected,) = llm.chat(good, ONE_TOKEN)
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{a"}}]}
    for bad in ([5], 5, "1+2?", [call], []):
        given: Any = [good, bad, good]
        first, refused, last = llm.chat(given, ONE_TOKEN, request_ids=[7, 8, 9])
        assert isinstance(refused.error, InvalidValue) and str(refused.error).startswith("messages[1]: "), bad
        assert (refused.request_id, refused.outputs[0].finish_reason) == (8, "error")
        assert first.prompt_token_ids == last.prompt_token_ids == expected.prompt_token_ids
        given = [bad]
        (alone,) = llm.chat(given, ONE_TOKEN)
        assert str(alone.error).startswith("messages[0]: ")
    with pytest.raises(InvalidValue, match="tools="):
        llm.chat([good, good], ONE_TOKEN, tools=5)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match=r"messages='1\+2\?' is neither"):
        llm.chat("1+2?", ONE_TOKEN)  # type: ignore[arg-type]


def test_the_async_face_does_the_same(printing: Path, make_llm: MakeLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    [expected] = make_llm(printing).chat(CALLED, params, tools=[TOOL])

    async def streamed(llm: AsyncLLM) -> None:
        handle = llm.chat(CALLED, params, tools=[TOOL], request_id="asked")
        parts = [part.outputs[0].text async for part in handle]
        result = await handle
        assert (result.request_id, result.outputs[0].token_ids) == ("asked", expected.outputs[0].token_ids)
        assert "".join(parts) == expected.outputs[0].text
        refused = llm.chat([USER], params, tools=[1])  # type: ignore[list-item]
        with pytest.raises(InvalidValue, match="tools="):
            await refused

    async def main() -> None:
        async with AsyncLLM(str(printing), num_pages=320) as llm:
            await streamed(llm)

    asyncio.run(main())
