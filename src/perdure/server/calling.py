"""What a request says of tools: which the model is shown, what its output must be, and how calls are read from it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from perdure import InvalidValue
from perdure.server.protocol.chat import NamedTool, Tool
from perdure.server.tools import CONVENTIONS, parser_for
from perdure.server.tools.base import Parser
from perdure.server.tools.forced import ListParser, NamedParser, schema_of, schema_of_any


class Calling(NamedTuple):
    """shown: for the template; None = no tools. structure: what the output is made to be; None = nothing.
    make_parser: a new one for each output; None = all is text. most_calls: None = any number."""

    shown: list[dict[str, Any]] | None = None
    structure: dict[str, Any] | None = None
    make_parser: Callable[[], Parser] | None = None
    most_calls: int | None = None

    def parser(self) -> Parser | None:
        return None if self.make_parser is None else self.make_parser()

    @classmethod
    def of(
        cls,
        tools: Sequence[Tool] | None,
        choice: str | NamedTool | None,
        parallel: bool | None,
        convention: str | None,
    ) -> Self:
        """convention: how the model writes calls by itself. Raises `InvalidValue`."""
        if not tools:
            if choice not in (None, "none", "auto"):
                raise InvalidValue("tool_choice asks for a call, and tools is empty")
            return cls()
        names = [tool.function.name for tool in tools]
        if len(set(names)) < len(names):
            raise InvalidValue(f"tools has two functions of one name: {', '.join(names)[:200]}")
        told = [shown(tool) for tool in tools]
        if choice == "none":
            return cls(told)  # the caller reads calls himself, or wants none: the conversation looks the same
        most = 1 if parallel is False else None
        if isinstance(choice, NamedTool):
            wanted = next((tool for tool in tools if tool.function.name == choice.function.name), None)
            if wanted is None:
                raise InvalidValue(
                    f"tool_choice names {choice.function.name!r}, and tools has {', '.join(names)[:200]}"
                )
            return cls(told, schema_of(wanted), partial(NamedParser, wanted.function.name), 1)
        if choice == "required":
            return cls(told, schema_of_any(tools, most), ListParser, most)
        if convention is None:
            raise InvalidValue(
                "tools: how this model writes calls is not known, so it can call none by itself: ask for a call by"
                f" tool_choice, or start the server with --tool-call-parser {'|'.join(CONVENTIONS)}"
            )
        return cls(told, None, partial(parser_for, convention, tools), most)


def shown(tool: Tool) -> dict[str, Any]:
    """As the caller wrote it: without what was not given."""
    function = tool.function
    given = {name: getattr(function, name) for name in function.__struct_fields__}
    return {"type": tool.type, "function": {name: value for name, value in given.items() if value is not None}}
