"""What somebody says in a chat, read line by line: a turn is a line, or several.

- A line that ends in a backslash goes on in the next. A turn that begins with three quotes ends with three, and holds
  whatever stands between, also what else would be a command.
- At the end of the input an unfinished turn is whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

PROMPT, GOES_ON = "> ", "... "
QUOTES = '"""'

Read = Callable[[str], str]
"""Gives a line, asking for it with a prompt. Raises EOFError after the last, KeyboardInterrupt when it is given up."""

_COMMAND = re.compile(r"\s*(/[a-z]+)(?:\s+(.*))?", re.DOTALL)


class Turn(NamedTuple):
    """One turn. command: the word behind which the rest stands, if it is one: `/system Be kind.`"""

    text: str
    command: str | None = None


def turns(read: Read, *, may_give_up: bool) -> Iterator[Turn]:
    """All turns, without empty ones. may_give_up: Ctrl-C gives up the turn that is being typed, not all."""
    while True:
        try:
            turn = _turn(read)
        except EOFError:
            return
        except KeyboardInterrupt:
            if not may_give_up:
                raise
            continue
        if turn.command is not None or turn.text.strip():
            yield turn


def _turn(read: Read) -> Turn:
    line = read(PROMPT)
    if line.lstrip().startswith(QUOTES):
        return Turn(_block(line.lstrip().removeprefix(QUOTES), read))
    if line.endswith("\\"):
        return Turn(_continued(line, read))
    if (found := _COMMAND.fullmatch(line)) is not None:
        return Turn((found[2] or "").strip(), found[1])
    return Turn(line)


def _continued(line: str, read: Read) -> str:
    parts = []
    while line.endswith("\\"):
        parts.append(line[:-1])
        try:
            line = read(GOES_ON)
        except EOFError:
            return "\n".join(parts)
    return "\n".join([*parts, line])


def _block(line: str, read: Read) -> str:
    lines = [line]
    while not lines[-1].rstrip().endswith(QUOTES):
        try:
            lines.append(read(GOES_ON))
        except EOFError:
            break
    else:
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
    return "\n".join(lines).strip("\n")
