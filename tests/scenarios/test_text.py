"""Stops in text on the scripted model (T25 to T31, T33 to T35): what is shown, when, and the same in every way to
stream it (`streamed.shown`)."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scenarios.scripted import END, Call, Stage, check_equals_solo
from tests.scenarios.streamed import parts_of, shown
from tests.witness import witness

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 4])
BOTH = pytest.mark.parametrize("strip", [False, True], ids=["kept", "stripped"])
INCLUDE = pytest.mark.parametrize("include", [False, True], ids=["cut", "included"])


def run(pieces: dict[int, str], script: list[int], depth: int = 1, block: int | None = None, **asked: Any) -> Call:
    """One request to its end and a clean one. block: from this output index on all tokens come in one step."""
    stage = Stage(depth, pieces=pieces)
    if block is not None:
        stage.device.accepted = {block: len(script) - block}
    call = stage.submit([1, 2, 3], script, **{"max_tokens": 40, "logprobs": 2, **asked})
    stage.run()
    stage.device.accepted = {}
    check_equals_solo(call)
    stage.check_clean_end()
    return call


def spelled(*words: str) -> tuple[dict[int, str], list[int]]:
    """Pieces for these words from 300 on, and the script that says them; then "K" for ever."""
    return dict(enumerate([*words, "K"], 300)), list(range(300, 301 + len(words)))


# T25

ACROSS = (" A", "BC", "DEF", "G", "HI", "J")


@DEPTHS
@INCLUDE
@BOTH
@pytest.mark.parametrize("block", [None, 0, 3, 5])
def test_T25_a_stop_string_over_several_tokens(block: int | None, strip: bool, include: bool, depth: int) -> None:
    pieces, script = spelled(*ACROSS)
    call = run(
        pieces, script, depth, block, stop="DEFGHIJ", strip_stop_tokens=strip, include_stop_str_in_output=include
    )
    final = shown(call)
    assert final.text == (" ABCDEFGHIJ" if include else " ABC")
    assert (final.finish_reason, final.stop_reason) == ("stop", "DEFGHIJ")
    assert final.token_ids == script[: 2 if strip else 6]
    assert include or not any("D" in part.text for part in parts_of(call))
    witness("T25", num_ids=len(final.token_ids), num_parts=len(parts_of(call)))


@DEPTHS
@BOTH
@pytest.mark.parametrize("num_parts", [1, 2, 3, 4, 5])
def test_T25_cut_anywhere(num_parts: int, strip: bool, depth: int) -> None:
    """Inside one token, and over two to five; the token it begins in stays, with its score, though its text is cut."""
    stop = "ST\u00d6P\u4e16"
    step = len(stop) / num_parts
    cut = [stop[round(at * step) : round((at + 1) * step)] for at in range(num_parts)]
    words = ["w", f"x{cut[0]}", *cut[1:]]
    words[-1] += "y"
    call = run(*spelled(*words), depth, stop=[stop], strip_stop_tokens=strip)
    final = shown(call)
    assert (final.text, final.stop_reason) == ("wx", stop)
    assert len(final.token_ids) == (2 if strip else len(words))


@DEPTHS
@BOTH
def test_T25_a_stop_of_bytes(strip: bool, depth: int) -> None:
    """Every character of it is cut over tokens, and its first byte comes with other text before it."""
    data = [*b"ab", *"\u4e16\U0001f600".encode()]
    pieces = {300 + at: f"<0x{byte:02X}>" for at, byte in enumerate(data)} | {400: "K"}
    script = [*range(300, 300 + len(data)), 400]
    final = shown(run(pieces, script, depth, stop=["b\u4e16\U0001f600"], strip_stop_tokens=strip))
    assert final.text == "a" and final.token_ids == script[: 1 if strip else len(data)]


BEFORE: dict[str, tuple[list[str | None], str, int]] = {
    "an unfinished character": (["x", "<0xE4>", "S", "T", "O", "P"], "STOP", 2),
    "one at the beginning": (["<0xE4>", "<0xB8>", "S"], "S", 2),
    "one that belongs to it": (["x", "<0xE4>", "<0xB8>", "S"], "\ufffdS", 1),
    "a character of it": (["x", "<0xE4>", None, "<0xB8>", "<0x96>", "S"], "\u4e16S", 1),
    "an id without text": (["x", None, "S", "T", "O", "P"], "STOP", 2),
    "nothing else": ([None, "", "STOP"], "STOP", 2),
    "one inside it": (["x", "S", None, "TOP"], "STOP", 1),
    "one behind its first token": (["xS", None, "TOP"], "STOP", 1),
    "both": (["x", "<0xE4>", None, "S"], "S", 3),
}
"""Pieces (None: a special id, which is skipped), a stop, and how many ids come before it."""


@DEPTHS
@pytest.mark.parametrize("case", BEFORE)
def test_T25_what_stands_before_a_stop_is_not_stripped(case: str, depth: int) -> None:
    words, stop, num_kept = BEFORE[case]
    pieces = {300 + at: word for at, word in enumerate(words) if word is not None} | {400: "K"}
    script = [*(300 + at if word is not None else END for at, word in enumerate(words)), 400]
    call = run(pieces, script, depth, stop=[stop], strip_stop_tokens=True, ignore_eos=True)
    final = shown(call)
    assert final.stop_reason == stop and final.token_ids == script[:num_kept]
    assert len(call.ended.token_ids) == len(words)
    witness("T25", num_ids=num_kept)


# T26, T27


@BOTH
def test_T26_no_more_is_held_back_than_can_become_a_stop(strip: bool) -> None:
    """Each part of text comes in the step that makes it, but for "<|s", which comes with the "x" that settles it. Ids
    are held only if a stop would be stripped."""
    words = ("hello", " world", "<", "|", "s", "x", "!")
    pieces, script = spelled(*words)
    call = run(pieces, script, max_tokens=7, stop=["<|sep|>"], strip_stop_tokens=strip)
    parts = parts_of(call)
    held = ["hello", " world", "", "", "", "<|sx", "!"]
    assert [part.text for part in parts] == [text for text in held if text or not strip]
    assert [len(part.token_ids) for part in parts] == ([1, 1, 4, 1] if strip else [1] * 7)
    assert shown(call).text == "".join(words)
    witness("T26", num_parts=len(parts))


@DEPTHS
@BOTH
@pytest.mark.parametrize("ending", ["end id", "length", "abort"])
def test_T27_an_end_while_text_is_held(ending: str, strip: bool, depth: int) -> None:
    pieces = {300: "ple", 301: "as", 302: "si", 303: "u"}
    stage = Stage(depth, pieces=pieces)
    script = [300, 301, END] if ending == "end id" else [300, 301, 302, 303]
    asked = {"stop": ["assistant"], "strip_stop_tokens": strip, "max_tokens": 2 if ending == "length" else 30}
    call = stage.submit([1], script, **asked)
    if ending == "abort":
        stage.until(lambda: call.num_output == 2)
        stage.abort(call.request.request_id)
    stage.run()
    final = shown(call)
    held = [part.text for part in parts_of(call)]
    assert final.text == "pleas" and held[0] == "ple" and held[-1].endswith("as")
    assert final.finish_reason == {"end id": "stop"}.get(ending, ending)
    assert final.token_ids == ([300, 301] if strip or ending != "end id" else script)
    witness("T27", ending=ending)
    stage.check_clean_end()


# T28, T29


@DEPTHS
@BOTH
@pytest.mark.parametrize("block", [None, 0, 1, 2])
def test_T28_nothing_after_a_stop_string(block: int | None, strip: bool, depth: int) -> None:
    """With steps in flight beyond it, or the rest in the step that completes it: text, ids, scores and the count of
    tokens end there."""
    pieces, script = spelled("four", ", ", "five", ", ", "six")
    call = run(pieces, script, depth, block, stop=["five"], strip_stop_tokens=strip)
    final = shown(call)
    assert final.text == "four, " and final.token_ids == script[: 2 if strip else 3]
    assert call.ended.scores is not None and call.ended.scores.num_scored == 3
    assert not {303, 304} & {token for part in parts_of(call) for token in part.token_ids}
    witness("T28", num_ids=len(final.token_ids))


@DEPTHS
@pytest.mark.parametrize("block", [None, 0])
@pytest.mark.parametrize("order", [1, -1], ids=["as-given", "reversed"])
def test_T29_the_earliest_stop_is_shown(order: int, block: int | None, depth: int) -> None:
    pieces, script = spelled("A", "B", "CD", "E")
    first = run(pieces, script, depth, block, stop=["CD", "ABCDE", "B"][::order])
    assert (shown(first).text, first.ended.token_ids) == ("A", script[:2])
    assert first.ended.stop is not None and first.ended.stop.reason == "B"
    within = run(*spelled("CDzz"), depth, block, stop=["zz", "CD"][::order])
    assert (shown(within).text, shown(within).stop_reason) == ("", "CD")
    by_id = run(pieces, script, depth, block, stop=["CDE", "BCDE"][::order], stop_token_ids=[302])
    assert (shown(by_id).text, shown(by_id).stop_reason) == ("AB", 302)
    by_string = run(pieces, script, depth, block, stop=["BC"], stop_token_ids=[303])
    assert (shown(by_string).text, shown(by_string).stop_reason) == ("A", "BC")


# T30

BLOCK: dict[str, tuple[list[int], dict[str, Any], list[int], str]] = {
    "stop": ([10, 11, 40, 20, 21, 22], {"max_tokens": 5, "stop_token_ids": [40]}, [10, 11, 40], "stop"),
    "length": ([10, 11, 12, 13, 14, 40], {"max_tokens": 5, "stop_token_ids": [40]}, [10, 11, 12, 13, 14], "length"),
    "end id": ([10, 11, END, 20, 21], {"max_tokens": 5}, [10, 11, END], "stop"),
    "ignored": ([10, END, 11, END, 12, 40], {"max_tokens": 5, "ignore_eos": True}, [10, END, 11, END, 12], "length"),
}


@DEPTHS
@BOTH
@pytest.mark.parametrize("kind", BLOCK)
@pytest.mark.parametrize("begins_at", [0, 1, 2])
def test_T30_a_block_is_shown_up_to_its_stop(begins_at: int, kind: str, strip: bool, depth: int) -> None:
    """A step of several tokens: ids, scores, the best of each, and the engine's count end where the request does."""
    script, asked, ids, reason = BLOCK[kind]
    stage = Stage(depth)
    stage.device.accepted = {begins_at: len(script) - begins_at}
    call = stage.submit([1, 2, 3], script, logprobs=2, strip_stop_tokens=strip, **asked)
    stage.run()
    final = shown(call)
    assert final.token_ids == (ids[:-1] if strip and reason == "stop" else ids) and final.finish_reason == reason
    assert final.logprobs is not None and len(final.logprobs.top_ids) == 2 * len(final.token_ids)
    assert stage.stats().num_generated_tokens == len(ids)
    assert call.ended.token_ids == ids
    stage.device.accepted = {}
    check_equals_solo(call)
    witness("T30", tokens_of_the_step=len(script) - begins_at, kept=len(ids))
    stage.check_clean_end()


