"""The two lifecycles as tables: what a request may become, and what the engine may become.

A request waits, runs, may be put aside with its pages (PAUSED) or without them (back to WAITING), and ends exactly once
in one of three final statuses. With steps in flight its last token may arrive after it was put aside, so it can finish
from WAITING and PAUSED too. A final status never changes; the request is forgotten when no step of it is in flight.

The engine runs, is paused, or is suspended with its memory given back in part; from each it can be stopped for good.
A suspension of a running engine passes through PAUSED.

An illegal move raises and changes nothing. `docs/lifecycle.md` is generated from these tables.
"""

from __future__ import annotations

from enum import Enum
from typing import TypeVar


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    ABORTED = "aborted"
    FAILED = "failed"


class EngineState(Enum):
    RUNNING = "running"
    PAUSED = "paused"
    SUSPENDED = "suspended"
    STOPPED = "stopped"


REQUEST_MOVES: dict[Status, dict[Status, str]] = {
    Status.WAITING: {
        Status.RUNNING: "takes a slot and pages",
        Status.FINISHED: "its last token was in flight when it was evicted, or nothing is to be computed",
        Status.ABORTED: "aborted",
        Status.FAILED: "its step failed after it was evicted, or it is refused: its grammar cannot be compiled",
    },
    Status.RUNNING: {
        Status.PAUSED: "no page for its next position",
        Status.WAITING: "evicted, or its KV was dropped",
        Status.FINISHED: "stop or length",
        Status.ABORTED: "aborted",
        Status.FAILED: "its step failed",
    },
    Status.PAUSED: {
        Status.RUNNING: "a page is free again",
        Status.WAITING: "evicted, or its KV was dropped",
        Status.FINISHED: "its last token was in flight when it was paused",
        Status.ABORTED: "aborted",
        Status.FAILED: "its step failed after it was paused",
    },
    Status.FINISHED: {},
    Status.ABORTED: {},
    Status.FAILED: {},
}

ENGINE_MOVES: dict[EngineState, dict[EngineState, str]] = {
    EngineState.RUNNING: {EngineState.PAUSED: "pause", EngineState.STOPPED: "stop"},
    EngineState.PAUSED: {
        EngineState.RUNNING: "resume",
        EngineState.SUSPENDED: "suspend, or weights written in part",
        EngineState.STOPPED: "stop",
    },
    EngineState.SUSPENDED: {
        EngineState.RUNNING: "resume of all, or whole weights after an update that failed",
        EngineState.PAUSED: "whole weights after an update that failed while paused",
        EngineState.STOPPED: "stop",
    },
    EngineState.STOPPED: {},
}

FINAL = frozenset(status for status, moves in REQUEST_MOVES.items() if not moves)

_S = TypeVar("_S", Status, EngineState)


class IllegalMove(Exception):
    """A move the table does not have: a fault of ours."""


def moved(table: dict[_S, dict[_S, str]], current: _S, to: _S) -> _S:
    """The new status, if the table allows the move."""
    if to not in table[current]:
        allowed = ", ".join(move.name for move in table[current]) or "nothing"
        raise IllegalMove(f"{current.name} may become {allowed}, not {to.name}")
    return to


def diagram(table: dict[_S, dict[_S, str]]) -> str:
    """The table as a Mermaid state diagram."""
    first = next(iter(table))
    lines = ["stateDiagram-v2", f"    [*] --> {first.name}"]
    for current, moves in table.items():
        lines += [f"    {current.name} --> {to.name}: {why}" for to, why in moves.items()]
        if not moves:
            lines.append(f"    {current.name} --> [*]")
    return "\n".join(lines)
