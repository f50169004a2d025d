"""`Scratch`: a temporary folder that is not left behind, however the process that made it ends.

Its maker holds a lock on a file in it, which the kernel lets go with the process. Whoever makes another one removes
those that nobody holds, and so do replicas that end after the process that started them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path
from typing import IO

PREFIX = "perdure-run-"
LOCK = "lock"


class Scratch:
    """path: of the folder. It lives until `remove`."""

    def __init__(self) -> None:
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            remove_if_left(folder)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = _locked(self.path)

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()


def _locked(folder: Path) -> IO[bytes]:
    """The lock appears under its name only once it is held: a folder without one is just being made."""
    file = open(folder / "new", "wb")  # noqa: SIM115 - held until the end
    fcntl.flock(file, fcntl.LOCK_EX)
    os.rename(folder / "new", folder / LOCK)
    return file


def remove_if_left(folder: Path) -> None:
    """Remove what a process left that is gone. Nothing happens to a folder that somebody holds, or another user's."""
    with contextlib.suppress(OSError), open(folder / LOCK, "r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
