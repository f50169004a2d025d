"""`perdure bench`: what it runs, what it reports, how it takes turns with another command, what it refuses."""

import json
import re
import shlex
import sys
from pathlib import Path

import msgspec
import pytest

from perdure import LLM, InvalidValue, SamplingParams
from perdure.cli.bench import report, workloads
from perdure.cli.bench.report import METRICS, Report

DATA = {"prompt_ids": [[5, 6, 7], [8, 9, 10, 11]], "new_tokens": 6}
PEER = """
import json, sys
asked = json.load(open(sys.argv[1]))
print("loading", asked["prompt_ids"], asked["new_tokens"], sys.argv[2], file=open(sys.argv[3], "a"))
print("ready", json.dumps({"words": 1}))
print(json.dumps({"seconds": 1000, "cpu_seconds": 500, "name": "a peer", "output_sha256": sys.argv[4], "more": 0}))
print("bye")
"""


@pytest.fixture(scope="module")
def answers(tiny):
    with LLM(str(tiny)) as llm:
        results = llm.generate(DATA["prompt_ids"], SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
    return [result.outputs[0].token_ids for result in results]


@pytest.fixture
def data(tmp_path, answers):
    path = tmp_path / "data.json"
    path.write_text(json.dumps(DATA | {"generated_ids": [answers[0], [*answers[1][:4], -1, -1]], "model": "tiny"}))
    return path


@pytest.fixture
def offline(perdure, tiny, tmp_path, data):
    """Runs `bench offline` on the data with a report; gives what was printed and the report."""

    def run(*arguments):
        file = tmp_path / "report.json"
        done = perdure("bench", "offline", *arguments, "--data", data, "--model", tiny, "--json", file)
        assert done.code == 0, done.err
        return done, json.loads(file.read_text())

    return run


def test_a_report(offline, tiny, answers):
    done, found = offline("cpu16", "--repeat", "2", "--no-batch-invariant")
    assert found["workload"] | {"sha256": ""} == {
        "name": "cpu16",
        "num_requests": 2,
        "num_prompt_tokens": 7,
        "num_new_tokens": 12,
        "sha256": "",
    }
    assert len(found["runs"]) == 2 and found["against"] is None
    for run in found["runs"]:
        assert run["seconds"] >= run["last_first_token_s"] >= run["first_token_s"] > 0 < run["cpu_seconds"]
    assert found["outputs"]["sha256"] == workloads.digest(answers)
    assert found["outputs"]["same_in_all_runs"] is True
    assert (found["outputs"]["num_expected"], found["outputs"]["num_as_expected"]) == (12, 10)
    setup = found["setup"]
    assert (setup["model"], setup["dtype"], setup["threads"]) == (str(tiny), "float32", 1)
    assert setup["batch_invariant"] is False and {"attention", "linear", "versions", "machine"} <= set(setup)
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", found["date"])

    assert "ids as expected: 10 of 12" in done.out and "batch_invariant         no" in done.out
    table = {line.split("  ")[-1]: line.split()[:3] for line in done.out.splitlines() if line}
    walls = [run["seconds"] for run in found["runs"]]
    assert [float(cell) for cell in table["wall time, s"]] == pytest.approx(
        [sum(walls) / 2, min(walls), max(walls)], abs=6e-4
    )
    assert set(METRICS) <= set(table)
    assert [line.split(":")[0] for line in done.err.splitlines()] == ["warm-up", "run 1 of 2", "run 2 of 2"]


def test_one_is_the_first_prompt(offline):
    found = offline("one", "--repeat", "1")[1]
    assert (found["workload"]["num_prompt_tokens"], found["outputs"]["num_as_expected"]) == (3, 6)


def test_turns_with_another_command(offline, tiny, tmp_path, answers):
    peer, log = tmp_path / "peer.py", tmp_path / "log"
    peer.write_text(PEER)
    command = [sys.executable, str(peer), "{workload}", "{model}", str(log), workloads.digest(answers)]
    done, found = offline("cpu16", "--repeat", "2", "--against", shlex.join(command))
    assert log.read_text() == f"loading {DATA['prompt_ids']} [6, 6] {tiny}\n" * 2
    said = [line.split(":")[0] for line in done.err.splitlines()]
    assert said == [
        "warm-up",
        *("run 1 of 2", "run 1 of 2, the other command", "run 2 of 2", "run 2 of 2, the other command"),
    ]
    ratio, by_cpu = report.ratios(msgspec.convert(found, Report))
    assert ratio.median == pytest.approx(sum(1000 / run["seconds"] for run in found["runs"]) / 2)
    assert by_cpu.least == pytest.approx(500 / max(run["cpu_seconds"] for run in found["runs"]))
    assert "against a peer, in turns" in done.out and done.out.endswith("\nthe same ids\n")
    assert re.search(r"0\.500 +0\.500 +0\.500 +cores got, theirs", done.out)


@pytest.mark.parametrize(
    ("program", "words"),
    [
        ("import sys; sys.exit('no memory')", "code 1: no memory"),
        ("print(1)", "no line of JSON"),
        ('print(\'{"seconds": 0, "cpu_seconds": 1}\')', "no line of JSON"),
        (None, "cannot be started"),
    ],
)
def test_another_command_that_fails(perdure, tiny, data, program, words):
    command = "/no/such/program" if program is None else shlex.join([sys.executable, "-c", program])
    done = perdure("bench", "offline", "--data", data, "--model", tiny, "--against", command)
    assert (done.code, done.out) == (2, "")
    last = done.err.splitlines()[-1]
    assert last.startswith("perdure: --against") and words in last


@pytest.mark.parametrize("name", workloads.MAKERS)
def test_the_drawn_workloads(name):
    one, again = (workloads.drawn(name, vocab_size=500, limit=8192) for _ in range(2))
    assert one == again and one.sha256 == again.sha256
    assert one.sha256 != workloads.drawn(name, vocab_size=300, limit=8192).sha256
    assert all(0 <= token < 500 for prompt in one.prompts for token in prompt)
    shape = (len(one.prompts), one.num_prompt_tokens, one.num_new_tokens)
    assert (
        shape
        == {
            "cpu16": (16, 3090, 1024),
            "one": (1, 237, 64),
            "prefix": (16, one.num_prompt_tokens, 512),
            "nano": (32, one.num_prompt_tokens, one.num_new_tokens),
        }[name]
    )


def test_the_shared_prefix_fits_the_model():
    for limit, shared in ((8192, 2000), (2064, 2000), (1000, 936), (80, 16)):
        made = workloads.drawn("prefix", vocab_size=500, limit=limit).check(limit)
        assert len({tuple(prompt[:shared]) for prompt in made.prompts}) == 1
        assert len({tuple(prompt[: shared + 8]) for prompt in made.prompts}) == 16
    with pytest.raises(InvalidValue, match="max_model_len is 60"):
        workloads.drawn("prefix", vocab_size=500, limit=60).check(60)


def test_prefix_and_nano_run(perdure, tiny, tmp_path):
    """Each run begins with nothing cached: what it finds there it put there."""
    file = tmp_path / "report.json"
    for name in ("prefix", "nano"):
        done = perdure("bench", "offline", name, "--repeat", "1", "--model", tiny, "--json", file)
        assert done.code == 0, done.err
        found = json.loads(file.read_text())
        cached = found["runs"][0]["cached_prompt_tokens"]
        assert (0 < cached < found["workload"]["num_prompt_tokens"]) == (name == "prefix"), (name, cached)
        assert ("from the prefix cache" in done.out) == (name == "prefix")


def test_the_data_of_the_tests_has_the_shape_of_cpu16():
    made = workloads.from_file("cpu16", Path(__file__).parents[1] / "data" / "cpu16.json")
    assert tuple(map(len, made.prompts)) == workloads.CPU16_LENGTHS
    assert made.new_tokens == [workloads.CPU16_NEW_TOKENS] * 16


def test_compare(perdure, offline, tmp_path):
    _, first = offline("cpu16", "--repeat", "1")
    second = json.loads(json.dumps(first))
    second["runs"][0]["seconds"] = first["runs"][0]["seconds"] * 2
    second["setup"]["threads"] = 7
    for name, one in (("a", first), ("b", second)):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))
    done = perdure("bench", "compare", tmp_path / "a.json", tmp_path / "b.json")
    assert done.code == 0, done.err
    rows = [re.split(r" {2,}", line.strip()) for line in done.out.splitlines()]
    table = {row[-1]: row[:-1] for row in rows}
    changes = [table[name][-1] for name in ("wall time, s", "output tokens/s", "cores got")]
    assert changes == ["2.000", "0.500", "0.500"]
    assert table["threads"] == ["1", "7"] and "dtype" not in done.out
    assert "the same ids" in done.out


