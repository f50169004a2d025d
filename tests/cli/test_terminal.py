"""What differs on a terminal: text streams, colour, Ctrl-C. And what a script sees: quick help, quiet pipes."""

import io
import os
import select
import signal
import subprocess
import sys
import time
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
    ]
    for command in commands:
        piped, shown = perdure(*command), perdure(*command, on_terminal=True)
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


class Session:
    """A process whose terminal is ours."""

    def __init__(self, command: list[str]) -> None:
        pty = pytest.importorskip("pty")
        try:
            self._pid, self._terminal = pty.fork()
        except OSError as error:
            pytest.skip(f"no pseudo-terminal here: {error}")
        if self._pid == 0:
            signal.signal(
                signal.SIGINT, signal.default_int_handler
            )  # a background job would hand on that it is ignored
            os.execve(command[0], command, ENVIRONMENT)
        self._shown = ""
        self._deadline = time.monotonic() + PATIENCE_S

    def write(self, text: str) -> None:
        os.write(self._terminal, text.encode())

    def read_until(self, text: str) -> str:
        """What was shown up to and with the text."""
        while text not in self._shown:
            self._more()
        end = self._shown.index(text) + len(text)
        before, self._shown = self._shown[:end], self._shown[end:]
        return before

    def _more(self) -> None:
        ready, _, _ = select.select([self._terminal], [], [], max(0, self._deadline - time.monotonic()))
        assert ready, f"nothing more came after {self._shown[-200:]!r}"
        self._shown += os.read(self._terminal, 65536).decode(errors="replace")

    def exit_code(self) -> int:
        try:
            while True:
                self._more()
        except OSError:  # the other side is closed
            return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])

    def kill(self) -> None:
        os.kill(self._pid, signal.SIGKILL)


def test_chat_ctrl_c_ends_the_answer_only(perdure, tmp_path):
    model = tmp_path / "long"
    perdure("make-tiny", "llama", model, "--max-position-embeddings", "100000")
    session = Session([*PERDURE, "chat", "--model", str(model), "--ignore-eos", "--num-pages", "6250"])
    assert "/quit" in session.read_until("> ")
    session.write("half a line")
    session.read_until("half a line")
    time.sleep(0.5)  # let `input` begin to wait: a signal just before that is noticed with the next key only
    session.write("\x03")
    session.read_until("\n> ")
    session.write("Hi\n")
    session.read_until("Hi\r\n")
    for _ in range(20):
        session._more()  # it would go on for 100,000 tokens
    session.write("\x03")
    session.read_until("\r\n> ")
    session.write("/new\n")
    session.read_until("\n> ")
    session.write("\x04")
    assert session.exit_code() == 0
