"""Logits processors: functions of a caller's, found by the names that plans carry.

- A name `module:function` is imported. A function given as itself gets a name of its own and is held for its request.
- A function sees the true history (`History`) and a copy of the logits, and gives logits; what it raises, or gives that
  are no logits, is an error of its row alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import torch

from perdure.api.errors import InvalidValue
from perdure.api.sampling import HELD, LogitsProcessor
from perdure.ops.select import Floats
from perdure.runner.history import History


class Functions:
    """Held functions by name. Requests hold and release on callers' threads, the runner finds on its own."""

    def __init__(self) -> None:
        self._held: dict[int, tuple[Processor | None, ...]] = {}

    def hold(self, ticket: int, given: Sequence[Any]) -> tuple[str, ...]:
        """Names for what one request gave; its functions stay until `release`."""
        names = tuple(one if isinstance(one, str) else f"{HELD}{ticket}.{at}" for at, one in enumerate(given))
        self._held[ticket] = tuple(
            None if isinstance(one, str) else Processor(name, one) for name, one in zip(names, given, strict=True)
        )
        return names

    def release(self, ticket: int) -> None:
        self._held.pop(ticket, None)

    def find(self, name: str) -> Processor:
        """Raises `InvalidValue` if there is no such function."""
        if not name.startswith(HELD):
            return Processor(name, imported(name))
        ticket, at = name.removeprefix(HELD).split(".")
        found = self._held[int(ticket)][int(at)] if int(ticket) in self._held else None
        if found is None:
            raise InvalidValue(f"logits_processors: the function {name!r} is not of this process, or its request ended")
        return found


def imported(name: str) -> LogitsProcessor:
    """The function `module:function` names. Raises `InvalidValue`."""
    if name.startswith(HELD):
        raise InvalidValue(f"logits_processors: {name!r} was a function of another request: give 'module:function'")
    module, _, path = name.partition(":")
    try:
        found: Any = import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except Exception as error:
        raise InvalidValue(f"logits_processors: {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise InvalidValue(f"logits_processors: {name!r} is {found!r}, which is not a function")
    return found


class Processor:
    """One function, called as it was written: with the output's ids or with the prompt's too."""

    def __init__(self, name: str, function: LogitsProcessor) -> None:
        self._name = getattr(function, "__name__", name)
        self._function = function
        self._takes_prompt = _num_positional(function) >= 3

    def __call__(self, prompt_ids: History, output_ids: History, logits: Floats) -> Floats:
        """New logits [V]. Raises whatever the function does, or `InvalidValue` for what are no logits."""
        before = torch.from_numpy(logits.copy())
        shape = before.shape
        history = [prompt_ids, output_ids] if self._takes_prompt else [output_ids]
        after = self._function(*history, before)
        if not isinstance(after, torch.Tensor) or after.shape != shape:
            found = f"shape {list(after.shape)}" if isinstance(after, torch.Tensor) else type(after).__name__
            raise InvalidValue(f"the logits processor {self._name} gave {found}, not a tensor of shape {list(shape)}")
        values: Floats = after.detach().to("cpu", torch.float32).numpy()
        return values


def _num_positional(function: LogitsProcessor) -> int:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin that does not say
        return 2
    return sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)