def test_compare_refuses(perdure, offline, tmp_path, data):
    first, second = tmp_path / "a.json", tmp_path / "b.json"
    first.write_text(json.dumps(offline("cpu16", "--repeat", "1")[1]))
    second.write_text(json.dumps(offline("one", "--repeat", "1")[1]))
    for other, words in ((second, "different workloads, cpu16"), (data, "not a report"), (tmp_path / "c", "No such")):
        done = perdure("bench", "compare", first, other)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1) and words in done.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["offline", "huge"], ["'huge'", "cpu16, nano, prefix, one"]),
        (["offline", "nano", "--data", "x.json"], ["--data", "nano"]),
        (["offline", "--data", "/nowhere"], ["/nowhere", "No such"]),
        (["offline", "--json", "/no/such/file"], ["/no/such/file", "directory"]),
        (["offline", "--against", ""], ["--against", "empty"]),
        (["offline", "--against", "'"], ["--against", "quotation"]),
        (["offline", "--repeat", "0"], ["--repeat", "1"]),
        (["slow"], ["slow"]),
    ],
)
def test_a_bad_command_line(perdure, arguments, words):
    """Seen before any model is looked for."""
    done = perdure("bench", *arguments, *(["--model", "/nowhere"] if arguments[0] == "offline" else []))
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1), done
    assert all(word in done.err for word in words), done.err


@pytest.mark.parametrize(
    "content",
    ["[]", "{}", '{"prompt_ids": [], "new_tokens": 1}', '{"prompt_ids": [[]], "new_tokens": 1}']
    + ['{"prompt_ids": [[1]], "new_tokens": 0}', '{"prompt_ids": [[1]], "new_tokens": [1, 2]}', "ids"],
)
def test_bad_data(perdure, tmp_path, content):
    (tmp_path / "data.json").write_text(content)
    done = perdure("bench", "offline", "--data", tmp_path / "data.json", "--model", "/nowhere")
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1) and "data.json" in done.err


def test_a_request_longer_than_the_model_is_refused(perdure, tiny):
    done = perdure("bench", "offline", "cpu16", "--model", tiny)
    assert done.code == 2 and "cpu16: its longest request takes 318 tokens, max_model_len is 256" in done.err


def test_no_command_shows_the_help(perdure):
    done = perdure("bench")
    assert (done.code, done.err) == (0, "") and "offline" in done.out and "compare" in done.out
