"""What differs on a terminal: text streams, colour. And what a script sees: quick help, quiet pipes, completion."""

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from perdure.cli.output import write
from tests.cli.conftest import Terminal

SRC = Path(__file__).parents[2] / "src"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(SRC), "TERM": "dumb", "OMP_NUM_THREADS": "1"}
PERDURE = [sys.executable, "-m", "perdure"]
PATIENCE_S = 120  # a shared machine may take long to start a process that loads torch
GREEDY = ("--temperature", "0", "--max-tokens", "40")


@pytest.fixture
def coloured(monkeypatch):
    monkeypatch.setenv("TERM", "xterm-256color")
    for name in ("NO_COLOR", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)


def test_generate_streams_on_a_terminal(perdure, tiny, monkeypatch):
    """Part by part; joined they are the text that a pipe gets whole."""
    parts = []
    monkeypatch.setattr("perdure.cli.generate.write", parts.append)
    command = ("generate", "Hello", "--model", tiny, *GREEDY)
    perdure(*command, on_terminal=True)
    assert len([part for part in parts if part.strip()]) > 5
    whole = "".join(parts)
    parts.clear()
    perdure(*command)
    assert "".join(parts) == whole and len(parts) <= 2


def test_a_model_cannot_steer_the_terminal(monkeypatch):
    text = "a\tb\x1b[31mc\r\x07\x9b2Jd\n"
    for stream, expected in ((Terminal, "a\tb\ufffd[31mc\ufffd\ufffd\ufffd2Jd\n"), (io.TextIOWrapper, text)):
        monkeypatch.setattr(sys, "stdout", stream(io.BytesIO(), encoding="utf-8", newline=""))
        write(text)
        assert sys.stdout.buffer.getvalue().decode() == expected


def test_colour_only_on_a_terminal(perdure, tiny, coloured):
    commands = [
        ("generate", "Hello", "--model", tiny, *GREEDY),
        ("generate", "Hello", "--top-p", "2"),
        ("logprobs", "Hello", "--model", tiny),
        ("chat", "--model", tiny),
    ]
    for command in commands:
        piped, shown = (perdure(*command, stdin="/help\n", on_terminal=there) for there in (False, True))
        assert "\x1b[" not in piped.out + piped.err
        assert "\x1b[" in shown.out + shown.err


def test_logprobs_is_the_same_text_on_a_terminal(perdure, tiny, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    command = ("logprobs", "Hello, how are you?", "--model", tiny)
    assert perdure(*command, on_terminal=True).out == perdure(*command).out


def test_help_and_version_need_nothing_heavy():
    for arguments in (["--help"], ["--version"], ["generate", "--help"], ["generate", "Hello", "--top-p", "2"]):
        program = (
            f"import atexit, sys\nsys.argv = ['perdure', *{arguments}]\nfrom perdure.cli import main\n"
            "atexit.register(lambda: print('loaded:', {'torch', 'transformers', 'numpy'} & {*sys.modules}))\nmain()"
        )
        done = subprocess.run([sys.executable, "-c", program], env=ENVIRONMENT, capture_output=True, text=True)
        assert done.stdout.rstrip().endswith("loaded: set()"), done
    assert (
        "perdure 0." in subprocess.run([*PERDURE, "--version"], env=ENVIRONMENT, capture_output=True, text=True).stdout
    )


def test_a_reader_that_leaves_is_no_fault(tiny):
    command = [*PERDURE, "generate", "Hello", "--model", str(tiny), *GREEDY]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        command, env=ENVIRONMENT, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S
    )
    os.close(writer)
    assert done.returncode != 0 and "Traceback" not in done.stderr and "Broken pipe" not in done.stderr


@pytest.mark.parametrize(
    ("typed", "offered"), [("ben", ["bench"]), ("bench c", ["compare"]), ("chat --too", ["--tools"])]
)
def test_a_shell_completes(perdure, monkeypatch, typed, offered):
    """As the script that `perdure --install-completion` writes for bash asks."""
    monkeypatch.setenv("_PERDURE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", f"perdure {typed}")
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split())))
    assert perdure().out.split() == offered
