"""A temporary folder ends with the process that made it: by itself, or with the next one that makes one."""

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from perdure.engine.scratch import Scratch, remove_if_left

MAKER = "from perdure.engine.scratch import Scratch; s = Scratch(); print(s.path, flush=True); input()"


@pytest.fixture(autouse=True)
def apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    being_made = tmp_path / "perdure-run-new"
    being_made.mkdir()
    mine = Scratch()
    with subprocess.Popen([sys.executable, "-c", MAKER], stdin=-1, stdout=-1, text=True) as other:
        assert other.stdout is not None
        folder = Path(other.stdout.readline().strip())
        (folder / "set").mkdir()
        next_one = Scratch()
        remove_if_left(folder)
        assert folder.is_dir() and mine.path.is_dir() and being_made.is_dir()
        other.send_signal(signal.SIGKILL)
        other.wait()
    assert folder.is_dir()
    Scratch().remove()
    assert not folder.exists() and mine.path.is_dir() and next_one.path.is_dir()
    mine.remove()
    next_one.remove()
    assert list(tmp_path.iterdir()) == [being_made]
