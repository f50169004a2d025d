"""`--config FILE`: a command's options from a YAML file, under their own names. The command line goes before it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
import yaml

from perdure import InvalidValue


def _configured(context: typer.Context, path: Path | None) -> Path | None:
    """Before all other options are read: the file's values become their defaults."""
    if path is not None:
        context.default_map = {**(context.default_map or {}), **_options(context.command, path)}
    return path


ConfigOption = Annotated[
    Path | None,
    typer.Option(
        "--config",
        callback=_configured,
        is_eager=True,
        metavar="FILE",
        help="Options from a YAML file, under the same names; those given here go before.",
        show_default=False,
    ),
]


def _options(command: Any, path: Path) -> dict[str, Any]:
    """Values by the names of parameters. Raises `InvalidValue`."""
    known = {
        option.removeprefix("--"): parameter
        for parameter in command.params
        for option in parameter.opts
        if option.startswith("--") and option not in ("--config", "--help")
    }
    kinds = inspect.signature(command.callback).parameters
    found: dict[str, Any] = {}
    for key, value in _read(path):
        parameter = known.get(str(key).replace("_", "-"))
        if parameter is None:
            raise InvalidValue(f"--config: {path} has {str(key)[:80]!r}, which is no option of `{command.name}`")
        if parameter.name in found:
            raise InvalidValue(f"--config: {path} has {key!r} twice")
        if value is not None:
            found[parameter.name] = _checked(key, value, parameter, kinds[parameter.name].annotation)
    return found


def _read(path: Path) -> list[tuple[Any, Any]]:
    """Keys and values in their order, those that stand there twice too."""
    try:
        text = path.read_text(encoding="utf-8")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return []
        if not isinstance(node, yaml.MappingNode):
            raise InvalidValue(f"--config: {path} holds no `option: value` lines")
        return [(loader.construct_object(key, True), loader.construct_object(value, True)) for key, value in node.value]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidValue(f"--config: {path} cannot be read: {reason}") from None
    except yaml.YAMLError as error:
        raise InvalidValue(f"--config: {path} is no YAML: {' '.join(str(error).split())}") from None


def _checked(key: Any, value: Any, parameter: Any, kind: Any) -> Any:
    """As the option takes it. Raises `InvalidValue` for another type, of which a text would be made otherwise."""
    if parameter.multiple and not isinstance(value, list):
        value = [value]
    try:
        msgspec.convert(value, kind, dec_hook=lambda own, given: own(given))
    except msgspec.ValidationError as error:
        raise InvalidValue(f"--config: {key}={value!r}: {str(error)[0].lower()}{str(error)[1:]}") from None
    return value
