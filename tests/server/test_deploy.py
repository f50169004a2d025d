"""deploy/: what can be seen of it without a cluster: its syntax, and that its options, places and times fit."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from perdure.cli.serve import CONTROL_KEY_VARIABLE, KEY_VARIABLE, serve
from perdure.server.app import ENDPOINTS

DEPLOY = Path(__file__).parents[2] / "deploy"
OPEN = {one.path for one in ENDPOINTS if one.access == "open"}


def check_options(command: str) -> None:
    """All are options of `perdure serve`."""
    known = {f"--{name.replace('_', '-')}" for name in inspect.signature(serve).parameters}
    given = set(re.findall(r"--[a-z][a-z-]+", command))
    assert given and given <= known, given - known


def drain_timeout(command: str) -> float:
    found = re.search(r"--drain-timeout[\", ]+(\d+)", command)
    assert found is not None
    return float(found[1])


def test_the_deployment() -> None:
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod: dict[str, Any] = deployment["spec"]["template"]["spec"]
    [container] = pod["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startup": "/health",
        "readiness": "/ready",
        "liveness": "/health",
    }
    assert {probe["path"] for probe in probes.values()} <= OPEN  # no key is sent
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == service["spec"]["selector"] == labels
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    arguments = " ".join(container["args"])
    check_options(arguments)
    before_stop = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert before_stop + drain_timeout(arguments) + 10 <= pod["terminationGracePeriodSeconds"]
    assert {KEY_VARIABLE, CONTROL_KEY_VARIABLE} <= {one["name"] for one in container["env"]}
    mounts = {one["name"] for one in container["volumeMounts"]}
    assert mounts == {one["name"] for one in pod["volumes"]}


def test_the_image() -> None:
    lines = (DEPLOY / "Dockerfile").read_text()
    [entry] = re.findall(r"^ENTRYPOINT (.*)$", lines, re.MULTILINE)
    assert entry.startswith('["perdure", "serve"')
    check_options(entry)
    assert "/health" in lines.partition("HEALTHCHECK")[2] and "/health" in OPEN
    assert re.search(r"^USER (?!0\b)\d+$", lines, re.MULTILINE)  # a number, which runAsNonRoot can see
    copied = re.findall(r"^COPY (.*) \S+$", lines, re.MULTILINE)
    kept = (DEPLOY / "Dockerfile.dockerignore").read_text()
    for name in " ".join(copied).split():
        assert (DEPLOY.parent / name).exists() and f"!{name}\n" in kept


def test_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "perdure.service").read_text()
    settings = dict(re.findall(r"^(\w+)=(.*)$", unit, re.MULTILINE))
    command, _, arguments = settings["ExecStart"].partition(" ")
    check_options(arguments)
    check_options(re.search(r"^#   OPTIONS=(.*)$", unit, re.MULTILINE)[1])  # type: ignore[index]
    assert drain_timeout(arguments) + 10 <= float(settings["TimeoutStopSec"])
    assert settings["KillMode"] == "mixed"  # whoever drains ends the others
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze here; the rest holds")
    there = tmp_path / "perdure.service"
    there.write_text(unit.replace(command, "/bin/true").replace("User=perdure", "DynamicUser=yes"))
    done = subprocess.run(["systemd-analyze", "verify", str(there)], capture_output=True, text=True, timeout=60)
    if "Failed to create" in done.stderr or "Failed to initialize manager" in done.stderr:
        pytest.skip(f"systemd-analyze does not run here: {done.stderr.strip()[:200]}")
    assert done.returncode == 0 and str(there) not in done.stderr, done.stderr
