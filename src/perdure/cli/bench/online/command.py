"""`perdure bench serve`."""

from __future__ import annotations

import asyncio
import datetime
import math
import os
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from perdure import InvalidValue, __version__
from perdure.cli.output import remark

ENDPOINTS = ("completions", "chat")
WORKLOADS = ("random", "sharegpt", "azure", "shared-prefix")
KEY_VARIABLES = ("PERDURE_API_KEY", "OPENAI_API_KEY")


def _traffic(text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Workload", metavar=metavar)


def _server(text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Server", metavar=metavar)


def serve(
    workload: Annotated[str, typer.Argument(help=f"One of: {', '.join(WORKLOADS)}.")] = "random",
    url: Annotated[
        str, _server("Where it is, without /v1.", "--url", "--base-url", metavar="URL")
    ] = "http://127.0.0.1:8000",
    endpoint: Annotated[str, _server("completions or chat.")] = "completions",
    model: Annotated[str | None, _server("By its name there; without it, the first that is served.")] = None,
    api_key: Annotated[
        str | None, _server(f"Sent as a bearer token; also {' or '.join(KEY_VARIABLES)}.", metavar="KEY")
    ] = None,
    timeout: Annotated[float, _server("Seconds without a word after which a request has failed.")] = 600.0,
    num_prompts: Annotated[int, _traffic("Requests.", "--num-prompts")] = 100,
    request_rate: Annotated[float, _traffic("A second, as a Poisson process; inf: all at once.")] = math.inf,
    max_concurrency: Annotated[int | None, _traffic("Most requests at a time; others wait here.")] = None,
    seed: Annotated[int, _traffic("Of lengths, prompts and arrivals.")] = 0,
    input_len: Annotated[
        int,
        _traffic("random: tokens of a prompt. shared-prefix: after the prefix.", "--input-len", "--random-input-len"),
    ] = 512,
    output_len: Annotated[
        int | None, _traffic("New tokens of each: 128, or as the data has it.", "--output-len", "--random-output-len")
    ] = None,
    range_ratio: Annotated[
        float, _traffic("random: lengths vary by this part of themselves.", "--range-ratio", "--random-range-ratio")
    ] = 0.0,
    prefix_len: Annotated[int, _traffic("shared-prefix: tokens of a prefix.")] = 1024,
    num_prefixes: Annotated[int, _traffic("shared-prefix: how many there are, in turns.")] = 1,
    data: Annotated[
        Path | None,
        _traffic("sharegpt: its JSON. azure: the trace's CSV.", "--data", "--dataset-path", metavar="FILE"),
    ] = None,
    speed: Annotated[float, _traffic("azure: how many times as fast as the trace.")] = 1.0,
    vocab_size: Annotated[int, _traffic("Prompts of ids have those below this.")] = 500,
    text: Annotated[bool, _traffic("Prompts of words, not ids; in chats always.", "--text")] = False,
    ignore_eos: Annotated[
        bool, _traffic("Every output has its whole length; OpenAI's own server has no such field.")
    ] = (True),
    temperature: Annotated[float, _traffic("0: greedy.")] = 0.0,
    extra_body: Annotated[str | None, _traffic("More fields of every request.", metavar="JSON")] = None,
    warm_up: Annotated[int, _traffic("Requests before, not counted.", "--warm-up", "--num-warmups")] = 1,
    goodput: Annotated[
        list[str] | None, typer.Option(metavar="NAME:MS", help="Count what keeps this, as ttft:250; may be repeated.")
    ] = None,
    to_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the report there too, as JSON.")
    ] = None,
) -> None:
    """Measure how a server answers, any that speaks OpenAI's interface: times to the first token and between tokens,
    throughput, goodput.

    random: ids, of lengths given. sharegpt: of lengths as in conversations, or those of a file. azure: arrivals and
    lengths of a trace. shared-prefix: many that begin alike. docs/benchmarks.md says what the numbers are.
    """
    from perdure.cli.bench.online import report as reports
    from perdure.cli.bench.online import traffic
    from perdure.cli.bench.online.sending import Outcome, Target, drive, served

    _check(
        ("--num-prompts", num_prompts, 1, 10**7),
        ("--request-rate", request_rate, 1e-6, math.inf),
        ("--max-concurrency", max_concurrency, 1, 10**6),
        ("--input-len", input_len, 1, 10**7),
        ("--output-len", output_len, 1, 10**7),
        ("--range-ratio", range_ratio, 0, 1),
        ("--prefix-len", prefix_len, 1, 10**7),
        ("--num-prefixes", num_prefixes, 1, 10**6),
        ("--speed", speed, 1e-6, 1e6),
        ("--vocab-size", vocab_size, 2, 10**7),
        ("--warm-up", warm_up, 0, 10**4),
        ("--timeout", timeout, 0.001, 1e6),
    )
    if endpoint not in ENDPOINTS:
        raise InvalidValue(f"--endpoint={endpoint!r} is none of {', '.join(ENDPOINTS)}")
    limits = reports.goodput_from(goodput or [])
    if to_file is not None and not to_file.absolute().parent.is_dir():
        raise InvalidValue(f"--json={to_file}: there is no such directory")
    key = api_key or next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    url = url.rstrip("/").removesuffix("/v1")
    card = served(url, headers, model)
    asked = traffic.Asked(
        workload=workload,
        num_prompts=num_prompts,
        seed=seed,
        input_len=input_len,
        output_len=output_len,
        range_ratio=range_ratio,
        prefix_len=prefix_len,
        num_prefixes=num_prefixes,
        data=data,
        speed=speed,
        as_ids=endpoint == "completions" and not text,
        vocab_size=vocab_size,
        limit=card.max_model_len,
    )
    chosen = traffic.planned(asked)
    arrivals = traffic.arrivals(chosen, request_rate, seed)
    target = Target(
        url=url,
        endpoint=endpoint,
        model=card.id,
        headers=headers,
        ignore_eos=ignore_eos,
        temperature=temperature,
        extra=_extra(extra_body),
        timeout_s=timeout,
    )
    if warm_up:
        before = traffic.warm_up(asked, chosen.requests[0])
        for outcome in asyncio.run(drive(target, [before] * warm_up, [0.0] * warm_up, None)):
            if outcome.error is not None:
                raise InvalidValue(f"--url={url}: the request before the others failed: {outcome.error}")
        remark(f"warmed up; {len(chosen.requests):,} requests follow")

    progress = _Progress(len(chosen.requests))

    def ended(outcome: Outcome) -> None:
        progress.ended()

    cpu_start = time.process_time()
    outcomes = asyncio.run(drive(target, chosen.requests, arrivals, max_concurrency, ended))
    is_trace = chosen.requests[0].at_s is not None
    setup: dict[str, Any] = {
        "server": f"{url}{target.path}",
        "model": card.id,
        "workload": workload if data is None else f"{workload}, {data.name}",
        "requests": len(chosen.requests),
        "arrivals": f"as in the trace, {speed:g} times as fast" if is_trace else _rate(request_rate),
        "max_concurrency": max_concurrency,
        "prompts": "ids" if asked.as_ids else "text",
        "ignore_eos": ignore_eos,
        "temperature": temperature,
        "seed": seed,
        "client": f"perdure {__version__}, {sys.platform}, {os.cpu_count()} cores",
    }
    report = reports.reported(
        outcomes,
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        setup=setup,
        client_cpu_s=time.process_time() - cpu_start,
        num_left_out=chosen.num_left_out,
        goodput=limits,
    )
    reports.write_report(report)
    if to_file is not None:
        to_file.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
    if not report.completed:
        raise InvalidValue(f"--url={url}: no request was answered")


class _Progress:
    """A line every few seconds."""

    EVERY_S = 5.0

    def __init__(self, total: int) -> None:
        self._total = total
        self._ended = 0
        self._said_at = time.monotonic()

    def ended(self) -> None:
        self._ended += 1
        now = time.monotonic()
        if now - self._said_at > self.EVERY_S:
            self._said_at = now
            remark(f"{self._ended:,} of {self._total:,} requests ended")


def _rate(rate: float) -> str:
    return "all at once" if math.isinf(rate) else f"{rate:g} a second, Poisson"


def _extra(given: str | None) -> dict[str, Any]:
    try:
        found = {} if given is None else msgspec.json.decode(given, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise InvalidValue(f"--extra-body={given!r} is no JSON object ({error})") from None
    return found


def _check(*ranges: tuple[str, float | None, float, float]) -> None:
    for name, value, least, most in ranges:
        if value is not None and not least <= value <= most:
            raise InvalidValue(f"{name}={value:g} is not from {least:g} to {most:g}")
