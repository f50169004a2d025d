"""`perdure bench` and its commands; `online` has that for servers."""

from __future__ import annotations

import datetime
import os
import platform
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from perdure import InvalidValue, __version__
from perdure.cli.bench import report as reports
from perdure.cli.bench.online.command import serve
from perdure.cli.bench.peer import PeerRun, run_peer, split_command
from perdure.cli.bench.report import Against, Asked, Outputs, Report
from perdure.cli.bench.workloads import MAKERS, Ids, Workload, check_name, digest, drawn, from_file
from perdure.cli.options import EngineOptions, spelled_out
from perdure.cli.output import remark

if TYPE_CHECKING:
    from perdure import LLM
    from perdure.cli.bench.measure import Measured

SETTINGS = (
    ("model", "model"),
    ("dtype", "dtype"),
    ("quantization", "quantization"),
    ("kv_cache_dtype", "kv_cache_dtype"),
    ("threads", "threads"),
    ("batch_invariant", "batch_invariant"),
    ("attention", "attention_backend"),
    ("linear", "linear_backend"),
    ("steps_in_flight", "steps_in_flight"),
    ("max_burst_ms", "max_burst_ms"),
    ("max_num_seqs", "max_num_seqs"),
    ("max_num_batched_tokens", "max_num_batched_tokens"),
    ("page_size", "page_size"),
    ("enable_prefix_caching", "enable_prefix_caching"),
)
"""What a report keeps of `LLM.describe`, under which name."""

bench = typer.Typer()


@bench.callback(invoke_without_command=True)
def start(context: typer.Context) -> None:
    """Measure how fast a model runs here."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@spelled_out
def offline(
    engine: EngineOptions,
    workload: Annotated[str, typer.Argument(help=f"One of: {', '.join(MAKERS)}.")] = "cpu16",
    data: Annotated[
        Path | None, typer.Option(help="JSON with prompt_ids and new_tokens, for cpu16 and one (its first prompt).")
    ] = None,
    repeat: Annotated[int, typer.Option(min=1, help="Timed runs, after one to warm up.")] = 3,
    against: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="Take turns with this command; docs/benchmarks.md says how.")
    ] = None,
    to_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there too, as JSON.")
    ] = None,
) -> None:
    """Time whole batches of requests, greedy and without stopping at end ids.

    cpu16: 16 prompts, 3,090 tokens, 64 new each. nano: 32 requests of mixed lengths. prefix: 16 requests that share a
    long beginning. one: a single request, 237 tokens and 64 new.
    """
    check_name(workload)
    given = None if data is None else from_file(workload, data)
    if to_file is not None and not to_file.absolute().parent.is_dir():
        raise InvalidValue(f"--json={to_file}: there is no such directory")
    command = None if against is None else split_command(against)
    settings = engine.settings()

    from perdure import LLM

    with LLM(**settings) as llm:
        described = llm.describe()
        limit = described["max_model_len"]
        chosen = (given or drawn(workload, vocab_size=llm.vocab_size, limit=limit)).check(limit)
        ours, theirs = _take_turns(llm, chosen, repeat, command, described["model"])
    report = Report(
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        workload=_asked(chosen),
        setup=_setup(described),
        runs=[one.run for one in ours],
        outputs=_outputs([one.ids for one in ours], chosen.expected),
        against=None if against is None else Against(command=against, runs=theirs),
    )
    reports.write_report(report)
    if to_file is not None:
        to_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


def compare(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="A report of bench offline.")],
    second: Annotated[Path, typer.Argument(metavar="B.json", help="Another of the same workload.")],
) -> None:
    """Show two reports of one workload side by side."""
    reports.write_comparison((str(first), str(second)), reports.read(first), reports.read(second))


bench.command()(offline)
bench.command()(compare)
bench.command()(serve)


def _take_turns(
    llm: LLM, workload: Workload, repeat: int, command: Sequence[str] | None, model: str
) -> tuple[list[Measured], list[PeerRun]]:
    """A run of ours, a run of theirs, and again."""
    from perdure.cli.bench.measure import measure

    ours: list[Measured] = []
    theirs: list[PeerRun] = []
    with TemporaryDirectory(prefix="perdure-bench-") as folder:
        file = Path(folder) / "workload.json"
        workload.write(file)
        _say("warm-up", measure(llm, workload).run)
        for number in range(1, repeat + 1):
            ours.append(measure(llm, workload))
            _say(f"run {number} of {repeat}", ours[-1].run)
            if command is not None:
                theirs.append(run_peer(list(command), workload=file, model=model))
                _say(f"run {number} of {repeat}, the other command", theirs[-1])
    return ours, theirs


def _say(what: str, run: reports.Run | PeerRun) -> None:
    remark(f"{what}: {run.seconds:.2f} s on {run.cpu_seconds / run.seconds:.2f} cores")


def _asked(workload: Workload) -> Asked:
    return Asked(
        name=workload.name,
        num_requests=len(workload.prompts),
        num_prompt_tokens=workload.num_prompt_tokens,
        num_new_tokens=workload.num_new_tokens,
        sha256=workload.sha256,
    )


def _setup(described: dict[str, Any]) -> dict[str, str | int | bool]:
    settings = {name: described[key] for name, key in SETTINGS}
    versions = f"perdure {__version__}, torch {version('torch')}, Python {platform.python_version()}"
    return settings | {"versions": versions, "machine": f"{sys.platform} {platform.machine()}, {os.cpu_count()} cores"}


def _outputs(runs: list[list[list[int]]], expected: Ids | None) -> Outputs:
    first = runs[0]
    known = None if expected is None else sum(map(len, expected))
    return Outputs(
        sha256=digest(first),
        same_in_all_runs=all(ids == first for ids in runs),
        num_expected=known,
        num_as_expected=None if expected is None else sum(map(_num_equal, first, expected)),
    )


def _num_equal(ids: Sequence[int], expected: Sequence[int]) -> int:
    """Length of the common beginning."""
    for at, (one, other) in enumerate(zip(ids, expected)):
        if one != other:
            return at
    return min(len(ids), len(expected))
