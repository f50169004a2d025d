"""What of a packed step is read, and where it lies then."""

from __future__ import annotations

import numpy as np

from perdure.runner.inputs import PackedStep, Targets


def step_of(lengths: list[int], sampled: list[int], target_rows: list[int]) -> PackedStep:
    """Rows of these lengths; of sampled ones the last position is read, and so are these packed rows."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    rows, none = np.arange(len(lengths)), np.zeros(len(target_rows), np.int64)
    return PackedStep(
        token_ids=np.arange(offsets[-1]),
        positions=np.arange(offsets[-1]),
        slots=rows,
        starts=0 * rows,
        ends=np.array(lengths),
        offsets=offsets,
        on_device=rows < 0,
        kv_slots=np.arange(offsets[-1]),
        sampled=np.array(sampled, np.int64),
        sampled_hidden=offsets[1:][sampled] - 1,
        targets=Targets(none, none, none, np.array(target_rows, np.int64)),
    )


def test_a_narrowed_step_reads_the_same_rows():
    step = step_of([20, 1, 30, 5], [0, 1, 3], [3, 4, 19, 40])
    narrow, wanted = step.narrowed()
    assert wanted is not None and wanted.tolist() == [3, 4, 19, 20, 40, 55]
    assert wanted[narrow.sampled_hidden].tolist() == step.sampled_hidden.tolist()
    assert wanted[narrow.targets.hidden_row].tolist() == step.targets.hidden_row.tolist()
    padded, wider = step.narrowed(8)
    assert wider is not None and wider.tolist() == [*wanted, 55, 55]
    assert padded.sampled_hidden.tolist() == narrow.sampled_hidden.tolist()


def test_a_chunk_that_nothing_is_read_of_computes_its_last_row():
    _, wanted = step_of([20], [], []).narrowed()
    assert wanted is not None and wanted.tolist() == [19]


def test_a_step_that_is_read_whole_or_nearly_stays_as_it_is():
    for step in (step_of([1, 1, 1], [0, 1, 2], []), step_of([10], [0], [3, 4, 5, 6, 7, 8])):
        narrow, wanted = step.narrowed()
        assert wanted is None and narrow is step
