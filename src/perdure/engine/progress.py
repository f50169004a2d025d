"""What an engine says of its work on stderr, when it was asked to (`progress=True`): loading, the pool, generation.

- A bar is drawn on a terminal only; elsewhere a call that lasts says a line every few seconds.
- A call ends with one line that counts its own tokens. The rate shown on the way is the whole engine's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path

from perdure.api.errors import EngineDead
from perdure.api.event import Record
from perdure.api.output import Stats
from perdure.api.units import in_units

TICK_S = 0.2
"""How often a bar moves."""

LINE_S = 5.0
"""How often a line comes where there is no terminal."""

Ended = Callable[[float | None], int]
"""Waits until all requests of a call have ended, or so many seconds; returns how many have."""

AskStats = Callable[[], "Future[object]"]


class Reporter:
    """Lines on stderr, if they were asked for."""

    def __init__(self, asked: bool) -> None:
        self.asked = asked

    def say(self, line: str) -> None:
        if self.asked:
            print(f"perdure: {line}", file=sys.stderr, flush=True)

    def loading(self, path: Path) -> None:
        if self.asked and path.exists():
            self.say(f"loading {path} ({in_units(_bytes_on_disk(path))})")

    @property
    def draws(self) -> bool:
        """Whether bars can be drawn too."""
        return self.asked and sys.stderr.isatty()

    def generated(self, requests: Iterable[Sequence[Record]], seconds: float) -> None:
        """The last line of a call: the records of each of its requests, none for a refused one."""
        if not self.asked:
            return
        found = [records for records in requests if records]
        num_prompt = sum(len(records[0].prompt_token_ids) for records in found)
        num_new = sum(len(record.token_ids) for records in found for record in records)
        self.say(
            f"{len(found):,} requests, {num_prompt:,} prompt tokens, {num_new:,} new tokens in {seconds:.1f} s: "
            f"{num_new / max(seconds, 1e-9):.1f} tokens/s"
        )


def _bytes_on_disk(path: Path) -> int:
    """Of a file, or of all weights in a directory."""
    files = [path] if path.is_file() else path.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def follow(ended: Ended, count: int, ask_stats: AskStats, reporter: Reporter, bar: bool) -> None:
    """Show how far a call is until all `count` requests have ended. bar: draw one, if stderr is a terminal."""
    if bar and sys.stderr.isatty():
        _draw(ended, count, ask_stats)
    elif reporter.asked:
        for num_ended, rate in _steps(ended, count, ask_stats, LINE_S):
            if rate is not None and num_ended < count:
                reporter.say(f"generating: {num_ended} of {count} requests done, {rate:.1f} tokens/s")
    else:
        ended(None)


def _draw(ended: Ended, count: int, ask_stats: AskStats) -> None:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    rate_column = TextColumn("{task.fields[rate]}")
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), rate_column, TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=count, rate="")
        for num_ended, rate in _steps(ended, count, ask_stats, TICK_S):
            progress.update(task, completed=num_ended)
            if rate is not None:
                progress.update(task, rate=f"{rate:.1f} tokens/s")


def _steps(ended: Ended, count: int, ask_stats: AskStats, every_s: float) -> Iterator[tuple[int, float | None]]:
    """Requests ended and tokens a second since the step before, every so many seconds, the last when all have ended.

    The engine answers between two of its steps. It is asked, not waited for: a long step must not hold up the end.
    """
    meter = _Meter(ask_stats)
    while (num_ended := ended(every_s)) < count:
        yield num_ended, meter.rate()
    yield num_ended, None


class _Meter:
    """Tokens a second between one answer of the engine and the next."""

    def __init__(self, ask_stats: AskStats) -> None:
        self._ask_stats = ask_stats
        self._before: tuple[float, int] | None = None
        self._question = self._ask()

    def _ask(self) -> Future[tuple[float, int]] | None:
        """The time of the answer, and tokens generated until then; nothing of an engine that is gone."""
        answer: Future[tuple[float, int]] = Future()

        def arrived(found: Future[object]) -> None:
            if found.exception() is None and isinstance(stats := found.result(), Stats):
                answer.set_result((time.monotonic(), stats.num_generated_tokens))

        try:
            self._ask_stats().add_done_callback(arrived)
        except EngineDead:
            return None
        return answer

    def rate(self) -> float | None:
        """None until there are two answers, or when the engine has not answered since."""
        if self._question is None or not self._question.done():
            return None
        before, self._before = self._before, self._question.result()
        self._question = self._ask()
        if before is None:
            return None
        return (self._before[1] - before[1]) / max(self._before[0] - before[0], 1e-9)
