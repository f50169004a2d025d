"""Which product serves a shape: measured once, kept, and only a clear gain moves it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from perdure.ops import choice
from perdure.ops.choice import ROWS, Ratios, Shape, choose
from perdure.ops.native import Library, library


@pytest.fixture
def native(tmp_path: Path) -> Library:
    found = library()
    assert found is not None
    return dataclasses.replace(found, folder=tmp_path)


def slower(times: float) -> Ratios:
    """The kernels take so many times packed's time."""
    return (1 / times,) * len(ROWS)


def test_what_was_measured_is_kept_and_only_a_clear_gain_counts(native: Library) -> None:
    asked: list[Shape] = []

    def measure(shape: Shape) -> Ratios:
        asked.append(shape)
        return slower(2.0 if shape == (64, 32) else 1.2)

    shapes = [(64, 32), (96, 32), (64, 32)]
    first = choose(native, shapes, measure)
    assert asked == [(64, 32), (96, 32)]
    assert first.is_packed((64, 32)) and not first.is_packed((96, 32)) and not first.is_packed((1, 1))
    again = choose(native, shapes, measure)
    assert asked == [(64, 32), (96, 32)] and again.ratios == first.ratios
    assert again.describe()["64 x 32"].startswith("packed") and again.describe()["96 x 32"].startswith("native")


def test_a_damaged_file_is_measured_again(native: Library, tmp_path: Path) -> None:
    choose(native, [(64, 32)], lambda shape: slower(2.0))
    (kept,) = tmp_path.iterdir()
    for text in ("", "{", "[[1]]", '[["a", 32, [1, 1, 1]]]', "[[64, 32, [1]]]"):
        kept.write_text(text)
        assert choose(native, [(64, 32)], lambda shape: slower(3.0)).ratios == {
            (64, 32): pytest.approx(slower(3.0), abs=1e-3)
        }


def test_time_is_bounded_and_what_is_left_is_the_kernels(native: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SECONDS", 0.0)
    late = choose(native, [(64, 32)], lambda shape: slower(2.0))
    assert not late.ratios and not late.is_packed((64, 32))


def test_a_real_measurement_says_something(native: Library) -> None:
    found = choose(native, [(960, 576)])
    assert all(0.02 < ratio < 50 for ratio in found.ratios[(960, 576)])
