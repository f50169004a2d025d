"""The numbers of a run against a server, under the names that `vllm bench serve` has for the same.

- ttft: from sending to the first token. tpot: the time after it, by further token, of requests with two tokens or more.
  itl: between one part of a stream and the next. e2el: from sending to the end. All in milliseconds.
- Percentiles lie between two values in proportion. Requests that failed are in no time and no throughput.
- goodput: requests a second that kept all of the limits asked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import msgspec

from perdure import InvalidValue
from perdure.cli.bench.online.sending import Outcome
from perdure.cli.output import write, write_table

METRICS = ("ttft", "tpot", "itl", "e2el")
WORDS = {
    "ttft": "to the first token (TTFT), ms",
    "tpot": "by token after it (TPOT), ms",
    "itl": "between parts (ITL), ms",
    "e2el": "to the end (E2E), ms",
}


class Spread(msgspec.Struct, frozen=True):
    mean: float
    median: float
    p90: float
    p99: float
    std: float
    least: float
    most: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """setup: what was asked, of what. output_tokens_by: "usage", or "parts" where the server told no usage. errors: how
    many requests failed of what. Spreads are None where there is no value. client_cpu_s: of this process: near the
    duration, it was too slow for the server."""

    report: Literal["perdure bench serve 1"] = "perdure bench serve 1"
    date: str
    setup: dict[str, str | int | float | bool | None]
    duration: float
    client_cpu_s: float
    num_prompts: int
    num_left_out: int
    completed: int
    failed: int
    errors: dict[str, int]
    total_input_tokens: int | None
    total_output_tokens: int
    output_tokens_by: Literal["usage", "parts"]
    request_throughput: float
    input_throughput: float | None
    output_throughput: float
    total_token_throughput: float | None
    max_concurrent_requests: int
    goodput_limits: dict[str, float]
    request_goodput: float | None
    ttft_ms: Spread | None
    tpot_ms: Spread | None
    itl_ms: Spread | None
    e2el_ms: Spread | None


def reported(
    outcomes: Sequence[Outcome],
    *,
    date: str,
    setup: dict[str, Any],
    client_cpu_s: float,
    num_left_out: int,
    goodput: dict[str, float],
) -> Report:
    done = [one for one in outcomes if one.error is None]
    ended = max((one.ended_at for one in outcomes), default=0.0)
    duration = max(ended - min((one.sent_at for one in outcomes), default=0.0), 1e-9)
    by_usage = all(one.num_output is not None for one in done)
    values = {name: [value for one in done for value in _values(one, name, by_usage)] for name in METRICS}
    num_output = sum(_num_output(one, by_usage) for one in done)
    inputs = [one.num_input for one in done if one.num_input is not None]
    num_input = sum(inputs) if len(inputs) == len(done) else None
    kept = sum(_keeps(one, goodput, by_usage) for one in done)
    return Report(
        date=date,
        setup=setup,
        duration=duration,
        client_cpu_s=client_cpu_s,
        num_prompts=len(outcomes),
        num_left_out=num_left_out,
        completed=len(done),
        failed=len(outcomes) - len(done),
        errors=dict(Counter(one.error for one in outcomes if one.error is not None).most_common()),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        output_tokens_by="usage" if by_usage else "parts",
        request_throughput=len(done) / duration,
        input_throughput=None if num_input is None else num_input / duration,
        output_throughput=num_output / duration,
        total_token_throughput=None if num_input is None else (num_input + num_output) / duration,
        max_concurrent_requests=most_together(outcomes),
        goodput_limits=goodput,
        request_goodput=kept / duration if goodput else None,
        ttft_ms=spread(values["ttft"]),
        tpot_ms=spread(values["tpot"]),
        itl_ms=spread(values["itl"]),
        e2el_ms=spread(values["e2el"]),
    )


def _num_output(one: Outcome, by_usage: bool) -> int:
    return one.num_output if by_usage and one.num_output is not None else len(one.part_times)


def _values(one: Outcome, metric: str, by_usage: bool) -> list[float]:
    """In milliseconds: none, one, or for `itl` one between each two parts."""
    times = one.part_times
    if metric == "e2el":
        return [1000 * (one.ended_at - one.sent_at)]
    if not times:
        return []
    if metric == "ttft":
        return [1000 * (times[0] - one.sent_at)]
    if metric == "itl":
        return [1000 * (after - before) for before, after in pairwise(times)]
    count = _num_output(one, by_usage)
    return [1000 * (times[-1] - times[0]) / (count - 1)] if count > 1 else []


def _keeps(one: Outcome, limits: dict[str, float], by_usage: bool) -> bool:
    return all(max(_values(one, name, by_usage), default=0.0) <= most for name, most in limits.items())


def spread(values: Sequence[float]) -> Spread | None:
    if not values:
        return None
    ordered = sorted(values)
    mean = math.fsum(ordered) / len(ordered)
    variance = math.fsum((value - mean) ** 2 for value in ordered) / len(ordered)
    median, p90, p99 = (percentile(ordered, part) for part in (50, 90, 99))
    return Spread(mean, median, p90, p99, math.sqrt(variance), ordered[0], ordered[-1])


def percentile(ordered: Sequence[float], part: float) -> float:
    """Between the two values nearest to it, in proportion."""
    at = (len(ordered) - 1) * part / 100
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (at - below)


def most_together(outcomes: Sequence[Outcome]) -> int:
    changes = sorted([(one.ended_at, -1) for one in outcomes] + [(one.sent_at, 1) for one in outcomes])
    most = now = 0
    for _, change in changes:
        now += change
        most = max(most, now)
    return most


def goodput_from(given: Sequence[str]) -> dict[str, float]:
    """["ttft:250", "tpot:50"] as typed. Raises `InvalidValue`."""
    found: dict[str, float] = {}
    for one in " ".join(given).replace(",", " ").split():
        name, _, value = one.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in METRICS or not 0 < limit < math.inf:
            raise InvalidValue(f"--goodput: {one!r} is not NAME:MS, as in ttft:250; names: {', '.join(METRICS)}")
        found[name] = limit
    return found


def write_report(report: Report) -> None:
    width = max(map(len, report.setup))
    write(
        "".join(f"{name:<{width}}  {'-' if value is None else value}\n" for name, value in report.setup.items()) + "\n"
    )
    counts = [
        (f"{report.completed:,} of {report.num_prompts:,}", "requests answered"),
        (f"{report.duration:.2f}", "duration, s"),
        (f"{report.request_throughput:.2f}", "requests/s"),
        (_or_dash(report.input_throughput), "input tokens/s"),
        (f"{report.output_throughput:.1f}", f"output tokens/s, by {report.output_tokens_by}"),
        (_or_dash(report.total_token_throughput), "tokens/s in all"),
        (f"{report.max_concurrent_requests:,}", "requests together, at most"),
        (f"{report.client_cpu_s / report.duration:.2f}", "cores that this client took"),
    ]
    if report.request_goodput is not None:
        limits = ", ".join(f"{name} {limit:g} ms" for name, limit in report.goodput_limits.items())
        counts.append((f"{report.request_goodput:.2f}", f"goodput, requests/s within {limits}"))
    write_table(["", "in numbers"], counts)
    write("\n")
    spreads = [(WORDS[name], getattr(report, f"{name}_ms")) for name in METRICS]
    rows = [
        [*(f"{value:.2f}" for value in (found.mean, found.median, found.p90, found.p99)), name]
        for name, found in spreads
        if found is not None
    ]
    write_table(["mean", "median", "p90", "p99", "time"], rows)
    if report.num_left_out:
        write(f"\n{report.num_left_out:,} requests of the workload were left out: too long for the server\n")
    if report.errors:
        write(f"\n{report.failed:,} failed\n")
        write("".join(f"{count:>7,}  {name}\n" for name, count in report.errors.items()))


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
