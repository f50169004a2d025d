"""A life's journal, replayed, gives the same plans and events bit for bit, with and without the device."""

import io
from collections import Counter

import msgspec
import pytest

from perdure.api.plan import StepOutput, StepPlan
from perdure.core.journal import Journal, JournalError, read, replay
from perdure.runner.fake import FakeDevice
from tests.sim.life import Life, PieceCursor


def recorded(seed: int, depth: int) -> tuple[Life, list[object], bytes]:
    life = Life(seed, depth, Counter())
    life.faulty = life.faulty_device = False
    file = io.BytesIO()
    life.loop._journal = Journal(file, life.config)
    told: list[object] = []
    inner = life._publish
    life.loop._publish = lambda events: (told.extend(events), inner(events))[1]
    life.run()
    return life, told, file.getvalue()


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_replay_is_bit_for_bit(depth: int) -> None:
    for seed in range(40):
        life, told, file = recorded(seed, depth)
        config = life.config
        device = FakeDevice(config.num_pages, config.page_size, config.max_num_seqs, config.vocab_size)

        def execute(plan: StepPlan, device: FakeDevice = device) -> StepOutput:
            return device.launch(plan).wait()

        assert replay(io.BytesIO(file), lambda request: PieceCursor()) == told
        device.staged = life.orders.staged
        assert replay(io.BytesIO(file), lambda request: PieceCursor(), execute, device.perform) == told


def test_a_different_run_is_noticed() -> None:
    _, _, file = recorded(3, 2)
    config, entries = read(io.BytesIO(file))
    other = io.BytesIO()
    changed = Journal(other, msgspec.structs.replace(config, max_num_batched_tokens=2))
    for entry in entries:
        changed._write(entry)
    with pytest.raises(JournalError, match="differs from the recorded one"):
        replay(io.BytesIO(other.getvalue()), lambda request: PieceCursor())


def test_a_torn_journal_replays_up_to_the_tear() -> None:
    _, told, file = recorded(5, 2)
    part = replay(io.BytesIO(file[: len(file) * 2 // 3]), lambda request: PieceCursor())
    assert part == told[: len(part)] and part


def test_no_journal() -> None:
    with pytest.raises(JournalError, match="not a journal"):
        read(io.BytesIO(b"not at all a journal"))
