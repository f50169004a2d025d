"""A life's journal, replayed, gives the same plans and events bit for bit, with and without the device."""

import io
from collections import Counter

import msgspec
import pytest

from perdure.api import event as ev
from perdure.api.errors import JournalError
from perdure.api.plan import StepOutput, StepPlan
from perdure.core.journal import MAGIC, Journal, Told, read, replay
from perdure.runner.fake import FakeDevice
from tests.sim.life import Life, PieceCursor


def recorded(seed: int, depth: int) -> tuple[Life, list[object], bytes]:
    life = Life(seed, depth, Counter())
    life.faulty = life.faulty_device = False
    file = io.BytesIO()
    life.loop._journal = Journal(file, life.config)
    told: list[object] = []
    inner = life._publish
    life.loop._publish = lambda events, time: (told.extend(events), inner(events, time))[1]
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


def test_wherever_it_is_torn_the_whole_entries_remain() -> None:
    _, _, file = recorded(5, 2)
    whole = list(read(io.BytesIO(file))[1])
    for end in range(len(file) - 1, len(file) * 3 // 4, -3):
        _, entries = read(io.BytesIO(file[:end]))
        found = list(entries)
        assert found == whole[: len(found)]
        assert len(found) < len(whole) and entries.num_torn_bytes < len(file)


def test_no_changed_byte_goes_unnoticed() -> None:
    """It is damage, no journal at all, or, in a length, the end of what can be read: never a wrong entry."""
    _, _, file = recorded(8, 2)
    whole = list(read(io.BytesIO(file))[1])
    num_errors = 0
    for at in range(0, len(file), 17):
        damaged = file[:at] + bytes([file[at] ^ 0x10]) + file[at + 1 :]
        found: list[object] = []
        try:
            _, entries = read(io.BytesIO(damaged))
            found += entries
            assert entries.num_torn_bytes
        except JournalError as error:
            assert "\n" not in str(error)
            num_errors += 1
        assert len(found) < len(whole) and found == whole[: len(found)]
    assert num_errors > len(file) // 34


@pytest.mark.parametrize("file", [b"", b"not at all a journal", b"GGUF" + bytes(100), MAGIC, MAGIC + bytes(30)])
def test_no_journal(file: bytes) -> None:
    with pytest.raises(JournalError, match=r"not a journal|before its first entry"):
        read(io.BytesIO(file))


def test_another_version_is_named() -> None:
    file = io.BytesIO()
    journal = Journal(file, recorded(3, 1)[0].config)
    file.truncate(len(MAGIC))
    file.seek(0, io.SEEK_END)
    journal._write({"version": 77, "something": "new"})  # type: ignore[arg-type]
    file.seek(0)
    with pytest.raises(JournalError, match="version 77, this program reads version 4"):
        read(file)


def test_each_entry_has_its_time_and_what_was_told() -> None:
    """Times never go back, and the moments are those that were told, with the ends among them."""
    num_levels = 0
    for seed in range(10):
        _, told, file = recorded(seed, 2)
        entries = list(read(io.BytesIO(file))[1])
        times = [entry.time for entry in entries]
        assert times == sorted(times) and times[0] > 0
        moments = [moment for entry in entries if isinstance(entry, Told) for moment in entry.moments]
        on_the_way = [moment for moment in moments if moment.kind not in ("ended", "refused")]
        assert on_the_way == [event for event in told if isinstance(event, ev.Moment)]
        ends = [(event.ticket, event.record.finish_reason) for event in told if isinstance(event, ev.Ended)]
        assert [(m.ticket, m.detail) for m in moments if m.kind == "ended"] == ends
        levels = [entry.level for entry in entries if isinstance(entry, Told)]
        assert levels[-1].num_running == levels[-1].num_waiting == 0
        num_levels += len({level.num_free_pages for level in levels})
    assert num_levels > 20
