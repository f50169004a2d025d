"""The README's tour and the examples of docs/sampling.md run as they stand there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "docs" / "sampling.md"]
BLOCKS = [block for page in PAGES for block in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_tour_runs(number: int, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(BLOCKS[number], f"block {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert shown.strip()
    if "capital of France" in BLOCKS[number]:
        assert "Paris" in shown
    if "llm" in names:
        names["llm"].shutdown()  # type: ignore[attr-defined]
