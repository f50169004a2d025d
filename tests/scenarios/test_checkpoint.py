"""Checkpoints on the scripted model: from every status, with steps in flight, over every stop, to the turn."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from msgspec.structs import replace

from perdure.api.checkpoint import Checkpoint, Sample
from perdure.api.ending import Ending
from perdure.api.errors import InvalidValue
from perdure.api.event import Failure
from perdure.api.fingerprint import Fingerprint
from tests.scenarios.scripted import Call, Stage, check_equals_solo, counting, flat
from tests.scenarios.test_lifecycle import under_pressure
from tests.scenarios.test_stops import PIECES, SCRIPT, STOPS, check_stopped
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3, 4])
ENDLESS = counting(60)
Where = Callable[[int], tuple[Stage, Call]]


def submitted(stage: Stage, **settings: object) -> Call:
    """With all that a record can hold: prompt scores, best scores, drawn tokens."""
    wanted = {"max_tokens": 24, "logprobs": 2, "prompt_logprobs": 1, "temperature": 1.0, **settings}
    return stage.submit(range(5, 15), flat, request_id="A", **wanted)


def queued(depth: int) -> tuple[Stage, Call]:
    stage = Stage(depth, max_num_seqs=1)
    stage.submit([1], counting(100), max_tokens=20)
    call = submitted(stage)
    stage.turn(3)
    return stage, call


def in_prefill(depth: int) -> tuple[Stage, Call]:
    stage = Stage(depth, max_num_batched_tokens=3)
    call = submitted(stage)
    stage.turn(2)
    assert 0 < call.state.num_computed < 10 and not call.num_output
    return stage, call


def running(depth: int) -> tuple[Stage, Call]:
    stage = Stage(depth)
    call = submitted(stage)
    stage.until(lambda: call.num_output == 6)
    assert call.state.in_flight == depth - 1
    return stage, call


def after_a_hit(depth: int) -> tuple[Stage, Call]:
    stage = Stage(depth, page_size=4)
    stage.submit(range(5, 15), ENDLESS, max_tokens=3)
    stage.run()
    call = submitted(stage, prompt_logprobs=None)
    stage.until(lambda: call.num_output == 6)
    assert call.group.num_cached == 8
    return stage, call


def engine_paused(depth: int) -> tuple[Stage, Call]:
    stage, call = running(depth)
    ticket = stage.pause()
    stage.until(lambda: ticket in stage.answers)
    return stage, call


def without_a_page(depth: int) -> tuple[Stage, Call]:
    stage, _, call = under_pressure(depth, "A2", paused_pages=5)
    stage.until(lambda: call.state.status.value == "paused")
    return stage, call


def evicted(depth: int) -> tuple[Stage, Call]:
    stage, _, call = under_pressure(depth, "A2")
    stage.until(lambda: call.state.num_evictions > 0)
    return stage, call


WHERE: tuple[Where, ...] = (
    queued,
    in_prefill,
    running,
    after_a_hit,
    engine_paused,
    without_a_page,
    evicted,
)


@DEPTHS
@pytest.mark.parametrize("end", [False, True], ids=["lives-on", "ends"])
@pytest.mark.parametrize("where", WHERE, ids=lambda where: where.__name__)
def test_a_checkpoint_goes_on_elsewhere_from_every_status(where: Where, end: bool, depth: int) -> None:
    """Elsewhere, at another depth, with other chunks and pages, the result is the undisturbed one; so is the
    original's, if it lives on; and here, beside it, under another id."""
    stage, call = where(depth)
    status, known = call.state.status.value, call.num_output
    found = stage.checkpoint(call, end)
    # the turn that takes it also commits a step: what is in a checkpoint was known before that
    assert (found.status, found.num_output) == (status, known)
    assert found.num_remaining == call.request.params.max_tokens - known
    if end:
        assert call.ended.finish_reason == "abort" and call.ended.token_ids == found.token_ids
        check_equals_solo(call, known)
    elsewhere = Stage(5 - depth, page_size=8, max_num_batched_tokens=5, max_num_seqs=2)
    elsewhere.submit([1, 2, 3], counting(100), max_tokens=30)
    there = elsewhere.go_on(found, call.script)
    here = stage.go_on(found, call.script, request_id="again")
    if stage.stats().state == "paused":
        stage.resume()
    for one in (stage, elsewhere):
        one.check_clean_end()
    for one in (here, there) if end else (here, there, call):
        assert one.ended.seed == found.seed and one.token_ids == one.ended.token_ids[: len(one.token_ids)]
        check_equals_solo(one)
    witness(f"checkpoint-{where.__name__}", depth=depth, status=status, num_checkpoints=there.ended.num_checkpoints)


