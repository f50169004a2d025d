"""Text as ids arrive: the parts of a stream joined are one decode of the whole, whatever the tokenizer and wherever the
ids cut a character."""

from __future__ import annotations

import codecs
import random
import time
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Inner

from perdure.api.request import Request
from perdure.api.sampling import SamplingParams
from perdure.engine.spelling import UNFINISHED, WindowedText, byte_level, sentencepiece, text_cursor
from perdure.engine.text import StreamBuilder
from perdure.engine.tokenizer import Tokenizer, load_tokenizer
from tests.witness import witness

CASES = 1_000
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["\u2581", "\u2581\u2581", "\u2581the", "\u2581a", "the", "a", "b", "\u00e9", "\u4e16\u754c", "\u2581\u4e16"]
SPACES = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
LLAMA = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]


def saved(inner: Inner, directory: Path) -> Tokenizer:
    """As a directory has it, read by the engine."""
    from transformers import PreTrainedTokenizerFast

    inner.add_special_tokens([AddedToken(piece, special=True, normalized=False) for piece in SPECIAL])
    PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>").save_pretrained(directory)
    return load_tokenizer(directory)


def pure_bytes(directory: Path) -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Inner(models.BPE(vocab={piece: at for at, piece in enumerate([*SPECIAL, *letters])}, merges=[]))
    inner.decoder = decoders.ByteLevel()
    return saved(inner, directory)


