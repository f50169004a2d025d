"""What commands print and where: results on stdout, everything about them on stderr.

- Colour, and taking control characters out of a model's text, happen on a terminal only; a pipe gets the bare text.
- A message is always one line.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Sequence
from typing import TextIO

SCORE_OF_NOTHING = -9999.0
"""Stands for minus infinity in JSON, which has no such number."""

_CONTROL = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def write(text: str) -> None:
    """A part of a result, seen at once. On a terminal no text can move the cursor or change a colour."""
    sys.stdout.write(text.translate(_CONTROL) if sys.stdout.isatty() else text)
    sys.stdout.flush()


def remark(message: str, style: str = "dim") -> None:
    """One line about the result."""
    _styled(sys.stderr, (message, style))


def complain(message: str) -> None:
    """One line about what went wrong."""
    _styled(sys.stderr, ("perdure: ", "bold red"), (" ".join(message.split("\n")).strip(), ""))


def write_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns on stdout, aligned to the right but for the last, which stands as it is."""
    widths = [max(map(len, column)) for column in zip(head, *rows)][:-1]
    lines = ["  ".join([*(cell.rjust(width) for cell, width in zip(row, widths)), row[-1]]) for row in (head, *rows)]
    _styled(sys.stdout, (lines[0], "bold"))
    write("".join(f"{line}\n" for line in lines[1:]))


def json_number(value: float | None) -> float | None:
    return SCORE_OF_NOTHING if value == -math.inf else value


def _styled(stream: TextIO, *parts: tuple[str, str]) -> None:
    if not stream.isatty():
        print("".join(text for text, _ in parts), file=stream, flush=True)
        return
    from rich.console import Console
    from rich.text import Text

    Console(file=stream).print(Text.assemble(*parts), soft_wrap=True)


class _LogLines(logging.Handler):
    """A line each. An error keeps its traceback: the library logs one only for a fault of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        complain(f"{record.levelname.lower()}: {record.getMessage()}")
        if record.exc_info and record.levelno >= logging.ERROR:
            print(logging.Formatter().formatException(record.exc_info), file=sys.stderr)


def show_log_lines() -> None:
    """Let the library's warnings be seen."""
    log = logging.getLogger("perdure")
    if not any(isinstance(handler, _LogLines) for handler in log.handlers):
        log.addHandler(_LogLines(logging.WARNING))
