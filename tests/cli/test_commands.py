"""Each command as a user or a script meets it, its streams being pipes: no colour, nothing on stdout but the result."""

import asyncio
import importlib
import json
import math
import re
import shutil
import sys

import pytest

from perdure import LLM, EngineDead, SamplingParams, StateError, StepFailed
from tests.models.helpers import write_gguf

chat = importlib.import_module("perdure.cli.chat")  # the package has the command by this name

GREEDY = ("--temperature", "0", "--max-tokens", "12")
SPEED = r"\d+ prompt tokens, 12 new tokens, [\d.]+ tokens/s, first token after [\d.]+ s\n"


@pytest.fixture(scope="module")
def expected(tiny):
    """What the Python interface gives for three prompts."""
    with LLM(str(tiny)) as llm:
        results = llm.generate(["Hello", "You and me", [1, 2, 3]], SamplingParams(temperature=0, max_tokens=12))
    return [result.outputs[0] for result in results]


def test_generate_prints_the_text_and_its_speed(perdure, tiny, expected):
    done = perdure("generate", "Hello", "--model", tiny, *GREEDY)
    assert (done.code, done.out) == (0, expected[0].text + "\n")
    assert re.fullmatch(SPEED, done.err)


def test_generate_several_prompts_in_their_order(perdure, tiny, expected):
    done = perdure("generate", "Hello", "You and me", "--ids", "1, 2,3", "--model", tiny, *GREEDY)
    texts = [one.text for one in expected]
    assert done.out == "==> Hello <==\n{}\n\n==> You and me <==\n{}\n\n==> 1,2,3 <==\n{}\n".format(*texts)
    assert done.err.count("\n") == 1 and " 36 new tokens" in done.err


def test_generate_reads_stdin(perdure, tiny, expected):
    for line_end in ("", "\n", "\r\n"):
        assert perdure("generate", "-", "--model", tiny, *GREEDY, stdin=f"Hello{line_end}").out == (
            expected[0].text + "\n"
        )


def test_generate_json(perdure, tiny, expected):
    done = perdure("generate", "Hello", "--ids=1,2,3", "--json", "--logprobs", "2", "--model", tiny, *GREEDY)
    lines = [json.loads(line) for line in done.out.splitlines()]
    assert [line["token_ids"] for line in lines] == [expected[0].token_ids, expected[2].token_ids]
    assert [line["text"] for line in lines] == [expected[0].text, expected[2].text]
    assert len({line["request_id"] for line in lines}) == 2
    for line in lines:
        assert line["finish_reason"] == "length" and line["stop_reason"] is None
        assert [row["token_id"] for row in line["logprobs"]] == line["token_ids"]
        for row in line["logprobs"]:
            assert len(row["top"]) == 2 and row["rank"] == 1 and row["logprob"] == row["top"][0]["logprob"] <= 0
    plain = json.loads(perdure("generate", "Hello", "--json", "--model", tiny, *GREEDY).out)
    assert set(plain) == {"request_id", "text", "token_ids", "finish_reason", "stop_reason"}


def test_generate_several_samples(perdure, tiny):
    drawn = ("--n", "3", "--max-tokens", "8", "--model", tiny)
    with LLM(str(tiny)) as llm:
        samples = llm.generate("Hello", SamplingParams(n=3, max_tokens=8))[0].outputs
    done = perdure("generate", "Hello", *drawn)
    assert done.out == "\n".join(f"==> sample {at + 1} <==\n{one.text}\n" for at, one in enumerate(samples))
    assert " 24 new tokens" in done.err
    lines = [json.loads(line) for line in perdure("generate", "Hello", "--json", *drawn).out.splitlines()]
    assert [(line["index"], line["token_ids"]) for line in lines] == [(one.index, one.token_ids) for one in samples]
    wrong = perdure("generate", "Hello", "--n", "0", "--model", tiny)
    assert wrong.code == 2 and "n=0 is below its least value 1" in wrong.err


def test_generate_stops_at_a_string(perdure, tiny, expected):
    stop = expected[0].text[4:6]
    before = expected[0].text.split(stop)[0]
    done = perdure("generate", "Hello", "--stop", "never", "--stop", stop, "--json", "--model", tiny, *GREEDY)
    assert json.loads(done.out) | {"finish_reason": "stop", "stop_reason": stop, "text": before} == json.loads(done.out)


