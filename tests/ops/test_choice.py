"""Which product serves a shape: measured once, kept, and only a clear gain moves it."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch

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
    for text in ("", "{", "[[1]]", '[["a", 32, [1, 1, 1]]]', "[[64, 32, [1]]]", "{}", "[[64, 32, 3]]", "\xff"):
        kept.write_text(text)
        assert choose(native, [(64, 32)], lambda shape: slower(3.0)).ratios == {
            (64, 32): pytest.approx(slower(3.0), abs=1e-3)
        }


def test_time_is_bounded_and_what_is_left_is_the_kernels_for_good(
    native: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later start with more time must not choose anew: the bits would differ."""
    for seconds in (0.0, 100.0):
        monkeypatch.setattr(choice, "SECONDS", seconds)
        late = choose(native, [(64, 32)], lambda shape: slower(2.0))
        assert not late.is_packed((64, 32))
        assert late.describe() == {"64 x 32": "native (no time was left to measure it)"}


def test_what_another_process_settled_meanwhile_holds(native: Library) -> None:
    def measure(shape: Shape) -> Ratios:
        choose(native, [(64, 32)], lambda shape: slower(2.0))  # the other one, sooner done
        return slower(1.0)

    first = choose(native, [(64, 32), (96, 32)], measure)
    assert first.is_packed((64, 32)) and not first.is_packed((96, 32))
    assert choose(native, [(64, 32), (96, 32)], measure).ratios == first.ratios


def test_other_threads_and_other_kernels_are_measured_anew(native: Library) -> None:
    choose(native, [(64, 32)], lambda shape: slower(2.0))
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert not choose(native, [(64, 32)], lambda shape: slower(1.0)).is_packed((64, 32))
    finally:
        torch.set_num_threads(before)
    other = dataclasses.replace(native, version="another")
    assert not choose(other, [(64, 32)], lambda shape: slower(1.0)).is_packed((64, 32))
    assert choose(native, [(64, 32)], lambda shape: slower(1.0)).is_packed((64, 32))


def test_the_gain_that_counts_is_over_all_numbers_of_rows(native: Library) -> None:
    """By the geometric mean: twice as slow somewhere and as fast elsewhere is no clear gain."""
    ratios = {(1, 8): (0.5, 1.0, 1.0), (2, 8): (0.66, 0.66, 0.66), (3, 8): (0.67, 0.67, 0.67), (4, 8): (2.0, 0.3, 0.3)}
    found = choose(native, ratios, ratios.__getitem__)
    assert [found.is_packed(shape) for shape in ratios] == [False, True, False, True]


def test_a_folder_that_cannot_be_written_is_no_error(native: Library, tmp_path: Path) -> None:
    """Nobody is told, and nothing is left; each start measures again."""
    gone = dataclasses.replace(native, folder=tmp_path / "gone")
    assert choose(gone, [(64, 32)], lambda shape: slower(2.0)).is_packed((64, 32))
    assert not choose(gone, [(64, 32)], lambda shape: slower(1.0)).is_packed((64, 32))
    assert not list(tmp_path.iterdir())


def test_a_real_measurement_says_something(native: Library) -> None:
    """No bound on what: where others use the machine, a turn may take a hundred times as long."""
    found = choose(native, [(960, 576)])
    assert all(0 < ratio < math.inf for ratio in found.ratios[(960, 576)])
