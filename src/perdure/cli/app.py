"""`perdure` itself: its commands by name, `--version`, and how anything wrong is told.

- A wrong command line, or any error of perdure's own, is one line on stderr and exit code 2. Ctrl-C is exit code 130.
- Any other exception is a fault of ours and keeps its traceback.
"""

from __future__ import annotations

import io
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from perdure import PerdureError, __version__
from perdure.cli.bench import bench
from perdure.cli.chat import chat
from perdure.cli.coordinator import coordinator
from perdure.cli.generate import generate
from perdure.cli.info import info
from perdure.cli.logprobs import logprobs
from perdure.cli.make_tiny import make_tiny
from perdure.cli.output import complain, show_log_lines
from perdure.cli.replica import replica
from perdure.cli.serve import serve
from perdure.cli.trace import trace

EXIT_WRONG = 2
EXIT_INTERRUPTED = 130


class Commands(TyperGroup):
    """The group of all commands; its `main` is where every invocation ends."""

    def main(self, *args: Any, **extra: Any) -> Any:
        try:
            code = super().main(*args, **{**extra, "standalone_mode": False})
        except (KeyboardInterrupt, typer.Abort):
            code = EXIT_INTERRUPTED
        except Exception as error:
            line = _line_of(error)
            if line is None:
                raise
            complain(line)
            code = EXIT_WRONG
        sys.exit(code if isinstance(code, int) else 0)


def _line_of(error: Exception) -> str | None:
    """What to tell about an error that is not our fault."""
    if isinstance(error, PerdureError):
        return str(error)
    if isinstance(error, OSError) and error.strerror is not None:
        return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    wording = getattr(error, "format_message", None)  # what Typer raises for a wrong command line, whatever its class
    return None if wording is None else str(wording())


app = typer.Typer(
    name="perdure",
    cls=Commands,
    help="Run language models: a result depends on the model, the prompt, its settings and its seed, on nothing else.",
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)
for command in (generate, chat, logprobs, info, make_tiny, trace, serve, coordinator, replica):
    app.command()(command)
app.add_typer(bench, name="bench")


def _show_version(asked: bool) -> None:
    if asked:
        print(f"perdure {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a narrow encoding must not end an answer
    show_log_lines()
    if context.invoked_subcommand is None:
        print(context.get_help())


def main() -> None:
    """The entry point of the `perdure` script."""
    app(prog_name="perdure")
