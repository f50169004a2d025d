"""The README's tour runs as it stands there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_the_tour_runs(number: int, smollm2_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, object] = {}
    exec(compile(BLOCKS[number], f"README.md, block {number}", "exec"), names)
    shown = capsys.readouterr().out
    assert shown.strip()
    if "capital of France" in BLOCKS[number]:
        assert "Paris" in shown
    if "llm" in names:
        names["llm"].shutdown()  # type: ignore[attr-defined]
