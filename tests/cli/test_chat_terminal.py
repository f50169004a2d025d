"""A conversation in a real terminal: what somebody types and what they see, interruption included."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from perdure import LLM, SamplingParams

pexpect = pytest.importorskip("pexpect")

SRC = Path(__file__).parents[2] / "src"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(SRC), "TERM": "dumb", "OMP_NUM_THREADS": "1", "PYTHONUTF8": "1"}
PATIENCE_S = 120  # a shared machine may take long to start a process that loads torch
TYPING_S = 0.3
"""Until `input` has begun to wait: a signal just before that is noticed with the next key only."""

STOPPED = "stopped; what was said so far stays in the conversation"


class Somebody:
    """Types at a terminal whose program is `perdure chat`, and keeps all that is shown."""

    def __init__(self, *options: object, **environment: str) -> None:
        command = ["-m", "perdure", "chat", *map(str, options)]
        self._shown: list[str] = []
        try:
            self._process = pexpect.spawn(
                sys.executable,
                command,
                env=ENVIRONMENT | environment,
                timeout=PATIENCE_S,
                encoding="utf-8",
                codec_errors="replace",
                dimensions=(50, 1000),
                # a background job would hand on that it is ignored
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )
        except OSError as error:
            pytest.skip(f"no pseudo-terminal here: {error}")

    def sees(self, text: str) -> str:
        """What was shown from the last such call up to and with the text."""
        self._process.expect_exact(text)
        self._shown.append(self._process.before + self._process.after)
        return self._shown[-1]

    def types(self, line: str) -> None:
        self._process.sendline(line)

    def types_bytes(self, line: bytes) -> None:
        os.write(self._process.child_fd, line + b"\n")

    def presses(self, key: str, after_s: float = TYPING_S) -> None:
        time.sleep(after_s)
        self._process.send(key)

    def leaves(self) -> int:
        self._process.expect(pexpect.EOF)
        self._shown.append(self._process.before)
        self._process.close()
        return self._process.exitstatus

    def transcript(self) -> str:
        return "".join(self._shown).replace("\r\n", "\n")


def as_shown(text: str) -> str:
    """Without what could move the cursor."""
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


@pytest.fixture(scope="module")
def long_model(tmp_path_factory, perdure):
    """A model that may answer for 100,000 tokens."""
    model = tmp_path_factory.mktemp("long") / "model"
    perdure("make-tiny", "llama", model, "--max-position-embeddings", "100000")
    return model


def test_a_transcript(tiny):
    """All that a terminal shows, from the greeting to the end."""
    params = SamplingParams(temperature=0, max_tokens=12)
    with LLM(str(tiny)) as llm:

        def answer(*messages: tuple[str, str]) -> str:
            found = llm.chat([{"role": role, "content": content} for role, content in messages], params)
            return as_shown(found[0].outputs[0].text)

        first = answer(("user", "Hi"))
        second = answer(("user", "Hi"), ("assistant", first), ("user", "And\nyou?"))
        kind = answer(("system", "Be kind."), ("user", "/help"))
        kind_again = answer(("system", "Be kind."), ("user", "Hi"))
    me = Somebody("--model", tiny, "--temperature", "0", "--max-tokens", "12")
    me.sees("> ")
    me.types("Hi")
    me.sees("\n> ")
    me.types("And\\")
    me.sees("... ")
    me.types("you?")
    me.sees("\n> ")
    me.types("/nonsense")
    me.sees("\n> ")
    me.types("/system Be kind.")
    me.sees("\n> ")
    me.types('"""/help"""')
    me.sees("\n> ")
    me.types("/reset")
    me.sees("\n> ")
    me.types("Hi")
    me.sees("\n> ")
    me.types("/quit")
    assert me.leaves() == 0
    assert me.transcript() == (
        "Ctrl-C ends an answer, /help shows what can be typed, /quit or Ctrl-D ends the program.\n"
        f"> Hi\n{first}\n"
        f"> And\\\n... you?\n{second}\n"
        '> /nonsense\nperdure: /nonsense is no command; /help lists them, and """ before a text sends it as it is\n'
        f'> /system Be kind.\n> """/help"""\n{kind}\n'
        f"> /reset\n> Hi\n{kind_again}\n"
        "> /quit\n"
    )