# T31, T33


@DEPTHS
@BOTH
def test_T31_text_of_a_stop_before_min_tokens(strip: bool, depth: int) -> None:
    """It is text like any other; the first completed at min_tokens or later ends the request."""
    pieces, script = spelled("a", "stop", "b", "st", "op", "c", "stop")
    call = run(pieces, script, depth, stop=["stop"], min_tokens=5, strip_stop_tokens=strip)
    assert (shown(call).text, len(call.ended.token_ids)) == ("astopb", 5)
    call = run(pieces, script, depth, stop=["stop"], min_tokens=6, strip_stop_tokens=strip)
    assert (shown(call).text, len(call.ended.token_ids)) == ("astopbstopc", 7)


KINDS: dict[str, tuple[dict[str, Any], object, int]] = {
    "end id": ({}, None, 1),
    "id": ({"stop_token_ids": [42]}, 42, 1),
    "string": ({"stop": ["!"]}, "!", 1),
    "sequence": ({"stop_token_sequences": [[41, 42]]}, (41, 42), 2),
}


@DEPTHS
@BOTH
@INCLUDE
@pytest.mark.parametrize("kind", KINDS)
def test_T33_reason_and_tokens_of_a_stop(kind: str, include: bool, strip: bool, depth: int) -> None:
    """Text has the stop only if that was asked, by id, sequence and string alike; ids have it unless stripped."""
    asked, reason, num_matched = KINDS[kind]
    script = [40, 41, END if kind == "end id" else 42, 43]
    pieces = {40: "so", 41: " be it", 42: "!", 43: " And", END: "</s>"}
    common = {"include_stop_str_in_output": include, "strip_stop_tokens": strip, "skip_special_tokens": False}
    final = shown(run(pieces, script, depth, **common, **asked))
    whole = ["so", " be it", "</s>" if kind == "end id" else "!"]
    assert final.text == "".join(whole if include else whole[: 3 - num_matched])
    assert (final.finish_reason, final.stop_reason) == ("stop", reason)
    assert final.token_ids == script[: 3 - num_matched if strip else 3]
    witness("T33", num_ids=len(final.token_ids))


