"""T69: a plain call prints nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from perdure import LLM, SamplingParams

llm = LLM(sys.argv[1])
params = SamplingParams(max_tokens=8, logprobs=1, stop=["never"])
outputs = llm.generate(["a", "b", [1, 2, 3], [-1]], params)
outputs += llm.generate(["c"], params, use_tqdm=True)
llm.chat([{"role": "user", "content": "hi"}], params)
llm.shutdown()
assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 3 + ["error", "length"]
"""


def test_T69_quiet_by_default(tiny: Path) -> None:
    """Loading, four prompts with one of them refused, a progress bar asked for away from a terminal, chat, shutdown."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "default", "-c", PROGRAM, str(tiny)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
