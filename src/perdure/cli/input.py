"""Text that comes in: arguments and stdin, checked to be text before anything looks at it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress

from perdure import InvalidValue

FROM_STDIN = "-"


def text_from(argument: str) -> str:
    """An argument's text; `-` stands for all of stdin, less the line's end that a shell puts last."""
    if argument != FROM_STDIN:
        return checked(argument, "the argument")
    return decoded(sys.stdin.buffer.read()).removesuffix("\n").removesuffix("\r")


def lines() -> Iterator[str]:
    """Lines of stdin as they come."""
    while line := sys.stdin.buffer.readline():
        yield decoded(line).rstrip("\r\n")


def typed_lines(prompt: str) -> Iterator[str]:
    """Lines that somebody types, until Ctrl-D; Ctrl-C gives up a line."""
    with suppress(ImportError):
        import readline  # noqa: F401 - gives `input` editing and history
    while True:
        try:
            yield checked(input(prompt), "the line")
        except KeyboardInterrupt:
            print()
        except EOFError:
            print()
            return


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