@DEPTHS
@pytest.mark.parametrize("kind", STOPS)
@pytest.mark.parametrize("taken_at", [(6,), (7,), (3, 6, 7)], ids=str)
@pytest.mark.parametrize("strip", [False, True], ids=["kept", "stripped"])
def test_T32_s18_a_stop_over_a_checkpoint(strip: bool, taken_at: tuple[int, ...], kind: str, depth: int) -> None:
    """The first tokens of a stop come before the checkpoint, the last after it, in two segments or in four."""
    stage = Stage(depth, pieces=PIECES)
    call = stage.submit([9] * 3, SCRIPT, max_tokens=20, strip_stop_tokens=strip, **STOPS[kind])
    for count in taken_at:
        stage.until(lambda: call.num_output >= count)  # noqa: B023
        found = stage.checkpoint(call, end=True)
        assert found.num_output == count
        stage = Stage(depth, pieces=PIECES)
        call = stage.go_on(found, SCRIPT)
    stage.run()
    witness("s18-stop-across-checkpoint", num_checkpoints=call.ended.num_checkpoints)
    assert call.ended.num_checkpoints == len(taken_at)
    check_stopped(call, kind)
    stage.check_clean_end()


def test_a_checkpoint_of_what_is_not_live_is_refused() -> None:
    stage = Stage()
    stage.submit([1, 2], ENDLESS, request_id="A", max_tokens=2)
    stage.run()
    for name in ("A", "unknown", 7):
        failure = stage.ask_checkpoint(name)
        assert isinstance(failure, Failure) and failure.kind == "InvalidValue"
        assert f"request_id={name!r} is not live" in failure.message
    stage.check_clean_end()


def refusal(stage: Stage, checkpoint: Checkpoint) -> str:
    call = stage.go_on(checkpoint, ENDLESS)
    stage.turn()
    assert call.refusal is not None and call.refusal.kind == "InvalidValue"
    assert not stage.scheduler.requests.live and not stage.scheduler.requests.states
    return call.refusal.message


def test_a_checkpoint_that_does_not_fit_is_refused_whole() -> None:
    """Its budget is its own: an engine without room for it says so before anything of it exists."""
    stage, call = running(2)
    found = stage.checkpoint(call)
    room = "may grow to 34 tokens, this engine has room for 32"
    assert f"{room} (max_model_len=32" in refusal(Stage(max_model_len=32), found)
    assert f"{room} (max_model_len=256, num_pages=2 of page_size=16)" in refusal(Stage(num_pages=2), found)
    assert "is not a token id of this model: 0 to 9" in refusal(Stage(vocab_size=10, end_token_ids=()), found)
    twin = stage.go_on(found, flat)
    stage.turn()
    assert twin.refusal is not None and "request_id='A' is live" in twin.refusal.message
    stage.check_clean_end()


def test_unequal_fingerprints_are_marked_or_refused() -> None:
    here = Fingerprint(weights="w", threads="2")
    stage = Stage(fingerprint=here)
    call = submitted(stage, prompt_logprobs=None)
    waiting = stage.checkpoint(call)
    stage.until(lambda: call.num_output == 4)
    begun = stage.checkpoint(call, end=True)
    assert begun.fingerprint == here and begun.num_output and not waiting.num_output

    there = Fingerprint(weights="w", threads="4")
    message = refusal(Stage(fingerprint=there, on_mismatch="refuse"), begun)
    assert "on_mismatch='refuse': threads: '2' there, '4' here" in message
    for other, found, exact in (
        (Stage(fingerprint=there), begun, False),
        (Stage(fingerprint=there), waiting, True),  # nothing was computed there
        (Stage(fingerprint=there, on_mismatch="refuse"), waiting, True),
        (Stage(fingerprint=here, on_mismatch="refuse"), begun, True),
    ):
        again = other.go_on(found, flat)
        other.run()
        assert again.ended.exact is exact
        check_equals_solo(again)
    # and it stays marked on its way back
    other = Stage(fingerprint=there)
    again = other.go_on(begun, flat)
    other.turn(4)
    back = Stage(fingerprint=here)
    home = back.go_on(other.checkpoint(again, end=True), flat)
    back.run()
    assert home.ended.exact is False
    witness("fingerprint", num_checkpoints=home.ended.num_checkpoints)


