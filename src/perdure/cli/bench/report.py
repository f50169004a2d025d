"""A benchmark's report: what was run, on what, and every run's numbers. Everything else is computed from these.

Its JSON is the same structure; `read` refuses what is none, `write_comparison` reports of different workloads.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from perdure import InvalidValue
from perdure.cli.bench.peer import PeerRun
from perdure.cli.output import write, write_table


class Run(msgspec.Struct, frozen=True, kw_only=True):
    """One run. first_token_s: until a request's first token, the median over all; last_first_token_s: the longest."""

    seconds: float
    cpu_seconds: float
    first_token_s: float
    last_first_token_s: float
    cached_prompt_tokens: int


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The workload. sha256: of prompts and numbers of new tokens."""

    name: str
    num_requests: int
    num_prompt_tokens: int
    num_new_tokens: int
    sha256: str


class Outputs(msgspec.Struct, frozen=True, kw_only=True):
    """sha256: of the first run's ids. num_expected: how many ids a right engine's answer has, if that is known, and
    num_as_expected: how many of these came, up to each request's first difference."""

    sha256: str
    same_in_all_runs: bool
    num_expected: int | None = None
    num_as_expected: int | None = None


class Against(msgspec.Struct, frozen=True, kw_only=True):
    """Another command's runs, each of them after our run of the same number."""

    command: str
    runs: list[PeerRun]

    @property
    def name(self) -> str:
        return self.runs[0].name or "the other command"


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """setup: model, settings and versions, by name."""

    report: Literal["perdure bench offline 1"] = "perdure bench offline 1"
    date: str
    workload: Asked
    setup: dict[str, str | int | bool]
    runs: list[Run]
    outputs: Outputs
    against: Against | None = None


class Spread(NamedTuple):
    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        return Spread(statistics.median(values), min(values), max(values))


METRICS: dict[str, Callable[[Run, Asked], float]] = {
    "wall time, s": lambda run, asked: run.seconds,
    "prompt tokens/s": lambda run, asked: asked.num_prompt_tokens / run.seconds,
    "output tokens/s": lambda run, asked: asked.num_new_tokens / run.seconds,
    "first token, s": lambda run, asked: run.first_token_s,
    "last first token, s": lambda run, asked: run.last_first_token_s,
    "CPU time, s": lambda run, asked: run.cpu_seconds,
    "cores got": lambda run, asked: run.cpu_seconds / run.seconds,
}


def spreads(report: Report) -> dict[str, Spread]:
    """Every metric over the runs."""
    return {name: Spread.of([of(run, report.workload) for run in report.runs]) for name, of in METRICS.items()}


def ratios(report: Report) -> tuple[Spread, Spread]:
    """How many times the other command's speed ours is, run by run: by the clock and by CPU time."""
    assert report.against is not None
    pairs = list(zip(report.runs, report.against.runs, strict=True))
    return (
        Spread.of([theirs.seconds / ours.seconds for ours, theirs in pairs]),
        Spread.of([theirs.cpu_seconds / ours.cpu_seconds for ours, theirs in pairs]),
    )


def read(path: Path) -> Report:
    """A report from a file. Raises `InvalidValue`."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Report)
    except msgspec.DecodeError as error:
        raise InvalidValue(f"{path}: not a report of perdure bench ({error})") from None


def write_report(report: Report) -> None:
    """The report as tables on stdout."""
    asked, outputs = report.workload, report.outputs
    write(
        f"workload {asked.name}: {asked.num_requests} requests, {asked.num_prompt_tokens:,} prompt tokens, "
        f"{asked.num_new_tokens:,} new tokens\n"
    )
    width = max(map(len, report.setup))
    write("".join(f"{name:<{width}}  {_worded(value)}\n" for name, value in report.setup.items()) + "\n")
    rows = [[*map(_number, spread), name] for name, spread in spreads(report).items()]
    runs = "1 run" if len(report.runs) == 1 else f"{len(report.runs)} runs"
    write_table(["median", "least", "most", runs], rows)
    if any(run.cached_prompt_tokens for run in report.runs):
        write(f"prompt tokens from the prefix cache: {report.runs[-1].cached_prompt_tokens:,}\n")
    if not outputs.same_in_all_runs:
        write("the runs gave different ids\n")
    if outputs.num_expected is not None:
        write(f"ids as expected: {outputs.num_as_expected:,} of {outputs.num_expected:,}\n")
    if report.against is not None:
        _write_against(report, report.against)


def _write_against(report: Report, against: Against) -> None:
    (by_clock, by_cpu), ours = ratios(report), spreads(report)
    theirs = [
        ("wall time, s", [run.seconds for run in against.runs]),
        ("CPU time, s", [run.cpu_seconds for run in against.runs]),
        ("cores got", [run.cpu_seconds / run.seconds for run in against.runs]),
    ]
    write(f"\nagainst {against.name}, in turns\n")
    rows = [[*map(_number, spread), name] for spread, name in ((by_clock, "times its speed"), (by_cpu, "by CPU time"))]
    for name, values in theirs:
        rows.append([*map(_number, ours[name]), f"{name}, ours"])
        rows.append([*map(_number, Spread.of(values)), f"{name}, theirs"])
    write_table(["median", "least", "most", f"{len(against.runs)} of each"], rows)
    digests = {run.output_sha256 for run in against.runs} - {None}
    if digests:
        write("the same ids\n" if digests == {report.outputs.sha256} else "not the same ids\n")


def write_comparison(names: tuple[str, str], first: Report, second: Report) -> None:
    """Two reports of one workload side by side, with the second's medians as parts of the first's."""
    if first.workload.sha256 != second.workload.sha256:
        one, other = (f"{asked.name} ({asked.sha256[:8]})" for asked in (first.workload, second.workload))
        raise InvalidValue(f"the reports are of different workloads, {one} and {other}: their numbers do not compare")
    write(f"workload {first.workload.name}: 1 is {names[0]}, 2 is {names[1]}\n")
    firsts, seconds = spreads(first), spreads(second)
    rows = []
    for metric in METRICS:
        left, right = firsts[metric], seconds[metric]
        cells = [_number(left.median), _range(left), _number(right.median), _range(right)]
        rows.append([*cells, _number(right.median / left.median) if left.median else "-", metric])
    write_table(["1", "least to most", "2", "least to most", "2 / 1", "median"], rows)
    same = first.outputs.sha256 == second.outputs.sha256
    write("the same ids\n" if same else "not the same ids\n")
    differing = [name for name in {**first.setup, **second.setup} if first.setup.get(name) != second.setup.get(name)]
    if differing:
        table = [
            [_worded(first.setup.get(name, "-")), _worded(second.setup.get(name, "-")), name] for name in differing
        ]
        write("\n")
        write_table(["1", "2", "what differs"], table)


def _range(spread: Spread) -> str:
    return f"{_number(spread.least)} to {_number(spread.most)}"


def _number(value: float) -> str:
    """Three digits or more, as the size asks for."""
    for bound, places in ((10, 3), (100, 2), (1000, 1)):
        if value < bound:
            return f"{value:.{places}f}"
    return f"{value:,.0f}"


def _worded(value: Any) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)