def test_ctrl_c_ends_the_answer_and_not_the_program(long_model):
    me = Somebody("--model", long_model, "--ignore-eos", "--num-pages", "6250", "--speed")
    me.sees("> ")
    me.presses("half a line")
    me.sees("half a line")
    me.presses("\x03")
    me.sees("\r\n> ")
    me.types("Hi")
    me.sees("Hi\r\n")
    me.presses("\x03", after_s=1.0)  # it would go on for 100,000 tokens
    assert re.search(r"[^\s^]", me.sees(STOPPED)), "nothing was said before it was stopped"
    speed = me.sees("\r\n> ")
    new = re.search(r"(\d+) prompt tokens, (\d+) new tokens", speed)
    assert new is not None and 0 < int(new[2]) < 90_000
    me.types("And?")  # the conversation goes on with what was said
    me.sees("And?\r\n")
    me.presses("\x03\x03\x03", after_s=1.0)  # somebody impatient
    me.sees(STOPPED)
    again = re.search(r"(\d+) prompt tokens", me.sees("\r\n> "))
    assert again is not None and int(again[1]) > int(new[1]) + 5
    me.types("/new")
    me.sees("\n> ")
    me.presses("\x04")
    assert me.leaves() == 0


def test_ctrl_d_during_an_answer_ends_the_program_after_it(long_model):
    """As /quit does that is typed ahead; nobody has to press it again."""
    for typed in ("\x04", "/quit\r"):
        me = Somebody("--model", long_model, "--ignore-eos", "--num-pages", "6250", "--max-tokens", "500", "--speed")
        me.sees("> ")
        me.types("Hi")
        me.sees("Hi\r\n")
        me.presses(typed)
        assert me.leaves() == 0
        assert "500 new tokens" in me.transcript().replace(",", "")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
def test_a_line_that_is_not_utf8_is_asked_for_again(tiny, errors):
    """Whichever way stdin treats such bytes. The rest of a long turn stays as it was typed."""
    options = ("--model", tiny, "--temperature", "0", "--max-tokens", "1", "--speed")
    me = Somebody(*options, PYTHONIOENCODING=f"utf-8:{errors}", LC_ALL="C.UTF-8")  # else readline takes them for keys
    me.sees("> ")
    me.types("Hi\\")
    me.sees("... ")
    me.types("you")
    length = re.search(r"(\d+) prompt tokens", me.sees("\r\n> "))
    me.types("/reset")
    me.sees("\n> ")
    me.types_bytes(b"caf\xff\xfe")
    assert re.search(r"\r\nperdure: the line is not UTF-8: .*; type it again\r\n> $", me.sees("again\r\n> "))
    me.types("Hi\\")
    me.sees("... ")
    me.types_bytes(b"\xff\xfe")
    me.sees("type it again\r\n... ")
    me.types("you")
    again = re.search(r"(\d+) prompt tokens", me.sees("\r\n> "))
    assert length is not None and again is not None and again[1] == length[1]
    me.types("/quit")
    assert me.leaves() == 0


def test_ctrl_c_ends_a_pipes_program(long_model):
    """Nobody is there to go on."""
    command = [sys.executable, "-m", "perdure", "chat", "--model", str(long_model), "--ignore-eos"]
    child = subprocess.Popen(
        [*command, "--num-pages", "6250"],
        env=ENVIRONMENT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(b"Hi\nAnd?\n")
    child.stdin.flush()
    assert child.stdout.read(1)  # the answer has begun
    child.send_signal(signal.SIGINT)
    _, complaint = child.communicate(timeout=PATIENCE_S)
    assert (child.returncode, complaint) == (130, b"")
