"""The layers of docs/architecture.md, read from the source of every module: which package may import which.

Every import counts, also those inside functions and under TYPE_CHECKING. `api`, `core`, `coordinator` and `trace` name
no tensor library and import only one another, downwards, so none of them reaches one through another module either.
Exempt are `perdure/__init__.py`, a table of lazy names, `perdure/__main__.py`, which calls the command line, and few
imports by name: `make-tiny` uses no engine, it calls the writer of tiny checkpoints; `coordinator`, `replica` and
`serve` are programs, which nobody calls from Python.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

SRC = Path(__file__).parents[1] / "src"
ROWS = [
    {"api"},
    {"core", "parallel", "coordinator"},
    {"ops"},
    {"models"},
    {"runner"},
    {"engine", "trace"},
    {"server", "conformance"},
    {"cli"},
]
ROW = {package: row for row, packages in enumerate(ROWS) for package in packages}
OUTERMOST = {"server", "conformance", "cli"}  # these know public names and `api` only
NOT_FOR = {
    "ops": {"api", "core"},
    "models": {"core"},
    "runner": {"core"},
    "engine": {"ops"},
    "trace": {"ops", "models", "runner"},
}  # lower, yet not to be known
ALLOWED = {
    ("perdure.cli.make_tiny", "perdure.models.tiny.make_tiny"),
    ("perdure.cli.coordinator", "perdure.coordinator.service.serve"),
    ("perdure.cli.coordinator", "perdure.engine.on_ray.serve_on_ray"),
    ("perdure.cli.replica", "perdure.engine.replica.serve"),
    ("perdure.cli.serve", "perdure.server.config.ServeConfig"),
    ("perdure.cli.serve", "perdure.server.serve.serve"),
}
WITHOUT_TENSORS = {"api", "core", "coordinator", "trace"}
TENSORS = {"torch", "transformers"}
WORLD = {"time", "datetime", "socket", "selectors", "asyncio", "threading", "random"}  # reach `core` as arguments


def modules() -> dict[str, Path]:
    found = {".".join(path.relative_to(SRC).with_suffix("").parts): path for path in SRC.glob("perdure/**/*.py")}
    return {name.removesuffix(".__init__"): path for name, path in found.items()}


def imports(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """Every dotted name that the source imports; `from a import b` counts as a.b, whatever b is."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            here = parts[: len(parts) + is_package - node.level] if node.level else []
            base = ".".join([*here, *filter(None, [node.module])])
            names += [f"{base}.{alias.name}" for alias in node.names]
    return names


def faults(module: str, source: str, *, is_package: bool = False) -> list[str]:
    """What the module imports against the layers, one line each."""
    me = module.split(".")[1]
    if me not in ROW:
        return [f"{module}: package {me!r} has no row; give it one here and in docs/architecture.md"]
    found = []
    for name in imports(module, source, is_package=is_package):
        top, *rest = name.split(".")
        if (module, name) in ALLOWED:
            continue
        if top != "perdure":
            if me in WITHOUT_TENSORS and top in TENSORS:
                found.append(f"{module} imports {name}: {me} knows no tensors")
            if me == "core" and top in WORLD:
                found.append(f"{module} imports {name}: core knows no clock, socket, thread or chance")
        elif not rest or rest[0] not in ROW:  # a public name
            if me not in OUTERMOST and rest != ["__version__"]:
                found.append(f"{module} imports {name}: it goes to the module that holds it")
        elif me in OUTERMOST and rest[0] not in {me, "api"}:
            found.append(f"{module} imports {name}: {me} knows public names only")
        elif rest[0] != me and (ROW[rest[0]] >= ROW[me] or rest[0] in NOT_FOR.get(me, ())):
            found.append(f"{module} imports {name}: {rest[0]} is not below {me}, or not for it to know")
    return found


def test_every_module_keeps_to_its_layer():
    exempt = {"perdure", "perdure.__main__"}
    checked = {name: path for name, path in modules().items() if name not in exempt}
    assert {"perdure.api", "perdure.core"} <= set(checked)
    found = []
    for name, path in checked.items():
        found += faults(name, path.read_text(), is_package=path.name == "__init__.py")
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("module", "line", "allowed"),
    [
        ("core.pages", "from perdure.api.plan import StepPlan", True),
        ("core.pages", "from perdure.core import prefix", True),
        ("core.pages", "from . import prefix", True),
        ("core.pages", "from ..parallel import mesh", False),
        ("core.pages", "import perdure.engine.loop", False),
        ("core.pages", "def f():\n    import torch.nn", False),
        ("core.pages", "import time", False),
        ("api.plan", "from perdure.core.pages import Pages", False),
        ("engine.loop", "from perdure import SamplingParams", False),
        ("engine.loop", "from perdure import __version__", True),
        ("engine.loop", "if TYPE_CHECKING:\n    from perdure.server import http", False),
        ("runner.runner", "from perdure.core.state import RequestState", False),
        ("runner.runner", "from perdure.models import llama", True),
        ("cli.generate", "from perdure import LLM", True),
        ("cli.generate", "from perdure.engine.llm import LLM", False),
        ("cli.generate", "from perdure.models.tiny import make_tiny", False),
        ("cli.make_tiny", "def f():\n    from perdure.models.tiny import make_tiny", True),
        ("engine.loop", "from perdure.ops import attention", False),
        ("odds.ends", "", False),
    ],
)
def test_the_check_sees(module, line, allowed):
    assert (not faults(f"perdure.{module}", line)) == allowed


@pytest.mark.parametrize("package", sorted(WITHOUT_TENSORS))
def test_loading_pulls_no_torch(package):
    """In a fresh process, over everything that these modules pull in turn."""
    names = [name for name in modules() if name == "perdure" or name.split(".")[1:2] == [package]]
    program = f"import sys\nfor n in {names!r}: __import__(n)\nprint(*({TENSORS!r} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
