"""Another command that runs the same workload: a whole process each time, so that nothing of it is left in ours.

What a peer is given: its command line, in which `{workload}` stands for the path of a JSON file with `prompt_ids`
(lists of ids) and `new_tokens` (one number a prompt), and `{model}` for the path of the model that we run.

What it does: loads, warms up, then generates greedily, without stopping at end ids, all prompts at once, and prints one
line of JSON on stdout: {"seconds": 18.9, "cpu_seconds": 37.2}, both of the timed generation alone. It may add "name"
and "output_sha256", the digest of its lists of ids (SHA-256 of their JSON without blanks), which is compared with ours.
Other lines are ignored. benchmarks/peers/ has such commands.
"""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import msgspec

from perdure import InvalidValue


class PeerRun(msgspec.Struct, frozen=True):
    """The line that a peer prints."""

    seconds: float
    cpu_seconds: float
    name: str | None = None
    output_sha256: str | None = None


def split_command(command: str) -> list[str]:
    """A command line as a shell would split it. Raises `InvalidValue` where it could not."""
    try:
        arguments = shlex.split(command)
    except ValueError as error:
        raise InvalidValue(f"--against={command!r}: {error}") from None
    if not arguments:
        raise InvalidValue("--against is empty; give a command")
    return arguments


def run_peer(arguments: list[str], *, workload: Path, model: str) -> PeerRun:
    """Start it, wait for its end, and read its line."""
    filled = [one.replace("{workload}", str(workload)).replace("{model}", model) for one in arguments]
    try:
        done = subprocess.run(filled, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise InvalidValue(f"--against: {filled[0]} cannot be started: {error.strerror}") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
        raise InvalidValue(f"--against: {filled[0]} ended with code {done.returncode}: {said}")
    for line in reversed(done.stdout.splitlines()):
        if (found := _read(line)) is not None:
            return found
    raise InvalidValue(f"--against: {filled[0]} printed no line of JSON with seconds and cpu_seconds")


def _read(line: str) -> PeerRun | None:
    try:
        found = msgspec.json.decode(line, type=PeerRun)
    except msgspec.DecodeError:
        return None
    return found if found.seconds > 0 and found.cpu_seconds > 0 else None
