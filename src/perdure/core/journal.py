"""The journal: a run's inputs in order, enough to replay it bit for bit.

- Four kinds of entries: a command as it was applied, a plan as it was launched, an output as it was committed, a
  directive with what came of it. Their order is the whole of what a scheduler depends on.
- A journal is one msgpack value after another, the first being the core's configuration. A torn last entry (the
  process died while writing) is left out.
- `replay` feeds commands and outputs to a new scheduler and compares each plan it makes with the recorded one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import BinaryIO

import msgspec

from perdure.api.command import Command
from perdure.api.config import CoreConfig
from perdure.api.directive import Directive, Outcome
from perdure.api.event import Event
from perdure.api.plan import StepOutput, StepPlan
from perdure.core.scheduler import Scheduler
from perdure.core.stopping import CursorFactory

VERSION = 2


class Header(msgspec.Struct, frozen=True):
    version: int
    config: CoreConfig


class Applied(msgspec.Struct, frozen=True, tag="c", array_like=True):
    command: Command


class Launched(msgspec.Struct, frozen=True, tag="p", array_like=True):
    """plan: None where the scheduler was asked and had no step (it may have put somebody aside all the same)."""

    plan: StepPlan | None


class Committed(msgspec.Struct, frozen=True, tag="o", array_like=True):
    output: StepOutput


class Performed(msgspec.Struct, frozen=True, tag="d", array_like=True):
    directive: Directive
    outcome: Outcome


Entry = Applied | Launched | Committed | Performed


class JournalError(Exception):
    """The file is no journal, or a replay went another way."""


class Journal:
    """Writes entries to a binary file as the loop goes on."""

    def __init__(self, file: BinaryIO, config: CoreConfig) -> None:
        self._file = file
        self._encoder = msgspec.msgpack.Encoder()
        self._write(Header(VERSION, config))

    def _write(self, value: Header | Entry) -> None:
        body = self._encoder.encode(value)
        self._file.write(len(body).to_bytes(4, "little") + body)

    def applied(self, command: Command) -> None:
        self._write(Applied(command))

    def launched(self, plan: StepPlan | None) -> None:
        self._write(Launched(plan))

    def committed(self, output: StepOutput) -> None:
        self._write(Committed(output))

    def performed(self, directive: Directive, outcome: Outcome) -> None:
        self._write(Performed(directive, outcome))

    def close(self) -> None:
        self._file.close()


def read(file: BinaryIO) -> tuple[CoreConfig, Iterator[Entry]]:
    """The configuration and the entries of a journal. Raises `JournalError` where it is not one."""
    try:
        header = msgspec.msgpack.decode(_frame(file) or b"", type=Header)
    except msgspec.DecodeError as error:
        raise JournalError(f"not a journal of perdure: {error}") from None
    if header.version != VERSION:
        raise JournalError(f"the journal has version {header.version}, this is version {VERSION}")

    def entries() -> Iterator[Entry]:
        decoder = msgspec.msgpack.Decoder(Entry)
        while (body := _frame(file)) is not None:
            yield decoder.decode(body)

    return header.config, entries()


def _frame(file: BinaryIO) -> bytes | None:
    size = int.from_bytes(file.read(4), "little")
    body = file.read(size)
    return body if size and len(body) == size else None


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
                plan = scheduler.plan()
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
    return events