def test_generate_with_penalties_bias_and_bad_words(perdure, tiny):
    """The command line's settings are the library's."""
    options = ["--repetition-penalty", "1.5", "--presence-penalty", "0.5", "--frequency-penalty", "1"]
    options += ["--logit-bias", "65=-100", "--logit-bias", "66=2.5", "--bad-word", "th", "--bad-word", "e"]
    greedy = ["--temperature", "0", "--max-tokens", "12", "--json"]
    done = perdure("generate", "Once", "--model", str(tiny), *greedy, *options)
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=1.0,
        logit_bias={65: -100, 66: 2.5},
        bad_words=["th", "e"],
    )
    with LLM(str(tiny)) as llm:
        truth = llm.generate("Once", params)[0].outputs[0].token_ids
    assert json.loads(done.out)["token_ids"] == truth
    plain = perdure("generate", "Once", "--model", str(tiny), *greedy)
    assert json.loads(plain.out)["token_ids"] != truth


def test_generate_structured(perdure, tiny, tmp_path):
    """Of a schema or a grammar in a file, a pattern, choices, an object: what the library gives for them."""
    schema = {"type": "array", "items": {"enum": ["a", 1]}, "minItems": 2, "maxItems": 2}
    file = tmp_path / "schema.json"
    file.write_text(json.dumps(schema))
    grammar = 'start: ("ab" | "cd") "."\n'
    (tmp_path / "grammar.lark").write_text(grammar)
    cases = [
        (["--grammar", str(tmp_path / "grammar.lark")], {"grammar": grammar}),
        (["--json-schema", str(file)], {"json": schema}),
        (["--regex", "[0-9]{3}-[a-z]{3}"], {"regex": "[0-9]{3}-[a-z]{3}"}),
        (["--choice", "left", "--choice", "right"], {"choice": ["left", "right"]}),
        (["--json-object"], {"json_object": True}),
    ]
    with LLM(str(tiny)) as llm:
        for options, asked in cases:
            done = perdure("generate", "Go", "--model", tiny, "--temperature", "0", "--max-tokens", "40", *options)
            params = SamplingParams(temperature=0, max_tokens=40, structured_outputs=asked)
            (result,) = llm.generate(["Go"], params)
            assert done.out == result.outputs[0].text + "\n"
            assert result.outputs[0].finish_reason == "stop" or "json_object" in asked  # which may have no end


def test_generate_at_least(perdure, tiny):
    ends = ("generate", "Go", "--model", tiny, *GREEDY, "--choice", "a", "--json")
    assert json.loads(perdure(*ends, "--choice", "b").out)["finish_reason"] == "stop"
    done = perdure("generate", "Go", "--model", tiny, *GREEDY, "--min-tokens", "13")
    assert done.code == 2 and "min_tokens=13" in done.err and "max_tokens" in done.err


def test_generate_chat_uses_the_template(perdure, tiny):
    with LLM(str(tiny)) as llm:
        [result] = llm.chat([{"role": "user", "content": "Hello"}], SamplingParams(temperature=0, max_tokens=12))
    assert perdure("generate", "--chat", "Hello", "--model", tiny, *GREEDY).out == result.outputs[0].text + "\n"


def test_generate_draws_by_the_seed(perdure, tiny):
    def sample(*options):
        done = perdure("generate", "Hello", "--json", "--max-tokens", "12", "--model", tiny, *options)
        return json.loads(done.out)["token_ids"]  # the request's id is another in each engine

    assert sample() == sample("--seed", "0") == sample("--steps-in-flight", "1", "--page-size", "4")
    assert sample() != sample("--seed", "1")
    assert sample("--top-k", "1") == sample("--temperature", "0") == sample("--top-p", "1e-9") == sample("--min-p", "1")


def test_generate_goes_past_the_end_if_told(perdure, tiny):
    """Of many samples some meet the end id; with --ignore-eos all are cut by the length."""
    prompts = [f"{number}" for number in range(40)]
    options = ("--json", "--model", tiny, "--max-tokens", "60", "--temperature", "50")
    ends = [json.loads(line)["finish_reason"] for line in perdure("generate", *prompts, *options).out.splitlines()]
    assert set(ends) == {"stop", "length"}
    done = perdure("generate", *prompts, *options, "--ignore-eos")
    assert {json.loads(line)["finish_reason"] for line in done.out.splitlines()} == {"length"}


