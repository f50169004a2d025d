"""What comes in: arguments, stdin, lines, files of JSON, checked before anything looks at it."""

from __future__ import annotations

import json
import select
import sys
from array import array
from contextlib import suppress
from pathlib import Path
from typing import Any

from perdure import InvalidValue
from perdure.cli.output import complain

FROM_STDIN = "-"


def text_from(argument: str) -> str:
    """An argument's text; `-` stands for all of stdin, less the line's end that a shell puts last."""
    if argument != FROM_STDIN:
        return checked(argument, "the argument")
    return decoded(sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")


def piped_line(_prompt: str) -> str:
    """The next line of stdin, which nobody need be asked for. EOFError after the last."""
    line = sys.stdin.buffer.readline()
    if not line:
        raise EOFError
    return decoded(line).rstrip("\r\n")


def typed_line(prompt: str) -> str:
    """A line that somebody types, asked for again if its bytes are no text. EOFError at Ctrl-D, KeyboardInterrupt at
    Ctrl-C, both with the line ended."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing and history
    if _was_ended():
        print(prompt)
        raise EOFError
    while True:
        try:
            return checked(input(prompt), "the line")
        except (EOFError, KeyboardInterrupt):
            print()
            raise
        except UnicodeDecodeError as error:  # a strict stdin; another keeps such bytes, and `checked` finds them
            complain(f"the line is not UTF-8: byte {error.start} is {error.object[error.start]:#04x}; type it again")
        except InvalidValue as error:
            complain(f"{error}; type it again")


def _was_ended() -> bool:
    """Whether Ctrl-D was pressed while nothing was read: something waits, and it has no bytes. `input` would lose it,
    because a terminal forgets the key when its keys are read one by one."""
    try:
        import fcntl
        import termios
    except ImportError:
        return False
    if not select.select([sys.stdin], [], [], 0)[0]:
        return False
    num_bytes = array("i", [0])
    fcntl.ioctl(sys.stdin, termios.FIONREAD, num_bytes)
    return num_bytes[0] == 0


def objects_from(path: Path) -> list[dict[str, Any]]:
    """A JSON file's list of objects; a single object is a list of one."""
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidValue(f"{path}: not JSON ({error})") from None
    objects = [found] if isinstance(found, dict) else found
    if not isinstance(objects, list) or not all(isinstance(one, dict) for one in objects):
        raise InvalidValue(f"{path}: holds neither an object nor a list of objects")
    return objects


def decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise InvalidValue(f"stdin is not UTF-8: byte {error.start} is {data[error.start]:#04x}") from None


def checked(text: str, what: str) -> str:
    """The text, unless its bytes were none (Python keeps those as surrogates)."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise InvalidValue(f"{what} is not UTF-8: {text!r}") from None
    return text
