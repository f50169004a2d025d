"""Fixtures that several kinds of tests share.

- Nothing heavy is imported here: tests/core and tests/sim run on a machine without torch.
- The environment sets amounts, never what is tested. `make soak` is the same tests with larger amounts; the Makefile
  lists the variables, and their everyday values are the defaults below.
"""

import os
from pathlib import Path

import pytest
from hypothesis import settings

from tests import rows

SIM_LIVES = int(os.environ.get("PERDURE_SIM_LIVES", "2000"))  # simulated lives at each depth
SOAK_FACTOR = int(os.environ.get("PERDURE_SOAK_FACTOR", "1"))  # how many times the everyday storms, examples and time
DATA = Path(os.environ.get("PERDURE_DATA", Path(__file__).parents[2] / "shared" / "data"))

# CI draws the same examples each time, a soak new ones; neither fails because a shared machine was slow.
settings.register_profile("perdure", deadline=None, derandomize=SOAK_FACTOR == 1, max_examples=100 * SOAK_FACTOR)
settings.load_profile("perdure")


def pytest_configure(config: pytest.Config) -> None:
    """A new run collects its rows anew (`make rows` shows them), but for the second half of one: PERDURE_ROWS=add."""
    os.environ.setdefault("PERDURE_WITNESS", str(rows.FILE))
    is_worker = hasattr(config, "workerinput")
    if not is_worker and os.environ.get("PERDURE_ROWS") != "add":
        rows.FILE.unlink(missing_ok=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section("rows")
    for line in rows.lines():
        terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def sim_lives() -> int:
    return SIM_LIVES


@pytest.fixture(scope="session")
def soak_factor() -> int:
    return SOAK_FACTOR


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """The shared data that is not part of this repository (stories260K and more)."""
    if not DATA.is_dir():
        pytest.skip(f"no test data at {DATA}; PERDURE_DATA names another place")
    return DATA


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The GGUF of SmolLM2-135M-Instruct, the default model."""
    from perdure.api.errors import ModelNotFound
    from perdure.models.default import default_model_path

    try:
        return Path(default_model_path())
    except ModelNotFound as error:
        pytest.skip(f"the default model is not installed: {error}")