def test_generate_one_bad_prompt_leaves_the_others(perdure, tiny, expected):
    prompts = ("Hello", "x" * 600)
    done = perdure("generate", *prompts, "--model", tiny, *GREEDY)
    assert done.code == 2 and done.out.startswith(f"==> Hello <==\n{expected[0].text}\n\n==> xxx")
    assert re.search(r"^perdure: prompt 2: the prompt has 601 tokens, max_model_len is 256$", done.err, re.M)
    done = perdure("generate", *prompts, "--json", "--model", tiny, *GREEDY)
    good, bad = map(json.loads, done.out.splitlines())
    assert (good["token_ids"], bad["finish_reason"], bad["token_ids"]) == (expected[0].token_ids, "error", [])
    assert "601" in bad["error"]


def test_generate_writes_ids_where_there_is_no_tokenizer(perdure, tiny, tmp_path, expected):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((tiny / name).read_bytes())
    done = perdure("generate", "--ids", "1,2,3", "--model", tmp_path, *GREEDY)
    assert done.out == ",".join(map(str, expected[2].token_ids)) + "\n"
    for arguments in (("generate", "Hello"), ("generate", "--chat", "Hello"), ("chat",)):
        done = perdure(*arguments, "--model", tmp_path)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1) and "tokenizer" in done.err


def test_generate_journal(perdure, tiny, tmp_path):
    journal = tmp_path / "journal"
    assert perdure("generate", "Hello", "--journal", journal, "--model", tiny, *GREEDY).code == 0
    assert journal.stat().st_size > 0


def test_generate_survives_a_narrow_encoding(perdure, tiny, expected):
    done = perdure("generate", "Hello", "--model", tiny, *GREEDY, encoding="ascii")
    assert done.out == expected[0].text.encode("ascii", "backslashreplace").decode() + "\n"


def test_logprobs_table(perdure, tiny):
    with LLM(str(tiny)) as llm:
        [result] = llm.logprobs("Hello")
        scores = result.prompt_logprobs
        ids = llm.tokenizer.encode("Hello")
    done = perdure("logprobs", "Hello", "--model", tiny)
    assert (done.code, done.err) == (0, "")
    head, *rows, total = done.out.splitlines()
    assert head.split() == ["at", "id", "logprob", "rank", "token"]
    assert [int(row.split()[1]) for row in rows] == ids
    assert rows[0].split() == ["0", "256", "-", "-", "'<s>'"]
    assert [row.split()[2] for row in rows[1:]] == [f"{score:.4f}" for score in scores.chosen]
    assert [int(row.split()[3]) for row in rows[1:]] == list(scores.rank)
    assert total == f"sum {sum(scores.chosen):.4f} over {len(scores.chosen)} tokens"


def test_logprobs_json_of_ids_and_of_a_continuation(perdure, tiny):
    whole = json.loads(perdure("logprobs", "--ids", "256,39,481", "--json", "--model", tiny).out)
    assert [row["token_id"] for row in whole["tokens"]] == [256, 39, 481]
    assert [row["logprob"] is None for row in whole["tokens"]] == [True, False, False]
    assert math.isclose(whole["sum"], sum(row["logprob"] for row in whole["tokens"][1:]))
    text = json.loads(perdure("logprobs", "Hello you", "--json", "--model", tiny).out)
    part = json.loads(perdure("logprobs", "Hello", "--continuation", " you", "--json", "--model", tiny).out)
    assert part["tokens"] == text["tokens"][-len(part["tokens"]) :]
    assert part["sum"] == pytest.approx(sum(row["logprob"] for row in part["tokens"]))


