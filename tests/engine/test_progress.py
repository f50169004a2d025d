"""`progress=True`: what an engine says of its work. Without it nothing is said (T69, test_quiet.py)."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from perdure import SamplingParams
from perdure.engine import progress
from tests.engine.conftest import MakeLLM

LONG = SamplingParams(max_tokens=100, ignore_eos=True)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_loading_the_pool_and_a_call(make_llm: MakeLLM, tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    llm = make_llm(progress=True)
    llm.generate([[1, 2, 3], [4, 5], [-1]], SamplingParams(max_tokens=4, ignore_eos=True))
    out, err = capsys.readouterr()
    loading, ready, pool, call = err.splitlines()
    assert out == ""
    assert re.fullmatch(rf"perdure: loading {re.escape(str(tiny))} \(\d+\.\d KiB\)", loading)
    assert re.fullmatch(
        r"perdure: ready in \d+\.\d s: LlamaForCausalLM, 164,160 parameters, 641\.2 KiB in float32", ready
    )
    assert re.fullmatch(r"perdure: KV pool: [\d,]+ tokens, \d+ requests of full length, [\d.]+ \w+", pool)
    assert re.fullmatch(
        r"perdure: 2 requests, 5 prompt tokens, 8 new tokens in \d+\.\d s: \d+\.\d tokens/s", call
    )  # the refused one is no request


def test_a_long_call_says_a_line_now_and_then(
    make_llm: MakeLLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_S", 0.02)
    llm = make_llm(progress=True)
    capsys.readouterr()
    llm.generate([[token] for token in range(8)], LONG)
    *lines, _ = capsys.readouterr().err.splitlines()
    rates = [re.fullmatch(r"perdure: generating: \d of 8 requests done, (\d+\.\d) tokens/s", line) for line in lines]
    assert len(rates) >= 2 and all(rates)
    assert max(float(rate[1]) for rate in rates if rate) > 10


@pytest.mark.parametrize(("asked", "use_tqdm"), [(True, False), (False, True), (False, False)])
def test_a_bar_on_a_terminal(make_llm: MakeLLM, asked: bool, use_tqdm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setattr(progress, "TICK_S", 0.02)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    llm = make_llm(progress=asked)
    llm.generate([[token] for token in range(8)], LONG, use_tqdm=use_tqdm)
    shown = terminal.getvalue()
    assert bool(re.search(r"generating.*0/8", shown)) == (asked or use_tqdm)
    assert bool(re.search(r"\d tokens/s", shown)) == (asked or use_tqdm)
    assert ("8 requests, 8 prompt tokens, 800 new tokens" in shown) == asked
    assert "requests done" not in shown
