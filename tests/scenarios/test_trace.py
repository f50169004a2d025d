"""A run seen from its journal: every span, count and level of a trace is what the engine itself says of it."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

from perdure.api import command as cmd
from perdure.api import event as ev
from perdure.api.errors import JournalError
from perdure.api.plan import StepPlan
from perdure.core.journal import Journal, Launched, Told, read
from perdure.trace.picture import LETTER, MOST_ROWS, STATES, WIDTH
from perdure.trace.timeline import Timeline, Track
from perdure.trace.trace import Trace
from tests.scenarios.scripted import Stage, counting
from tests.sim.life import Life
from tests.witness import witness

SVG = "{http://www.w3.org/2000/svg}"


def record(of: Life | Stage) -> io.BytesIO:
    """Let a run be recorded, one second passing whenever its loop looks at the clock."""
    file = io.BytesIO()
    ticks = itertools.count(100)
    of.loop._journal = Journal(file, of.config)
    of.loop._clock = lambda: float(next(ticks))
    return file


def trace_of(file: io.BytesIO) -> Trace:
    config, entries = read(io.BytesIO(file.getvalue()))
    return Trace(Timeline(config, entries), entries.num_torn_bytes)


def pressed(**settings: int) -> tuple[Stage, Trace]:
    """Four requests of 40 and more positions in 9 pages of 8; one is aborted, one refused, the engine paused once."""
    stage = Stage(
        depth=2, **{"num_pages": 9, "page_size": 8, "paused_pages": 6, "max_num_batched_tokens": 12, **settings}
    )
    file = record(stage)
    for number in range(4):
        prompt = [number + 1] * 20
        stage.submit(prompt, counting(100), request_id=f"<{number}> & co", max_tokens=20 + 6 * number)
    stage.submit([], counting(100), request_id="empty")
    stage.turn(12)
    ticket = stage.pause()
    stage.until(lambda: ticket in stage.answers)
    stage.turn(5)
    stage.resume()
    stage.turn(3)
    stage.abort("<3> & co")
    stage.run()
    return stage, trace_of(file)


def state_at(track: Track, time: float) -> str | None:
    return next((span.state for span in track.spans if span.start <= time < span.end), None)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_a_trace_agrees_with_the_scheduler(depth: int) -> None:
    """Random lives: spans without gaps, counts as in the records, and at any level as many in each state as it says."""
    seen: Counter[str] = Counter()
    for seed in range(60):
        life = Life(seed, depth, Counter())
        file = record(life)
        life.run()
        timeline = trace_of(file).timeline
        tracks = {(track.ticket, track.child): track for track in timeline.tracks}
        refused_late = {key for key in life.moments if key[0] in life.refused - life.is_elsewhere}
        ended_here = {key for key in life.records if key[0] not in life.is_elsewhere}
        assert set(tracks) == ended_here | refused_late
        assert timeline.num_refused == len(life.refused - life.is_elsewhere)
        for key, track in tracks.items():
            if key in refused_late:
                assert track.end_reason == "refused" and {span.state for span in track.spans} <= {"waiting"}
            elif key[0] not in life.went_on:  # a record counts what was before its checkpoint, too
                check_track(track, life.records[key])
            seen.update(span.state for span in track.spans)
        check_levels(timeline)
        entries = read(io.BytesIO(file.getvalue()))[1]
        check_steps(timeline, [entry.plan for entry in entries if isinstance(entry, Launched) and entry.plan])
        seen.update(f"engine_{span.state}" for span in timeline.engine_spans)
    witness(f"trace-lives-depth-{depth}", **seen)
    assert {*STATES, "engine_paused"} <= set(seen)


def check_track(track: Track, result: ev.Record) -> None:
    assert track.request_id == result.request_id and track.end_reason == result.finish_reason
    assert (track.num_pauses, track.num_evictions) == (result.num_pauses, result.num_evictions)
    assert track.num_output == len(result.token_ids) and track.ended is not None
    borders = [track.queued, *(span.end for span in track.spans)]
    assert [span.start for span in track.spans] == borders[:-1] and borders[-1] == track.ended
    states = [span.state for span in track.spans]
    assert states.count("paused") <= result.num_pauses and states.count("evicted") <= track.num_puts_back
    if not track.num_puts_back:
        assert not {"evicted", "recompute"} & set(states)
        if not result.num_pauses and result.finish_reason in ("stop", "length") and {*states} > {"waiting"}:
            known = len(result.prompt_token_ids) - (not result.token_ids)  # scored only: the last one is not computed
            computed = sum(span.num_tokens for span in track.spans if span.state == "prefill")
            if result.child == 0:
                assert computed == known - result.num_cached_tokens
            else:  # its prompt may be a sibling's
                assert 0 < computed <= known


def check_levels(timeline: Timeline) -> None:
    for time, level in timeline.levels:
        states = Counter(state_at(track, time) for track in timeline.tracks)
        assert states["waiting"] + states["evicted"] == level.num_waiting
        assert states["paused"] == level.num_paused
        assert states["prefill"] + states["decode"] + states["recompute"] == level.num_running
    assert timeline.levels[-1][1].num_free_pages == timeline.config.num_pages


def check_steps(timeline: Timeline, plans: list[StepPlan]) -> None:
    steps = timeline.steps
    assert [(step.number, step.num_rows) for step in steps] == [(plan.step, len(plan.request)) for plan in plans]
    assert all(before.end <= step.start < step.end for before, step in itertools.pairwise(steps))
    assert all(step.num_positions >= step.num_rows > 0 for step in steps)


def test_the_engine_s_pause_is_a_span_of_its_own() -> None:
    stage, trace = pressed()
    timeline = trace.timeline
    (span,) = timeline.engine_spans
    assert span.state == "paused"
    inside = [step for step in timeline.steps if span.start < step.start < span.end]
    num_pauses, num_evictions = stage.stats().num_pauses, stage.stats().num_evictions
    witness("trace-pressed", num_pauses=num_pauses, num_evictions=num_evictions)
    assert not inside and timeline.num_refused == 1
    assert [track.end_reason for track in timeline.tracks] == ["length"] * 3 + ["abort"]


def test_the_chrome_trace_has_every_span_step_and_level() -> None:
    _, trace = pressed()
    timeline = trace.timeline
    events = json.loads(json.dumps(trace.chrome()))["traceEvents"]
    threads = {e["args"]["name"]: (e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for track in timeline.tracks:
        mine = [e for e in events if (e["pid"], e["tid"]) == threads[track.label] and e["ph"] != "M"]
        slices = [(e["name"], e["ts"], e["ts"] + e["dur"]) for e in mine if e["ph"] == "X"]
        assert slices == [(span.state, 1e6 * span.start, 1e6 * span.end) for span in track.spans]
        (end,) = [e for e in mine if e["name"] == "ended"]
        assert end["ph"] == "i" and end["args"] == {"reason": track.end_reason, "tokens": track.num_output}
        marks = [e["name"] for e in mine if e["ph"] == "i"]
        assert marks == (["first token", "ended"] if track.num_output else ["ended"])
    steps = [e for e in events if (e["pid"], e["tid"]) == threads["steps"] and e["ph"] == "X"]
    assert [e["args"]["positions"] for e in steps] == [step.num_positions for step in timeline.steps]
    held = [e["args"]["held"] for e in events if e["ph"] == "C" and e["name"] == "KV pages"]
    assert held == [9 - level.num_free_pages for _, level in timeline.levels] and max(held) == 9
    counts = [e["args"] for e in events if e["ph"] == "C" and e["name"] == "requests"]
    assert len(counts) == len(held) and max(count["paused"] for count in counts) > 0
    (paused,) = [e for e in events if (e["pid"], e["tid"]) == threads["state"] and e["ph"] == "X"]
    assert paused["name"] == "paused"


def drawn(root: ElementTree.Element, style: str) -> int:
    """How many shapes a style has; a path counts once for each of its parts."""
    shapes = [shape for shape in root.iter() if shape.get("class") == style]
    return sum((shape.get("d") or "M").count("M") for shape in shapes if shape.tag != f"{SVG}text")


def texts(root: ElementTree.Element) -> list[str]:
    return [text.text or "" for text in root.iter(f"{SVG}text")]


def test_the_picture_shows_every_span_inside_its_frame() -> None:
    _, trace = pressed()
    timeline = trace.timeline
    root = ElementTree.fromstring(trace.svg())
    states = Counter(span.state for track in timeline.tracks for span in track.spans)
    assert set(states) == set(STATES)
    for state, count in states.items():
        assert drawn(root, state) == count + 1  # and one in the legend
    assert drawn(root, "ended") == 4 + 1 and drawn(root, "engine paused") == 1 + 1 and drawn(root, "pool") == 1
    assert {"<0> & co", "20 tokens, length", "engine paused", "9 pages", "held"} <= set(texts(root))
    _, _, width, height = map(float, str(root.get("viewBox")).split())
    for shape in root.iter():
        assert 0 <= float(shape.get("x", 0)) <= width and 0 <= float(shape.get("y", 0)) <= height
        assert float(shape.get("x", 0)) + float(shape.get("width", 0)) <= width
    assert width == WIDTH and height < 420


def test_long_and_strange_ids_are_one_line_inside_the_frame() -> None:
    stage = Stage()
    file = record(stage)
    for name in ("a" * 24, "b" * 3000, "two\nlines", "\x00\x1b", 7):
        stage.submit([1, 2, 3], counting(100), request_id=name, max_tokens=4)
    stage.run()
    trace = trace_of(file)
    labels = [track.label for track in trace.timeline.tracks]
    assert labels == ["a" * 24, "b" * 23 + "…", r"'two\nlines'", r"'\x00\x1b'", "7"]
    root = ElementTree.fromstring(trace.svg())
    for text in root.iter(f"{SVG}text"):
        if text.text in labels:
            assert float(text.get("x", 0)) - LETTER * len(text.text) >= 0
    assert set(labels) <= set(texts(root))
    json.dumps(trace.chrome())


def test_a_moment_that_changes_no_state_is_a_mark() -> None:
    """A checkpoint splits nothing; it is a diamond in the picture and an instant in the trace."""
    stage = Stage()
    file = record(stage)
    call = stage.submit([1, 2, 3], counting(100), max_tokens=8)
    stage.turn(4)
    stats = stage.stats()
    assert stage.loop._journal is not None
    moment = ev.Moment(call.request.ticket, "checkpoint", num_tokens=4)
    stage.loop._journal.told([moment], stats, stage.loop._clock())
    stage.run()
    trace = trace_of(file)
    (track,) = trace.timeline.tracks
    assert [span.state for span in track.spans] == ["waiting", "prefill", "decode"]
    assert [(mark.kind, mark.num_tokens) for mark in track.marks] == [("first_token", 0), ("checkpoint", 4)]
    root = ElementTree.fromstring(trace.svg())
    assert drawn(root, "mark") == 2 and "checkpoint" in texts(root)
    instants = [event["name"] for event in trace.chrome()["traceEvents"] if event["ph"] == "i"]
    assert instants == ["first token", "checkpoint", "ended"]


def test_a_torn_journal_shows_the_run_up_to_the_tear(tmp_path: Path) -> None:
    stage = Stage(depth=2, num_pages=9, page_size=8)
    file = record(stage)
    for number in range(3):
        stage.submit([number + 1] * 20, counting(100), request_id=number, max_tokens=30)
    stage.run()
    path = tmp_path / "run"
    path.write_bytes(file.getvalue()[: len(file.getvalue()) // 2])
    trace = Trace.read(path)
    assert trace.num_torn_bytes > 0
    unfinished = [track for track in trace.timeline.tracks if track.ended is None]
    assert unfinished and all(track.end_reason is None for track in unfinished)
    assert all(track.spans[-1].end == trace.timeline.duration for track in unfinished)
    ElementTree.fromstring(trace.svg())


def test_a_damaged_journal_shows_the_run_before_the_damage(tmp_path: Path) -> None:
    """One changed byte costs what comes after it; in the head it costs all."""
    stage = Stage(depth=2, num_pages=9, page_size=8)
    file = record(stage)
    for number in range(3):
        stage.submit([number + 1] * 20, counting(100), request_id=number, max_tokens=30)
    stage.run()
    data, path = file.getvalue(), tmp_path / "run"
    path.write_bytes(data)
    whole = Trace.read(path)
    assert whole.damage is None and not whole.num_torn_bytes
    middle = data.index(b"\n", len(data) // 2)  # not the length of an entry, which only tears it
    path.write_bytes(data[:middle] + b"?" + data[middle + 1 :])
    trace = Trace.read(path)
    assert trace.damage is not None and trace.damage.startswith("the journal is damaged: the entry at byte")
    assert 0 < len(trace.timeline.steps) < len(whole.timeline.steps)
    assert trace.timeline.steps == whole.timeline.steps[: len(trace.timeline.steps)]
    ElementTree.fromstring(trace.svg())
    path.write_bytes(data[:200] + b"?" + data[201:])
    with pytest.raises(JournalError, match=f"{path}: the journal is damaged: the entry at byte"):
        Trace.read(path)


def test_an_empty_run_and_one_of_thousands_have_a_picture() -> None:
    """The picture of many requests shows the first ones, says so, and is no poster."""
    stage = Stage()
    file = record(stage)
    empty = ElementTree.fromstring(trace_of(file).svg())
    assert any(text.startswith("0 requests") for text in texts(empty))
    num = 2 * MOST_ROWS
    for number in range(num):
        stage.submit([1 + number % 100], counting(100), request_id=number, max_tokens=2)
    stage.run()
    trace = trace_of(file)
    root = ElementTree.fromstring(trace.svg())
    assert len(trace.timeline.tracks) == num and drawn(root, "decode") <= MOST_ROWS + 1
    assert any(f"the first {MOST_ROWS} requests are shown" in text for text in texts(root))
    assert float(str(root.get("viewBox")).split()[3]) < 1600


def test_what_is_told_costs_a_journal_nothing_when_nothing_changes() -> None:
    """Questions leave no level behind; decode steps within a page leave none either."""
    stage = Stage(page_size=64)
    file = record(stage)
    stage.submit([1, 2, 3], counting(100), max_tokens=40)
    for _ in range(20):
        stage.turn()
        stage.inbox.put(cmd.GetStats(stage.ticket()))
    stage.run()
    told = [entry for entry in read(io.BytesIO(file.getvalue()))[1] if isinstance(entry, Told)]
    assert 3 <= len(told) <= 5


def test_a_suspended_engine_is_a_span_of_its_own_and_what_it_dropped_is_recomputed() -> None:
    """Nobody is evicted, yet all that had pages wait for new ones, and none is held meanwhile."""
    stage = Stage(depth=2)
    file = record(stage)
    calls = [stage.submit([number] * 20, counting(100), max_tokens=30) for number in range(3)]
    stage.until(lambda: min(call.num_output for call in calls) > 4)
    ticket = stage.ticket()
    stage.inbox.put(cmd.Suspend(ticket, kv="recompute"))
    stage.until(lambda: ticket in stage.answers)
    stage.turn(3)
    stage.resume()
    stage.run()
    trace = trace_of(file)
    span = trace.timeline.engine_spans[-1]
    assert span.state == "suspended"
    assert [level.num_free_pages for time, level in trace.timeline.levels if time == span.start] == [320]
    for track in trace.timeline.tracks:
        states = [span.state for span in track.spans]
        assert states == ["waiting", "prefill", "decode", "evicted", "recompute", "decode"]
        assert track.num_evictions == 0 and state_at(track, span.start) == "evicted"
    check_levels(trace.timeline)
    root = ElementTree.fromstring(trace.svg())
    assert "engine suspended" in texts(root) and drawn(root, "engine suspended") == 2
