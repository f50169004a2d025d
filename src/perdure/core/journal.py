"""The journal: a run's inputs in order, enough to replay it bit for bit, and what was told of it, enough to see it.

- Four kinds of entries are the run itself: a command as it was applied, a plan as it was launched, an output as it was
  committed, a directive with what came of it. Their order is the whole of what a scheduler depends on.
- A fifth kind is for people: what happened to requests, and how full the engine was. A replay passes over it.
- Each entry carries the loop's time, which is given to the journal and never comes back into the core.
- A file is a line that says what it is, then one msgpack value after another, the first being the core's configuration,
  each with its length and checksum. A torn last one (the process died while writing) is left out.
- `replay` feeds commands and outputs to a new scheduler and compares each plan it makes with the recorded one.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import BinaryIO

import msgspec

from perdure.api import event as ev
from perdure.api.command import Command
from perdure.api.config import CoreConfig
from perdure.api.directive import Directive, Outcome
from perdure.api.errors import JournalError
from perdure.api.event import Event
from perdure.api.output import Stats
from perdure.api.plan import StepOutput, StepPlan
from perdure.core.scheduler import Scheduler
from perdure.core.stopping import CursorFactory

MAGIC = b"perdure journal\n"
VERSION = 4


class _Version(msgspec.Struct, frozen=True):
    """The part of every header that never changes."""

    version: int


class Header(msgspec.Struct, frozen=True):
    version: int
    config: CoreConfig


class Applied(msgspec.Struct, frozen=True, tag="c", array_like=True):
    command: Command
    time: float


class Launched(msgspec.Struct, frozen=True, tag="p", array_like=True):
    """plan: None where the scheduler was asked and had no step (it may have put somebody aside all the same)."""

    plan: StepPlan | None
    time: float


class Committed(msgspec.Struct, frozen=True, tag="o", array_like=True):
    output: StepOutput
    time: float


class Performed(msgspec.Struct, frozen=True, tag="d", array_like=True):
    directive: Directive
    outcome: Outcome
    time: float


class Level(msgspec.Struct, frozen=True, array_like=True):
    """How full the engine is. state: of the engine. The counts are of requests."""

    state: str
    num_free_pages: int
    num_running: int
    num_waiting: int
    num_paused: int


class Told(msgspec.Struct, frozen=True, tag="t", array_like=True):
    """What had happened to requests since the entry before, and the level then."""

    moments: list[ev.Moment]
    level: Level
    time: float


Entry = Applied | Launched | Committed | Performed | Told


class Journal:
    """Writes entries to a binary file as the loop goes on."""

    def __init__(self, file: BinaryIO, config: CoreConfig) -> None:
        self._file = file
        self._encoder = msgspec.msgpack.Encoder()
        self._level: Level | None = None
        file.write(MAGIC)
        self._write(Header(VERSION, config))

    def _write(self, value: Header | Entry) -> None:
        body = self._encoder.encode(value)
        head = len(body).to_bytes(4, "little") + zlib.crc32(body).to_bytes(4, "little")
        self._file.write(head + body)

    def applied(self, command: Command, time: float) -> None:
        self._write(Applied(command, time))

    def launched(self, plan: StepPlan | None, time: float) -> None:
        self._write(Launched(plan, time))

    def committed(self, output: StepOutput, time: float) -> None:
        self._write(Committed(output, time))

    def performed(self, directive: Directive, outcome: Outcome, time: float) -> None:
        self._write(Performed(directive, outcome, time))

    def told(self, events: Sequence[Event], stats: Stats, time: float) -> None:
        """Written only if something happened or the level changed."""
        moments = [moment for event in events if (moment := _moment(event)) is not None]
        level = Level(stats.state, stats.num_free_pages, stats.num_running, stats.num_waiting, stats.num_paused)
        if moments or level != self._level:
            self._level = level
            self._write(Told(moments, level, time))

    def close(self) -> None:
        self._file.close()


def _moment(event: Event) -> ev.Moment | None:
    match event:
        case ev.Moment():
            return event
        case ev.Ended(ticket, record):
            return ev.Moment(ticket, "ended", len(record.token_ids), record.finish_reason, record.child)
        case ev.Refused(ticket, _, failure):
            return ev.Moment(ticket, "refused", detail=failure.kind)
    return None


class Entries:
    """The entries of a file, to be iterated once. num_torn_bytes: what it has of a last entry that was cut short."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._decoder = msgspec.msgpack.Decoder(Entry)
        self.num_torn_bytes = 0

    def __iter__(self) -> Iterator[Entry]:
        number = 0
        while (body := self.frame()) is not None:
            number += 1
            try:
                yield self._decoder.decode(body)
            except msgspec.DecodeError as error:
                raise JournalError(f"entry {number} of the journal is none that this version knows: {error}") from None

    def frame(self) -> bytes | None:
        """The next value's bytes, or None at the end. Raises `JournalError` if they are not those that were written."""
        at = self._file.tell()
        head = self._file.read(8)
        size = int.from_bytes(head[:4], "little")
        body = self._file.read(size)
        if len(head) < 8 or not size or len(body) < size:
            self.num_torn_bytes = len(head) + len(body) + len(self._file.read())
            return None
        if zlib.crc32(body) != int.from_bytes(head[4:], "little"):
            raise JournalError(f"the journal is damaged: the entry at byte {at} is not what was written")
        return body