def llama_bpe(directory: Path) -> Tokenizer:
    vocabulary = {piece: at for at, piece in enumerate([*SPECIAL, *BYTES, *WORDS])}
    inner = Inner(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer, inner.decoder = SPACES, decoders.Sequence(LLAMA)
    return saved(inner, directory)


def llama_unigram(directory: Path) -> Tokenizer:
    """Without the space before a text, as Gemma's."""
    inner = Inner(models.Unigram([(piece, -float(at)) for at, piece in enumerate([*SPECIAL, *BYTES, *WORDS])], 0, True))
    inner.normalizer, inner.decoder = normalizers.Replace(" ", "\u2581"), decoders.Sequence(LLAMA[:3])
    return saved(inner, directory)


def llama_of_two_spaces(directory: Path) -> Tokenizer:
    """A text loses two of them."""
    inner = Inner(models.WordLevel({piece: at for at, piece in enumerate([*SPECIAL, *BYTES, *WORDS])}, "<unk>"))
    inner.decoder = decoders.Sequence([*LLAMA[:3], decoders.Strip(" ", 2, 0)])
    return saved(inner, directory)


def llama_without_spaces(directory: Path) -> Tokenizer:
    """Bytes are pieces, and nothing else is changed."""
    inner = Inner(models.WordLevel({piece: at for at, piece in enumerate([*SPECIAL, *BYTES, *WORDS])}, "<unk>"))
    inner.decoder = decoders.Sequence(LLAMA[1:3])
    return saved(inner, directory)


def metaspace(directory: Path) -> Tokenizer:
    """A decoder that is none of the two: the first id loses its space, and bytes are pieces like others."""
    inner = Inner(models.BPE(vocab={piece: at for at, piece in enumerate([*SPECIAL, *WORDS])}, merges=[]))
    inner.decoder = decoders.Metaspace()
    return saved(inner, directory)


class Opaque:
    """The same text from `decode` alone."""

    spelling = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.decode = tokenizer.decode
        self.all_special_ids = tokenizer.all_special_ids


@pytest.fixture(scope="module")
def tokenizers(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    makers = (pure_bytes, llama_bpe, llama_unigram, llama_of_two_spaces, llama_without_spaces, metaspace)
    found: dict[str, Any] = {make.__name__: make(tmp_path_factory.mktemp(make.__name__)) for make in makers}
    found["smollm2"] = load_tokenizer(smollm2_path)
    found |= {f"opaque {name}": Opaque(found[name]) for name in ("smollm2", "llama_bpe")}
    return found


NUM_STRIPPED = {"llama_bpe": 1, "llama_of_two_spaces": 2}
KNOWN = ["smollm2", "pure_bytes", "llama_bpe", "llama_unigram", "llama_of_two_spaces", "llama_without_spaces"]
ALL = [*KNOWN, "metaspace", "opaque smollm2", "opaque llama_bpe"]


def pieces_of(tokenizer: Tokenizer) -> dict[bytes, list[int]]:
    """The ids that spell these bytes."""
    found: dict[bytes, list[int]] = {}
    assert tokenizer.spelling is not None
    for token in range(tokenizer.vocab_size):
        if token not in tokenizer.all_special_ids:
            found.setdefault(tokenizer.spelling.bytes_of(token), []).append(token)
    return found


def cut(data: bytes, pieces: dict[bytes, list[int]], rng: random.Random) -> list[int]:
    """Ids that spell the data, cut where chance will have it, inside characters too."""
    ids, at = [], 0
    while at < len(data):
        fitting = [n for n in range(1, 8) if data[at : at + n] in pieces]
        step = rng.choice([1, rng.choice(fitting)])
        ids.append(rng.choice(pieces[data[at : at + step]]))
        at += step
    return ids


def check_stream(tokenizer: Any, ids: list[int], skip: bool) -> str:
    """Whatever is certain is the beginning of the text so far and of all later ones; what is not is at most three bytes
    of a character. Returns what was streamed."""
    cursor, given = text_cursor(tokenizer, skip), ""
    for count in range(1, len(ids) + 1):
        given += cursor.push(ids[count - 1 : count])
        whole = tokenizer.decode(ids[:count], skip)
        assert whole.startswith(given)
        assert whole[len(given) :].strip(UNFINISHED) == "" and len(whole) - len(given) <= 3
    again = text_cursor(tokenizer, skip)
    assert again.push(ids) == given, "the same ids at once"
    return given


@pytest.mark.parametrize("name", KNOWN)
def test_T34_text_cut_at_every_byte(name: str, tokenizers: dict[str, Any], soak_factor: int) -> None:
    """Random Unicode, each character's bytes cut over ids in every way: the parts are the text, and none holds a
    replacement that the text does not."""
    tokenizer = tokenizers[name]
    pieces = pieces_of(tokenizer)
    num_cut = 0

    @settings(max_examples=CASES * soak_factor)
    @given(st.text(max_size=24), st.integers(0, 2**32))
    def check(text: str, seed: int) -> None:
        nonlocal num_cut
        if name == "smollm2":  # it has no pieces for bytes that only begin characters nobody has written yet
            text = "".join(letter for letter in text if all(bytes([byte]) in pieces for byte in letter.encode()))
        ids = cut(text.encode(), pieces, random.Random(seed))
        num_spaces = len(text) - len(text.lstrip(" "))
        shown = text[min(num_spaces, NUM_STRIPPED.get(name, 0)) :]
        assert tokenizer.decode(ids, False) == shown
        cursor = text_cursor(tokenizer, False)
        parts = [cursor.push([token]) for token in ids]
        assert "".join(parts) == shown
        assert all(UNFINISHED not in part for part in parts) or UNFINISHED in text
        num_cut += parts.count("")

    check()
    assert tokenizer.spelling is not None
    witness("T34", num_ids_inside_characters=num_cut)


@pytest.mark.parametrize("skip", [False, True], ids=["special", "skipped"])
@pytest.mark.parametrize("name", ALL)
def test_T35_random_ids_and_special_ones(name: str, skip: bool, tokenizers: dict[str, Any], soak_factor: int) -> None:
    """Bytes that make no characters, ids that the vocabulary lacks, special ones between the bytes of a character."""
    tokenizer = tokenizers[name]
    assert isinstance(text_cursor(tokenizer, skip), WindowedText) == (name not in KNOWN)
    rare = {"smollm2": 49160, "pure_bytes": 256}.get(name.removeprefix("opaque "), 290 if "llama" in name else 20)
    common = {"smollm2": range(20, 280)}.get(name.removeprefix("opaque "), range(rare))
    held = 0

    @settings(max_examples=(300 if name in KNOWN else 60) * soak_factor)
    @given(st.integers(0, 2**32))
    def check(seed: int) -> None:
        nonlocal held
        rng = random.Random(seed)
        kinds = (lambda: rng.randrange(3), lambda: rng.choice(common), lambda: rng.randint(0, rare))
        ids = [rng.choice(kinds)() for _ in range(rng.randint(0, 40 if name in KNOWN else 80))]
        held += check_stream(tokenizer, ids, skip) != tokenizer.decode(ids, skip)

    check()
    assert held or name == "metaspace"


@pytest.mark.parametrize("name", KNOWN)
def test_text_is_the_librarys_own(name: str, tokenizers: dict[str, Any], soak_factor: int) -> None:
    """Of byte-level ids always; of SentencePiece's wherever no byte is wrong."""
    tokenizer = tokenizers[name]
    inner = getattr(tokenizer._inner, "backend_tokenizer", tokenizer._inner)
    rng = random.Random(3)
    num_equal = 0
    for _ in range(CASES * soak_factor):
        ids = [rng.randrange(tokenizer.vocab_size + 3) for _ in range(rng.randint(0, 12))]
        for skip in (True, False):
            ours, theirs = tokenizer.decode(ids, skip), inner.decode(ids, skip_special_tokens=skip)
            assert ours == theirs or ("llama" in name and UNFINISHED in ours)
            num_equal += ours == theirs
    assert num_equal > CASES // 5


def places(data: bytes, each: bool) -> list[int]:
    """In which character of the text each byte stands, found by what `bytes.decode` says of its faults."""
    faults: list[tuple[int, int]] = []

    def note(error: UnicodeError) -> tuple[str, int]:
        assert isinstance(error, UnicodeDecodeError)
        faults.append((error.start, error.end))
        return "", error.end

    codecs.register_error("tests.note", note)
    data.decode("utf-8", "tests.note")
    broken = {at: (first, at) for first, end in faults for at in range(first, end)}
    found: list[int] = []
    for at, byte in enumerate(data):
        goes_on = broken[at][0] < at and not each if at in broken else byte & 0xC0 == 0x80
        found.append((found[-1] if found else -1) + (not goes_on))
    return found


@pytest.mark.parametrize("name", KNOWN)
def test_where_ids_begin(name: str, tokenizers: dict[str, Any], soak_factor: int) -> None:
    """Of each character that is certain: the ids before it are those whose bytes are, and those without any between."""
    tokenizer, rng, num_certain = tokenizers[name], random.Random(5), 0
    spelling = tokenizer.spelling
    rare = [token for token in range(tokenizer.vocab_size) if len(spelling.bytes_of(token)) > 1]
    one_byte = {spelling.bytes_of(token): token for token in range(tokenizer.vocab_size)}
    letters = [b"%c" % byte for byte in b"\xe4\xb8\x96\xef\xbf\xbd S"]
    chosen = [one_byte[letter] for letter in letters if letter in one_byte]
    for _ in range(CASES // 2 * soak_factor):
        ids = [rng.choice(rng.choice([range(3), chosen, chosen, rare])) for _ in range(rng.randint(1, 12))]
        cursor = text_cursor(tokenizer, True)
        text = "".join(cursor.push([token]) for token in ids)
        parts, left = [], NUM_STRIPPED.get(name, 0)
        for token in ids:
            part = b"" if token in tokenizer.all_special_ids else spelling.bytes_of(token)
            while left and part.startswith(b" "):
                part, left = part[1:], left - 1
            left = 0 if part else left
            parts.append(part)
        starts = [0, *accumulate(map(len, parts))]
        where = places(b"".join(parts), spelling.errors != "replace")
        for character in range(len(text)):
            first = where.index(character)
            before = [start < first or (start == first and not part) for start, part in zip(starts, parts)]
            assert before == sorted(before, reverse=True)
            assert cursor.begins.num_before(character) == sum(before), (ids, character)
        num_certain += len(text)
    witness("T25", num_characters=num_certain)


def test_sentencepieces_bytes_are_replaced_one_by_one(tokenizers: dict[str, Any]) -> None:
    """A wrong byte costs its neighbours nothing: what a stream has shown of the run stays."""
    tokenizer = tokenizers["llama_bpe"]
    ids = [3 + byte for byte in "\u4e16".encode() + b"\xff\xe4\xb8"]
    assert check_stream(tokenizer, ids, True) == "\u4e16\ufffd"
    assert tokenizer.decode(ids) == "\u4e16\ufffd\ufffd\ufffd"


def test_a_space_before_the_text_is_taken_off_once(tokenizers: dict[str, Any]) -> None:
    tokenizer = tokenizers["llama_bpe"]
    for text in ("the a", " the", "  a", "", " "):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert check_stream(tokenizer, ids, True) == text
        assert check_stream(tokenizer, [1, 1, *ids, 2], True) == text
    assert check_stream(tokenizer, [1, *tokenizer.encode("a", add_special_tokens=False)], False) == "<s> a"


def test_letters_of_bytes() -> None:
    assert byte_level("\u0120the\u010a") == b" the\n" and byte_level("a b") == b"a b"
    assert (
        sentencepiece("\u2581the") == b" the"
        and sentencepiece("<0x0A>") == b"\n"
        and sentencepiece("<0xQ>") == b"<0xQ>"
    )


NUM_STREAMED = 4_000


@pytest.mark.parametrize("name", ["smollm2", "llama_bpe", "opaque smollm2"])
def test_a_streamed_token_costs_the_same_however_long_the_output(name: str, tokenizers: dict[str, Any]) -> None:
    """4,000 tokens through everything that makes parts, with a stop string and a sequence to look for: the last
    thousand cost what the first did, in CPU time, by the best of ten hundreds each."""
    tokenizer, rng = tokenizers[name], random.Random(0)
    tokens = [rng.randrange(20, 280) for _ in range(NUM_STREAMED)]
    asked = SamplingParams(stop=["no such text"], stop_token_sequences=[[1, 2, 3]], strip_stop_tokens=True)
    request = Request("a", 1, [5], asked, stream=True)
    builder = StreamBuilder(request, tokenizer, cumulative=False)
    times, parts = [], []
    for at in range(0, NUM_STREAMED, 100):
        start = time.thread_time()
        parts += [builder.progress([token], None, 0) for token in tokens[at : at + 100]]
        times.append(time.thread_time() - start)
    text = "".join(part.outputs[0].text for part in parts if part is not None)
    assert tokenizer.decode(tokens).startswith(text) and len(tokenizer.decode(tokens)) - len(text) < 20
    first, last = min(times[:10]), min(times[-10:])
    witness("text-cost", us_a_token_first=round(first * 1e4, 1), us_a_token_last=round(last * 1e4, 1))
    assert last < 2.5 * first
