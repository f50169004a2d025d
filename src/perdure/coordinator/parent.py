"""A process started by another one: it is told what to be on its first line of input, and ends when its input does."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

STDIN, STDOUT = 0, 1


def first_line() -> bytes:
    """Without reading on: nothing of the standard library's own may wait for this input when the process ends."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(STDIN, 1)
        if not more:
            break
        line += more
    return line


def say(line: str) -> None:
    """To the process that started this one. If that is gone already, the input has ended as well; and nothing stays in
    a buffer, for Python tries once more to write it at its end, and fails then."""
    with contextlib.suppress(BrokenPipeError):
        os.write(STDOUT, line.encode() + b"\n")


def end_with_input(stop: Callable[[], None]) -> None:
    """Call `stop` once the process that holds the other end is gone, or wants us to go."""

    def watch() -> None:
        while os.read(STDIN, 4096):
            pass
        stop()

    threading.Thread(target=watch, name="perdure-input", daemon=True).start()
