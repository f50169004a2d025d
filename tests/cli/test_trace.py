"""`perdure trace`: what another command recorded, as a table, a Chrome trace and a picture."""

import json
from xml.etree import ElementTree

import pytest

HEAD = ["request", "queued", "first token", "pauses", "evictions", "tokens", "end"]


@pytest.fixture(scope="module")
def journal(perdure, tiny, tmp_path_factory):
    """Three requests of 40 new tokens in fewer pages than two of them need."""
    path = tmp_path_factory.mktemp("run") / "journal"
    options = ("--num-pages", "12", "--page-size", "4", "--max-tokens", "40", "--temperature", "0", "--ignore-eos")
    done = perdure("generate", "You", "and", "me", *options, "--journal", path, "--model", tiny)
    assert done.code == 0, done.err
    return path


def rows_of(printed):
    head, *rows = printed.splitlines()
    assert head.split() == " ".join(HEAD).split()
    return [dict(zip(HEAD, row.replace(" s ", " ").split(), strict=True)) for row in rows]


def test_trace_prints_a_row_a_request(perdure, journal):
    done = perdure("trace", journal)
    assert done.code == 0 and done.err.count("\n") == 1 and "https://ui.perfetto.dev" in done.err
    rows = rows_of(done.out)
    assert len({row["request"] for row in rows}) == 3
    for row in rows:
        assert (row["tokens"], row["end"]) == ("40", "length")
        assert 0 <= float(row["queued"]) <= float(row["first token"])  # in whole milliseconds
    assert sum(int(row["evictions"]) for row in rows) > 0


def test_trace_writes_beside_the_run_unless_told_where(perdure, journal, tmp_path):
    perdure("trace", journal)
    chrome, picture = (journal.with_name(f"{journal.name}{ending}") for ending in (".json", ".svg"))
    events = json.loads(chrome.read_text())["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names[0] == "steps" and len(set(names)) == 4
    assert {"prefill", "decode", "evicted", "recompute"} <= {event["name"] for event in events if event["ph"] == "X"}
    assert ElementTree.parse(picture).getroot().tag.endswith("svg")
    given = tmp_path / "a.json", tmp_path / "b.svg"
    done = perdure("trace", journal, "--chrome", given[0], "--picture", given[1])
    assert done.code == 0 and str(given[0]) in done.err and str(given[1]) in done.err
    assert (given[0].read_text(), given[1].read_text()) == (chrome.read_text(), picture.read_text())


def test_trace_of_a_torn_journal_says_so(perdure, journal, tmp_path):
    torn = tmp_path / "torn"
    torn.write_bytes(journal.read_bytes()[:-300])
    done = perdure("trace", torn)
    assert done.code == 0 and len(rows_of(done.out)) == 3
    said, _ = done.err.splitlines()
    assert said.startswith("the journal was cut short: its last ")


def test_trace_of_a_damaged_journal_shows_what_precedes(perdure, journal, tmp_path):
    damaged, content = tmp_path / "damaged", journal.read_bytes()
    damaged.write_bytes(content[:-3000] + bytes([content[-3000] ^ 1]) + content[-2999:])
    done = perdure("trace", damaged)
    assert done.code == 0 and len(rows_of(done.out)) == 3
    said, _ = done.err.splitlines()
    assert said.startswith(("the journal is damaged: the entry at byte ", "the journal was cut short: its last "))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda content: b"", "not a journal"),
        (lambda content: b"GGUF" + content, "not a journal"),
        (lambda content: content[:20], "ends before its first entry"),
        (lambda content: content[:100] + b"?" + content[101:], "the journal is damaged: the entry at byte"),
    ],
)
def test_trace_of_a_damaged_journal_is_one_line(perdure, journal, tmp_path, change, words):
    path = tmp_path / "damaged"
    path.write_bytes(change(journal.read_bytes()))
    done = perdure("trace", path)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith(f"perdure: {path}: ") and words in done.err
    assert sorted(tmp_path.iterdir()) == [path]


def test_trace_of_nothing_or_to_nowhere_is_one_line(perdure, journal, tmp_path):
    for arguments in ((tmp_path / "none",), (tmp_path,), (journal, "--chrome", tmp_path / "no" / "file")):
        done = perdure("trace", *arguments)
        assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
