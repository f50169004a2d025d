"""A timeline as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

- One process is the engine: its steps, the states in which it did not run, and counters of pages and requests.
- The other is the requests, a thread each: slices by state, instants for what is no state.
- Times are microseconds.
"""

from __future__ import annotations

from typing import Any

from perdure.trace.timeline import Timeline, Track

ENGINE, REQUESTS = 1, 2
STEPS, STATES = 1, 2


def chrome_trace(timeline: Timeline) -> dict[str, Any]:
    """A value for `json.dump`."""
    events = [
        *_named("process", ENGINE, 0, "engine"),
        *_named("thread", ENGINE, STEPS, "steps"),
        *_named("process", REQUESTS, 0, "requests"),
    ]
    if timeline.engine_spans:
        events += _named("thread", ENGINE, STATES, "state")
    for step in timeline.steps:
        about = {"step": step.number, "rows": step.num_rows, "positions": step.num_positions}
        events.append(_slice(ENGINE, STEPS, f"step {step.number}", step.start, step.end, about))
    for span in timeline.engine_spans:
        events.append(_slice(ENGINE, STATES, span.state, span.start, span.end, {}))
    for time, level in timeline.levels:
        held = timeline.config.num_pages - level.num_free_pages
        events.append(_counter("KV pages", time, {"held": held}))
        counts = {"running": level.num_running, "waiting": level.num_waiting, "paused": level.num_paused}
        events.append(_counter("requests", time, counts))
    for number, track in enumerate(timeline.tracks):
        events += _of_request(track, number + 1)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _of_request(track: Track, thread: int) -> list[dict[str, Any]]:
    events = _named("thread", REQUESTS, thread, track.label)
    for span in track.spans:
        about = {"tokens": span.num_tokens} if span.num_tokens else {}
        events.append(_slice(REQUESTS, thread, span.state, span.start, span.end, about))
    for mark in track.marks:
        events.append(_instant(thread, mark.kind.replace("_", " "), mark.time, {}))
    if track.ended is not None:
        events.append(_instant(thread, "ended", track.ended, {"reason": track.end_reason, "tokens": track.num_output}))
    return events


def _named(what: str, process: int, thread: int, name: str) -> list[dict[str, Any]]:
    """A process or thread gets a name, and its place by number."""
    place = {"pid": process, "tid": thread}
    order = process if what == "process" else thread
    return [
        {"ph": "M", "name": f"{what}_name", **place, "args": {"name": name}},
        {"ph": "M", "name": f"{what}_sort_index", **place, "args": {"sort_index": order}},
    ]


def _slice(process: int, thread: int, name: str, start: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    since = _us(start)
    return {"ph": "X", "name": name, "pid": process, "tid": thread, "ts": since, "dur": _us(end) - since, "args": about}


def _instant(thread: int, name: str, time: float, about: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "i", "s": "t", "name": name, "pid": REQUESTS, "tid": thread, "ts": _us(time), "args": about}


def _counter(name: str, time: float, values: dict[str, int]) -> dict[str, Any]:
    return {"ph": "C", "name": name, "pid": ENGINE, "tid": 0, "ts": _us(time), "args": values}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