def test_info(perdure, tiny):
    done = perdure("info", "--model", tiny, "--num-pages", "32", "--no-batch-invariant")
    shown = dict(re.split("  +", line, maxsplit=1) for line in done.out.splitlines())
    assert shown["pool"] == "512 tokens, 2 requests of full length"
    assert (shown["model"], shown["num_pages"], shown["batch_invariant"]) == (str(tiny), "32", "no")
    assert (shown["parameters"], shown["weights_bytes"]) == ("164,160", "641.2 KiB")
    found = json.loads(perdure("info", "--model", tiny, "--num-pages", "32", "--json").out)
    assert set(found) == set(shown) and found["num_pages"] == 32 and found["batch_invariant"] is True


def test_quantization_is_an_option_of_every_command_that_runs_a_model(perdure, tiny, tmp_path):
    """The ids of the expanded model, in less memory; `info` shows it, a report keeps it."""
    model = write_gguf(tiny, tmp_path / "m.gguf", "Q8_0")
    kept = ("--model", model, "--quantization", "gguf")
    shown = [json.loads(perdure("info", "--json", *options).out) for options in (kept, kept[:2])]
    assert [one["quantization"] for one in shown] == ["gguf", "none"]
    assert shown[0]["weights_bytes"] < shown[1]["weights_bytes"] / 3
    assert dict(line.split(None, 1) for line in perdure("info", *kept).out.splitlines())["quantization"] == "gguf"
    said, expanded = (perdure("generate", "Hello", *options, *GREEDY) for options in (kept, kept[:2]))
    assert said.code == 0 and said.out == expanded.out
    assert perdure("chat", *kept, *GREEDY, stdin="Hi\n").code == 0
    assert perdure("logprobs", "Hello", *kept).code == 0
    (tmp_path / "data.json").write_text('{"prompt_ids": [[1, 2, 3]], "new_tokens": 4}')
    options = ("--data", tmp_path / "data.json", "--repeat", "1", "--json", tmp_path / "report.json")
    assert perdure("bench", "offline", "one", *kept, *options).code == 0
    assert json.loads((tmp_path / "report.json").read_text())["setup"]["quantization"] == "gguf"
    done = perdure("info", "--model", tiny, "--quantization", "gguf")
    assert done.code == 2 and f"{tiny} is loaded as none" in done.err


def test_progress_is_said_if_asked(perdure, tiny):
    assert perdure("info", "--model", tiny).err == ""
    said = perdure("info", "--model", tiny, "--progress").err.splitlines()
    assert [line.split()[1] for line in said] == ["loading", "ready", "KV"]


def test_info_warns_in_one_line_of_a_small_pool(perdure, tiny):
    done = perdure("info", "--model", tiny, "--num-pages", "2")
    assert done.code == 0
    assert re.fullmatch(r"perdure: warning: the KV pool holds 32 tokens, .*\n", done.err)


def test_make_tiny_says_what_it_wrote_and_repeats(perdure, tmp_path):
    first, second, other = (tmp_path / name for name in ("a", "b", "c"))
    done = perdure("make-tiny", "llama", first, "--seed", "3")
    written = sorted(first.iterdir())
    assert [line.split("  ")[0] for line in done.out.splitlines()] == [str(path) for path in written]
    perdure("make-tiny", "llama", second, "--seed", "3")
    assert all((second / path.name).read_bytes() == path.read_bytes() for path in written)
    perdure("make-tiny", "llama", other, "--seed", "4", "--num-shards", "2", "--max-position-embeddings", "64")
    assert len(list(other.glob("*.safetensors"))) == 2
    info = json.loads(perdure("info", "--json", "--model", other).out)
    assert (info["max_model_len"], info["parameters"]) == (64, 164160)


def test_chat_over_a_pipe_keeps_the_conversation(perdure, tiny):
    with LLM(str(tiny)) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}]
        first = llm.chat(messages, params)[0].outputs[0].text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And?"}]
        second = llm.chat(messages, params)[0].outputs[0].text
        [alone] = llm.chat([messages[0], messages[3]], params)
    options = ("--system", "Be kind.", "--model", tiny, *GREEDY)
    done = perdure("chat", *options, stdin="Hi\n\nAnd?\n/new\nAnd?\n/quit\nHi\n")
    assert (done.code, done.err) == (0, "")
    assert done.out == f"{first}\n{second}\n{alone.outputs[0].text}\n"
    assert perdure("chat", *options, stdin="Hi\r\nAnd?").out == f"{first}\n{second}\n"


