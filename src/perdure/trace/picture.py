"""A timeline as one picture (SVG): time across, requests down with a colour a state, the pool's pages below.

- It brings its own ground, light or dark as the reader's system is, so it is readable wherever it is placed.
- Colours are those of Okabe and Ito, which colour-blind people tell apart too; height says the same as colour: full
  height computes, half height holds pages and waits, a line holds none.
- Its size depends on the events of the run, not on its tokens: one path a state, in tenths of a pixel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from xml.sax.saxutils import escape

from perdure.api.span import State
from perdure.trace.timeline import Timeline, Track

WIDTH, MARGIN = 1000.0, 24.0
LEAST_LEFT, RIGHT = 120.0, 860.0
"""Where time begins, unless labels are long, and where it ends: after it stands how the last requests ended."""

ROW_HEIGHT, ROWS_HEIGHT = 24.0, 1200.0
"""Of one row, and of all where there are many."""

MOST_ROWS = 500
POOL_HEIGHT = 84.0
LETTER = 6.9
"""Width of a letter, about."""

# state: its name, its part of a row's height, its colour on light and on dark ground
STATES: dict[State, tuple[str, float, str, str]] = {
    "waiting": ("waiting", 0.16, "#8a929b", "#8a929b"),
    "prefill": ("prefill chunk", 1.0, "#0072b2", "#3d9fd8"),
    "decode": ("decode", 1.0, "#009e73", "#1fb58c"),
    "paused": ("paused, keeps its pages", 0.5, "#e69f00", "#f0b429"),
    "evicted": ("evicted, waits", 0.16, "#d55e00", "#ee7a24"),
    "recompute": ("recompute", 1.0, "#cc79a7", "#d98cb8"),
}
MARKS = ("checkpoint",)
"""Kinds of moments that are shown, as diamonds."""

STYLE = """
  text { font: 12px system-ui, -apple-system, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328; }
  .ground { fill: #ffffff; stroke: #d1d9e0; } .quiet { fill: #59636e; } .title { font-size: 15px; font-weight: 600; }
  .grid { stroke: #d1d9e0; fill: none; } .full { stroke: #59636e; stroke-dasharray: 3 3; fill: none; }
  .pool { fill: #56b4e9; fill-opacity: 0.45; stroke: #0072b2; } .mark { fill: #1f2328; stroke: #ffffff; }
  .ended { fill: #1f2328; } .engine { fill: #59636e; fill-opacity: 0.4; } .suspended { fill: #332288; }
  %s
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3; } .ground { fill: #0d1117; stroke: #30363d; } .quiet { fill: #9198a1; }
    .grid { stroke: #262c34; } .full { stroke: #9198a1; } .pool { stroke: #56b4e9; }
    .mark { fill: #e6edf3; stroke: #0d1117; } .ended { fill: #e6edf3; } .suspended { fill: #8a7ee0; }
    %s
  }
"""


def picture(timeline: Timeline) -> str:
    """The text of an SVG file."""
    return _Picture(timeline).text()


class _Picture:
    """Laid out from the top down: each part begins at `y` and moves it on."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.tracks = timeline.tracks[:MOST_ROWS]
        self.start = min((track.queued for track in self.tracks), default=0.0)
        ends = [timeline.duration if track.ended is None else track.ended for track in self.tracks]
        self.seconds = max(max(ends, default=timeline.duration) - self.start, 1e-6)
        letters = max((len(track.label) for track in self.tracks), default=0)
        self.left = max(LEAST_LEFT, MARGIN + LETTER * letters + 8)
        self.y = MARGIN

    def text(self) -> str:
        head, legend = [*self._head()], [*self._legend()]
        top = self.y
        requests, pool = [*self._requests()], [*self._pool()]
        grid, engine = [*self._grid(top)], [*self._engine(top)]
        axis = [*self._axis()]
        height = self.y + MARGIN / 2
        light, dark = (" ".join(f".{s} {{ fill: {look[at]}; }}" for s, look in STATES.items()) for at in (2, 3))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img">',
                f"<title>{escape(self._title())}</title>",
                f"<style>{STYLE % (light, dark)}</style>",
                f'<rect class="ground" x="0.5" y="0.5" width="{WIDTH - 1:.0f}" height="{height - 1:.0f}" rx="8"/>',
                *head,
                *legend,
                *grid,
                *requests,
                *pool,
                *engine,
                *axis,
                "</svg>\n",
            ]
        )

    # Above

    def _title(self) -> str:
        config = self.timeline.config
        pool = f"{_counted(config.num_pages, 'page')} of {_counted(config.page_size, 'token')}"
        return f"{_counted(len(self.timeline.tracks), 'request')} in a pool of {pool}"

    def _head(self) -> Iterator[str]:
        timeline = self.timeline
        words = [
            _time(self.seconds, self.seconds),
            _counted(len(timeline.steps), "step"),
            _counted(sum(track.num_pauses for track in timeline.tracks), "pause"),
            _counted(sum(track.num_evictions for track in timeline.tracks), "eviction"),
        ]
        if timeline.num_refused:
            words.append(f"{timeline.num_refused:,} refused")
        if len(timeline.tracks) > len(self.tracks):
            words.append(f"the first {len(self.tracks)} requests are shown")
        yield _text(MARGIN, self.y + 12, self._title(), "title")
        yield _text(WIDTH - MARGIN, self.y + 12, " · ".join(words), "quiet", "end")
        self.y += 30

    def _legend(self) -> Iterator[str]:
        """States, then what else there is in this run: a name, its style, and a part of the height."""
        entries = [(name, str(state), part) for state, (name, part, _, _) in STATES.items()]
        entries.append(("ended", "ended", 1.0))
        marks = [mark.kind for track in self.tracks for mark in track.marks]
        entries += [(kind, "mark", 1.0) for kind in MARKS if kind in marks]
        states = dict.fromkeys(span.state for span in self.timeline.engine_spans)
        entries += [(f"engine {state}", f"engine {state}", 1.0) for state in states]
        x = MARGIN
        for name, style, part in entries:
            width = 24 + LETTER * len(name)
            if x + width > WIDTH - MARGIN:
                x, self.y = MARGIN, self.y + 20
            middle, height = self.y + 6, max(3.0, 12 * part)
            if style == "mark":
                yield _diamond(x + 9, middle)
            else:
                yield _box(style, x, middle - height / 2, 2.0 if style == "ended" else 18.0, height)
            yield _text(x + (8 if style == "ended" else 24), self.y + 10, name, "quiet")
            x += width + 16
        self.y += 34

    # Requests

    def _requests(self) -> Iterator[str]:
        height = min(ROW_HEIGHT, ROWS_HEIGHT / max(1, len(self.tracks)))
        bar = height * 0.68 if height > 6 else height
        paths: dict[State, list[str]] = {state: [] for state in STATES}
        words: list[str] = []
        label_every = math.ceil(14 / height)
        for number, track in enumerate(self.tracks):
            middle = self.y + height * (number + 0.5)
            self._draw(track, middle, bar, paths)
            if number % label_every == 0:
                words.append(_text(self.left - 8, middle + 4, track.label, "", "end"))
            if label_every == 1:
                words += self._end(track, middle, bar)
            words += [_diamond(self._x(mark.time), middle) for mark in track.marks if mark.kind in MARKS]
        self.y += height * len(self.tracks) + 14
        yield from (f'<path class="{state}" d="{"".join(path)}"/>' for state, path in paths.items() if path)
        yield from words

    def _draw(self, track: Track, middle: float, bar: float, paths: dict[State, list[str]]) -> None:
        for span in track.spans:
            x, end = self._x(span.start), self._x(span.end)
            gap = 0.8 if span.num_tokens and end - x > 4 else 0.0  # so that chunks can be told apart
            height = max(bar * STATES[span.state][1], 0.5)
            width = max(end - x - gap, 0.7)
            paths[span.state].append(f"M{x:.1f} {middle - height / 2:.1f}h{width:.1f}v{height:.1f}h-{width:.1f}z")

    def _end(self, track: Track, middle: float, bar: float) -> Iterator[str]:
        if track.ended is not None:
            x = self._x(track.ended)
            yield _box("ended", x, middle - bar / 2, 2.0, bar)
            yield _text(x + 7, middle + 4, f"{_counted(track.num_output, 'token')}, {track.end_reason}", "quiet")

    # The pool

    def _pool(self) -> Iterator[str]:
        num_pages = self.timeline.config.num_pages
        top, bottom = self.y, self.y + POOL_HEIGHT
        line = "".join(f"H{x:.1f}V{bottom - POOL_HEIGHT * held / num_pages:.1f}" for x, held in self._held())
        yield f'<path class="pool" d="M{self.left:.1f} {bottom:.1f}{line}H{RIGHT:.1f}V{bottom:.1f}z"/>'
        yield f'<path class="full" d="M{self.left:.1f} {top:.1f}H{RIGHT:.1f}"/>'
        yield _text(self.left - 8, top + 4, _counted(num_pages, "page"), "quiet", "end")
        yield _text(self.left - 8, (top + bottom) / 2 + 4, "held", "", "end")
        yield _text(self.left - 8, bottom + 4, "0", "quiet", "end")
        self.y = bottom

    def _held(self) -> Iterator[tuple[float, int]]:
        """How many pages are held from x on. Of what changes within half a pixel the largest number is shown."""
        last_x, last = self.left, 0
        for time, level in self.timeline.levels:
            x, held = self._x(time), self.timeline.config.num_pages - level.num_free_pages
            if x >= RIGHT:
                break
            if x < last_x + 0.5:
                last = max(held, last) if x > self.left else held
            else:
                yield last_x, last
                last_x, last = x, held
        yield last_x, last

    # Across all of it

    def _engine(self, top: float) -> Iterator[str]:
        """Spans in which the engine was paused or suspended lie over all that stood still, in that state's colour."""
        for span in self.timeline.engine_spans:
            x, end = (min(max(self._x(time), self.left), RIGHT) for time in (span.start, span.end))
            if end > x:
                yield _box(f"engine {span.state}", x, top - 6, max(end - x, 1.0), self.y - top + 6)

    def _grid(self, top: float) -> Iterator[str]:
        for tick in self._ticks():
            yield f'<path class="grid" d="M{self._x(self.start + tick):.1f} {top - 6:.1f}V{self.y:.1f}"/>'

    def _axis(self) -> Iterator[str]:
        for tick in self._ticks():
            yield _text(self._x(self.start + tick), self.y + 18, _time(tick, self.seconds), "quiet", "middle")
        self.y += 26

    def _ticks(self) -> list[float]:
        """At most ten after 0, apart by 1, 2 or 5 times a power of ten."""
        unit = 10.0 ** (math.floor(math.log10(self.seconds)) - 1)
        apart = next(unit * times for times in (1, 2, 5, 10) if self.seconds / (unit * times) <= 10)
        return [apart * number for number in range(int(self.seconds / apart + 1e-9) + 1)]

    def _x(self, time: float) -> float:
        return self.left + (RIGHT - self.left) * (time - self.start) / self.seconds


def _text(x: float, y: float, text: str, style: str, anchor: str = "start") -> str:
    look = f' class="{style}"' if style else ""
    side = f' text-anchor="{anchor}"' if anchor != "start" else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{look}{side}>{escape(text)}</text>'


def _box(style: str, x: float, y: float, width: float, height: float) -> str:
    return f'<rect class="{style}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"/>'


def _diamond(x: float, y: float) -> str:
    return f'<path class="mark" d="M{x - 5:.1f} {y:.1f}l5 -5 5 5 -5 5z"/>'


def _counted(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def _time(seconds: float, longest: float) -> str:
    """In the unit that suits the longest time of the picture."""
    return f"{seconds:.3g} s" if longest >= 1 else f"{1000 * seconds:.3g} ms"