def read(file: BinaryIO) -> tuple[CoreConfig, Entries]:
    """The configuration and the entries of a journal. Raises `JournalError` where it is not one."""
    if file.read(len(MAGIC)) != MAGIC:
        raise JournalError("not a journal of perdure")
    entries = Entries(file)
    body = entries.frame()
    if body is None:
        raise JournalError("the journal ends before its first entry")
    try:
        version = msgspec.msgpack.decode(body, type=_Version).version
        if version != VERSION:
            raise JournalError(f"the journal has version {version}, this program reads version {VERSION}")
        return msgspec.msgpack.decode(body, type=Header).config, entries
    except msgspec.DecodeError as error:
        raise JournalError(f"the journal's head makes no sense: {error}") from None


def replay(
    file: BinaryIO,
    make_cursor: CursorFactory,
    execute: Callable[[StepPlan], StepOutput] | None = None,
    perform: Callable[[Directive], Outcome] | None = None,
) -> list[Event]:
    """Run the journal again; returns every event in order.

    execute, perform: a device that runs each plan and directive anew; its outputs are compared with the recorded ones
    and used. Without it the recorded outputs are used. Raises `JournalError` at the first plan, output or directive
    that differs.
    """
    config, entries = read(file)
    scheduler = Scheduler(config, make_cursor)
    events: list[Event] = []
    in_flight: list[tuple[StepPlan, StepOutput | None]] = []
    encode = msgspec.msgpack.encode
    for entry in entries:
        match entry:
            case Applied(command):
                events += scheduler.apply(command)
            case Launched(recorded):
                plan = scheduler.plan(1 if recorded is None else recorded.num_steps)
                if encode(plan) != encode(recorded):
                    raise JournalError(f"the plan {recorded and recorded.step} differs from the recorded one")
                if plan is not None:
                    in_flight.append((plan, execute(plan) if execute is not None else None))
            case Committed(output):
                plan, executed = in_flight.pop(0)
                if executed is not None and encode(executed) != encode(output):
                    raise JournalError(f"step {output.step}: the output differs from the recorded one")
                events += scheduler.commit(plan, output)
            case Performed(directive, outcome):
                if scheduler.directive() != directive:
                    raise JournalError(f"the directive {directive} differs from the recorded one")
                if perform is not None and perform(directive) != outcome:
                    raise JournalError(f"the directive {directive} went another way")
                events += scheduler.done(directive, outcome)
    return events + scheduler.told()