# T34, T35


def of_bytes(data: bytes) -> tuple[dict[int, str], list[int]]:
    return {byte: f"<0x{byte:02X}>" for byte in range(256)}, list(data)


@DEPTHS
@BOTH
def test_T34_a_character_over_tokens(strip: bool, depth: int) -> None:
    """Each id in its own step, each character in the part of its last byte, no replacement anywhere."""
    text = "\U0001f600!\u4e16"
    pieces, script = of_bytes(text.encode())
    call = run(pieces, script, depth, max_tokens=len(script), logprobs=0)
    parts = parts_of(call)
    assert not any("\ufffd" in part.text for part in parts)
    assert [part.text for part in parts] == ["", "", "", "\U0001f600", "!", "", "", "\u4e16"]
    assert [part.token_ids for part in parts] == [[token] for token in script]
    assert shown(call).text == text
    witness("T34", num_parts=len(parts))
    held = run(pieces, script, depth, max_tokens=len(script), stop=["\u4e16\u754c"], strip_stop_tokens=strip)
    assert shown(held).text == text


@DEPTHS
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xf0\x9f\x98", "\ufffd"),
        (b"\xffa", "\ufffda"),
        (b"a\xe4\xb8", "a\ufffd"),
        (b"\xe4\xb8\xf0\x9f\x98\x80", "\ufffd\U0001f600"),
        (b"\xff" * 20 + b"\xf0\x9f\x98\x80", "\ufffd" * 20 + "\U0001f600"),
        (b"\xed\xa0\x80b", "\ufffd\ufffd\ufffdb"),
    ],
)
def test_T35_bytes_that_make_no_character(data: bytes, text: str, depth: int) -> None:
    """One form, streamed and whole: U+FFFD for what could have begun a character; nothing that comes after is lost."""
    pieces, script = of_bytes(data)
    call = run(pieces, script, depth, max_tokens=len(script))
    assert shown(call).text == text == data.decode("utf-8", "replace")
    witness("T35", num_replaced=text.count("\ufffd"))