def test_chat_commands_and_long_turns_over_a_pipe(perdure, tiny):
    """What is sent, seen by the prompts' lengths that --speed tells: each letter or so is a token."""
    block = '"""\n/quit\n\nmore"""\n'
    said = f"Hi\n/reset\nHi\\\nyou\n/reset\n{block}/system Be kind.\nHi\n/system\nHi\n/usr/bin is a path\n/quit\nHi\n"
    done = perdure("chat", "--speed", "--model", tiny, "--temperature", "0", "--max-tokens", "1", stdin=said)
    assert done.code == 0 and done.out.count("\n") >= 6
    with LLM(str(tiny)) as llm:
        kind = {"role": "system", "content": "Be kind."}
        turns = [[user("Hi")], [user("Hi\nyou")], [user("/quit\n\nmore")], [kind, user("Hi")], [user("Hi")]]
        lengths = [len(llm.tokenizer.apply_chat_template(turn)) for turn in turns]
    speeds = [int(line.split()[0]) for line in done.err.splitlines()]
    assert len(set(lengths)) == 4 and speeds[:5] == lengths and len(speeds) == 6


def user(text):
    return {"role": "user", "content": text}


def test_chat_help_and_an_unknown_command_over_a_pipe(perdure, tiny):
    done = perdure("chat", "--model", tiny, *GREEDY, stdin="/help\n/nonsense now\nHi\n")
    assert (done.code, done.out) == (2, "")
    *shown, last = done.err.splitlines()
    assert all(any(word in line for line in shown) for word in ("/reset", "/new", "/system", "/quit", '"""'))
    assert last.startswith("perdure: /nonsense is no command")


def test_chat_shows_the_template_its_tools(perdure, tiny, tmp_path):
    """With a template that prints them as messages of their own."""
    model = tmp_path / "model"
    shutil.copytree(tiny, model)
    config = json.loads((model / "tokenizer_config.json").read_text())
    template = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}" + config["chat_template"]
    (model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": template}))
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    (tmp_path / "one.json").write_text(json.dumps(tool))
    (tmp_path / "two.json").write_text(json.dumps([tool, tool]))
    with LLM(str(model)) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        expected = [llm.chat([user("Hi")], params, tools=[tool] * n)[0].outputs[0].text for n in (0, 1, 2)]
    assert len(set(expected)) == 3
    for text, options in zip(expected, ([], ["--tools", tmp_path / "one.json"], ["--tools", tmp_path / "two.json"])):
        assert perdure("chat", "--model", model, *GREEDY, *options, stdin="Hi\n").out == f"{text}\n"
    for content in ("[1]", "3", "{"):
        (tmp_path / "bad.json").write_text(content)
        done = perdure("chat", "--model", "/nowhere", "--tools", tmp_path / "bad.json")
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1) and "bad.json" in done.err


def test_chat_ends_when_the_conversation_is_too_long(perdure, tiny):
    done = perdure("chat", "--model", tiny, *GREEDY, stdin="Hi\n" + "x" * 600 + "\nHi\n")
    assert done.code == 2 and done.out.count("\n") >= 1
    assert re.fullmatch(r"perdure: the prompt has \d+ tokens, max_model_len is 256\n", done.err)


def test_chat_on_a_terminal_goes_on_after_a_turn_that_fails(monkeypatch, capsys):
    """Whatever ended its answer, unless the engine is dead: then nothing more could be answered."""
    errors = iter([StepFailed("the step failed"), StateError("suspended"), EngineDead("gone"), AssertionError("more")])

    class Failing:
        async def answer(self, text, *, interruptible):
            raise next(errors)

    lines = iter(["one", "two", "three", "four"])
    monkeypatch.setattr(chat, "typed_line", lambda prompt: next(lines))
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    with asyncio.Runner() as runner, pytest.raises(EngineDead):
        chat._converse(runner, Failing(), speed=False)
    told = capsys.readouterr().err
    assert "the step failed" in told and "suspended" in told and next(lines) == "four"


def test_no_command_shows_the_help(perdure):
    done = perdure()
    assert done.code == 0 and all(name in done.out for name in ("generate", "chat", "logprobs", "info", "make-tiny"))
    assert done.out.strip() == perdure("--help").out.strip()
