"""Compiling the kernels and keeping them.

- The library is named by all it depends on: sources, flags, compiler, processor. Another of any is another file.
- It is written beside its final name and moved there, so processes that start together do not see half a file. One
  that is not what was compiled, by the digest beside it, is compiled again: a library cut short kills who loads it.
- Kept under $PERDURE_CACHE, else $XDG_CACHE_HOME/perdure, else ~/.cache/perdure; where that cannot be written, in a
  folder of this process's own.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from ctypes import c_float, c_int, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

SOURCES = Path(__file__).parent / "c"
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-pthread", "-w")
TUNING = ("-march=native", "-mcpu=native", "")  # the first that the compiler knows
COMPILE_SECONDS = 120
SWITCH = "PERDURE_NATIVE"
"""Set to 0, the kernels are not used."""

_POINTER = c_void_p
_SIGNATURES: dict[str, tuple[list[type], type | None]] = {
    "set_threads": ([c_int], None),
    "panel_bytes": ([c_int, c_int, c_long], c_long),
    "pack_floats": ([c_int, _POINTER, c_long, c_long, c_long, _POINTER], None),
    "pack_blocks": ([c_int, _POINTER, c_long, c_long, c_long, _POINTER], None),
    "rows_of": ([c_int, c_int, c_long, c_long, _POINTER, _POINTER, c_long, _POINTER], None),
    "product": (
        [c_int, c_int, c_long, c_long, _POINTER, _POINTER, c_long, c_long, _POINTER, _POINTER, c_long],
        None,
    ),
    "rms_norm": ([_POINTER, c_long, c_long, c_long, c_long, _POINTER, c_int, c_float, _POINTER], None),
    "gate": ([_POINTER, c_long, c_long, c_long, c_int, _POINTER], None),
    "rotate": ([_POINTER, c_long, c_long, c_long, c_long, _POINTER, _POINTER, c_long, _POINTER], None),
    "attention": ([_POINTER, _POINTER, c_long, _POINTER, c_int, _POINTER, c_long, _POINTER, _POINTER], None),
    "write_pages": (
        [c_long, c_long, c_long, _POINTER, _POINTER, c_long, _POINTER, c_long, _POINTER, c_long],
        None,
    ),
}


class BuildError(Exception):
    """There is no compiler, or it refused the sources."""


@dataclass(frozen=True)
class Library:
    """The loaded kernels. version: what their bits depend on, in words and as a short hash. folder: where they lie."""

    c: ctypes.CDLL
    version: str
    folder: Path

    def follow_torch(self) -> None:
        """Use as many threads as torch does. No result depends on it."""
        self.c.set_threads(torch.get_num_threads())


@cache
def _found() -> tuple[Library | None, str]:
    """The library, or why there is none."""
    if os.environ.get(SWITCH) == "0":
        return None, f"{SWITCH}=0"
    try:
        compiler = _compiler()
        return _load(*compiler), ""
    except BuildError as error:
        return None, str(error)


def library() -> Library | None:
    """The kernels, compiled if this machine has not done so before; None where they cannot be (`why_not`)."""
    return _found()[0]


def why_not() -> str:
    """Why `library` is None; empty where it is not."""
    return _found()[1]


def _compiler() -> tuple[list[str], str]:
    """Its command, and its name and version."""
    wanted = os.environ.get("CC")
    for command in ([wanted] if wanted else []) + list(COMPILERS):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise BuildError(f"CC={command!r}: {error}") from None
        if words and shutil.which(words[0]):
            return words, _output([*words, "--version"]).splitlines()[0]
        if command == wanted:
            raise BuildError(f"CC={command!r}: no such compiler")
    raise BuildError(f"no C compiler: none of {', '.join(COMPILERS)} is installed")


def _output(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL, timeout=COMPILE_SECONDS
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from None
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip() or f"exit status {done.returncode}").splitlines()
        raise BuildError(f"{command[0]}: {said[0]}")
    return done.stdout or done.stderr


def _load(compiler: list[str], compiler_version: str) -> Library:
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(repr((FLAGS, TUNING, compiler, compiler_version, _processor())).encode())
    for source in sorted(SOURCES.glob("*.[ch]")):
        digest.update(source.name.encode() + source.read_bytes())
    key = digest.hexdigest()[:16]
    folder = _folder()
    path = folder / f"kernels-{key}.so"
    if not _is_whole(path):
        _compile(compiler, sources, path)
    try:
        c = ctypes.CDLL(str(path))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(c, name)
            function.argtypes, function.restype = arguments, result
    except (OSError, AttributeError) as error:
        raise BuildError(f"{path}: {error}") from None
    library = Library(c, f"{compiler_version}, {key}", folder)
    library.follow_torch()
    return library


def _compile(compiler: list[str], sources: list[Path], path: Path) -> None:
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        made = Path(scratch) / path.name
        refusal: BuildError | None = None
        for tuning in TUNING:
            flags = [*FLAGS, *([tuning] if tuning else [])]
            try:
                _output([*compiler, *flags, *map(str, sources), "-o", str(made), "-lm"])
            except BuildError as error:
                refusal = refusal or error
                continue
            _digest_file(made).write_text(_digest(made))
            for file in (_digest_file(made), made):
                os.replace(file, path.with_name(file.name))
            return
    assert refusal is not None
    raise refusal


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _digest_file(path: Path) -> Path:
    return path.with_suffix(".sha256")


def _is_whole(path: Path) -> bool:
    """Whether the library is there, as it was compiled."""
    try:
        return _digest_file(path).read_text() == _digest(path)
    except (OSError, UnicodeDecodeError):
        return False


def _folder() -> Path:
    """Where libraries are kept, ours alone: what lies there is run."""
    base = os.environ.get("PERDURE_CACHE")
    root = Path(base) if base else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "perdure"
    folder = root / "native"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid == os.getuid() and os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return _own_folder()


@cache
def _own_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="perdure-native-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


def _processor() -> tuple[str, str]:
    """What code made for this machine depends on."""
    try:
        with open("/proc/cpuinfo") as file:
            lines = [line for line in file if line.startswith(("model name", "flags", "Features", "CPU part"))]
        return platform.machine(), "".join(sorted(set(lines)))
    except OSError:
        return platform.machine(), platform.processor()