@pytest.mark.parametrize("invariant", [True, False])
def test_without_batch_invariance_a_result_says_what_it_went_through(invariant: bool) -> None:
    """A hit, an eviction and a move go on with the same bits only if the forms are batch invariant."""
    stage, call = after_a_hit(1)
    found = stage.checkpoint(call)
    stage = Stage(page_size=4, batch_invariant=invariant)
    plain = stage.submit(range(5, 15), ENDLESS, max_tokens=3)
    stage.run()
    hit = stage.submit(range(5, 15), ENDLESS, max_tokens=3)
    moved = stage.go_on(found, flat)
    stage.run()
    pressed = Stage(num_pages=5, page_size=4, enable_prefix_caching=False, batch_invariant=invariant)
    pressed.submit([1, 2, 3, 4, 5], counting(100), max_tokens=8)
    put_aside = pressed.submit([6, 7, 8], ENDLESS, max_tokens=12)
    pressed.run()
    witness("exact", cached=hit.ended.num_cached_tokens, evictions=put_aside.ended.num_evictions)
    assert plain.ended.exact
    assert [one.ended.exact for one in (hit, moved, put_aside)] == [invariant] * 3


def test_damaged_and_foreign_files_are_refused() -> None:
    stage, call = running(1)
    data = stage.checkpoint(call).to_bytes()
    version = len(b"perdure checkpoint")
    wrong = {
        "not a checkpoint of perdure": [b"", b"{}", b"x" + data, b"perdure journal\n"],
        "cut short: 1 bytes end before": [data[:1]],
        "cut short: 18 bytes end before": [data[:version]],
        "cut short: 19 bytes end before": [data[: version + 1]],
        "format version 0, and only version 4": [data[:version] + b"\0\0" + data[version + 2 :]],
        "format version 3, and only version 4": [data[:version] + b"\3\0" + data[version + 2 :]],
        "damaged or cut short": [data[:-1], data[: version + 2], data + b"x", data[:-1] + bytes([data[-1] ^ 1])],
        "is bytes, not str": ["perdure checkpoint"],
    }
    for message, files in wrong.items():
        for file in files:
            with pytest.raises(InvalidValue, match=message):
                Checkpoint.from_bytes(file)  # type: ignore[arg-type]
    for at in range(version + 2, len(data), 7):
        with pytest.raises(InvalidValue, match="damaged"):
            Checkpoint.from_bytes(data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :])


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("request_id", True, "request_id=True"),
        ("request_id", 1.5, "request_id=1.5"),
        ("request_id", 2**63, "fits neither 64 bits"),
        ("request_id", "\ud800", "nor UTF-8"),
        ("status", "finished", "status='finished'"),
        ("params", {}, "params={}"),
        ("prompt", 5, "prompt=5"),
        ("prompt", b"text", "prompt=b'text'"),
        ("prompt", "\ud800", "not valid Unicode"),
        ("prompt_tokens", b"123", "prompt_tokens of 3 bytes"),
        ("seed", 1.0, "seed=1.0"),
        ("tokens", "AAAA", "tokens='AAAA'"),
        ("tokens", bytearray(400), "bytes is"),
        ("scores", None, "scores is missing"),
        ("exact", 1, "exact=1"),
        ("num_cached_tokens", -1, "num_cached_tokens=-1 does not fit a prompt of 10 tokens"),
        ("num_cached_tokens", 10, "num_cached_tokens=10 does not fit a prompt of 10 tokens"),
        ("num_cached_tokens", True, "num_cached_tokens=True"),
        ("num_pauses", -1, "num_pauses=-1"),
        ("num_evictions", 2**63, "num_evictions=9223372036854775808"),
        ("num_checkpoints", 0.5, "num_checkpoints=0.5"),
        ("epochs", ((0, "a"),), "epochs="),
        ("samples", (), "holds 0 samples of a request with n=1"),
        ("samples", ({},), "samples="),
        ("ending", Ending("stop"), "all samples of the checkpoint have ended"),
        ("timing", None, "timing=None"),
    ],
)
def test_a_checkpoint_that_was_altered_is_checked_like_one_from_a_file(field: str, value: object, words: str) -> None:
    stage, call = running(1)
    found = stage.checkpoint(call)
    (sample,) = found.samples
    with pytest.raises(InvalidValue, match=re.escape(words)) as refusal:
        if field in Sample.__struct_fields__:
            replace(found, samples=(replace(sample, **{field: value}),))
        else:
            replace(found, **{field: value})
    assert len(str(refusal.value)) < 800
    assert replace(found, request_id="another").token_ids == found.token_ids
