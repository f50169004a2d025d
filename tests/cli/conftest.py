"""Running the command line in this process, and a tiny model that `make-tiny` itself wrote."""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from perdure.cli import main


class Finished(NamedTuple):
    code: int
    out: str
    err: str


class Terminal(io.TextIOWrapper):
    """A stream that says it is one."""

    def isatty(self) -> bool:
        return True


def run_main(
    *arguments: object, stdin: str | bytes = b"", encoding: str = "utf-8", on_terminal: bool = False
) -> Finished:
    """What the `perdure` script does with these arguments; its streams are pipes unless it writes on a terminal."""
    stream = Terminal if on_terminal else io.TextIOWrapper
    data = stdin.encode() if isinstance(stdin, str) else stdin
    out, err = io.BytesIO(), io.BytesIO()
    before = sys.argv, sys.stdin, sys.stdout, sys.stderr
    sys.argv = ["perdure", *map(str, arguments)]
    sys.stdin = io.TextIOWrapper(io.BytesIO(data), encoding=encoding)
    sys.stdout, sys.stderr = stream(out, encoding=encoding), stream(err, encoding=encoding)
    try:
        main()
    except SystemExit as end:
        assert end.code is None or isinstance(end.code, int)
        code = end.code or 0
    else:
        code = 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        printed = out.getvalue().decode(), err.getvalue().decode()
        sys.argv, sys.stdin, sys.stdout, sys.stderr = before
    return Finished(code, *printed)


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """So small a model gains nothing from several, and they wait for one another wherever cores are shared."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def perdure() -> Callable[..., Finished]:
    return run_main


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("tiny") / "model"
    done = run_main("make-tiny", "llama", directory)
    assert done.code == 0, done.err
    return directory
