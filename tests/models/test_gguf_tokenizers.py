"""Tokenizers of GGUF files against transformers' own over the same vocabulary, and cuts against the public patterns.

Vocabularies are trained here in a moment on this project's own prose and some foreign letters.
"""

import json
from pathlib import Path

import gguf
import pytest
import regex
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from perdure.api.errors import ModelLoadError
from perdure.engine.gguf_tokenizer import CUTS
from perdure.engine.tokenizer import load_tokenizer

TEXTS = [
    "",
    "Hello, world! It's what WE'LL see: don't.",
    " two  spaces\n\n   and\tlines \r\n\n x",
    "digits 2026, 1234567 and 3.14159; v2beta3 HTTPServer camelCase//path/to\n",
    "caf\u00e9 \u4f60\u597d\u4e16\u754c \U0001f680 na\u00efve \u00c5ngstr\u00f6m",
    "\u0928\u092e\u0938\u094d\u0924\u0947 \u0416\u0443\u043a",
    "the thing that they think through, though; request tokens pages scheduler",
    "trailing spaces   ",
]
SPECIAL = ["<unk>", "<s>", "</s>"]
FEW_LETTERS = [chr(c) for c in range(32, 127)]


@pytest.fixture(scope="module")
def prose(request):
    return (request.config.rootpath / "CONTRIBUTING.md").read_text() * 2 + " ".join(TEXTS)


@pytest.fixture(scope="module")
def byte_level(prose):
    """(vocabulary, merges)"""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([prose], trainer)
    return _trained(tokenizer)


@pytest.fixture(scope="module")
def scored(prose):
    """Pieces and their scores as SentencePiece has them: special ones, bytes, what merges make, letters last."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=[*FEW_LETTERS, "\u2581"], show_progress=False)
    tokenizer.train_from_iterator(["".join(c for c in prose if c in FEW_LETTERS)], trainer)
    vocabulary, merges = _trained(tokenizer)
    made = [left + right for left, right in merges]
    letters = sorted(set(vocabulary) - set(made))
    pieces = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *dict.fromkeys(made), *letters]
    return pieces, [0.0 if i < 259 else float(259 - i) for i in range(len(pieces))]


def _trained(tokenizer: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def _write(path: Path, kind: str, pieces: list[str], types: list[int], **fields) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(pieces)
    writer.add_token_types(types)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def _gpt2_like(path, byte_level, pre):
    vocabulary, merges = byte_level
    pieces = sorted(vocabulary, key=vocabulary.__getitem__)
    types = [3 if piece == "<|end|>" else 1 for piece in pieces]
    return load_tokenizer(
        _write(path, "gpt2", pieces, types, tokenizer_pre=pre, token_merges=[" ".join(merge) for merge in merges])
    )


@pytest.mark.parametrize("pre", ["qwen2", "gpt-2"])
def test_gpt2_like_ids_equal_transformers(tmp_path, byte_level, pre):
    from transformers import GPT2Tokenizer, Qwen2Tokenizer

    kind = Qwen2Tokenizer if pre == "qwen2" else GPT2Tokenizer
    theirs = kind(vocab=byte_level[0], merges=byte_level[1], unk_token="<|end|>", bos_token=None, eos_token="<|end|>")
    ours = _gpt2_like(tmp_path / "m.gguf", byte_level, pre)
    for text in [*TEXTS, "cafe\u0301 composed", "<|end|> in<|end|>text"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids)


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PUBLIC = {
    "default": GPT2,
    "gpt-2": GPT2,
    "olmo": GPT2,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "dbrx": LLAMA3,
    "qwen2": LLAMA3.replace("{1,3}", ""),
    "deepseek-r1-qwen": LLAMA3.replace("{1,3}", ""),
    "gpt-4o": O200K,
    "tekken": TEKKEN,
    "smollm": rf"\p{{N}}|{GPT2}",
    "starcoder": rf"\p{{N}}|{GPT2}",
}
"""What each cut finds, one part after the other."""


@pytest.mark.parametrize("pre", CUTS)
def test_cuts_are_the_public_patterns(pre):
    tokenizer = Tokenizer(models.BPE())
    CUTS[pre].apply(tokenizer)
    for text in TEXTS:
        if PUBLIC[pre].startswith(r"\p{N}|"):  # digits first, then each stretch between them by itself
            stretches = regex.findall(r"\p{N}|\P{N}+", text)
            expected = [part for stretch in stretches for part in regex.findall(PUBLIC[pre], stretch)]
        else:
            expected = regex.findall(PUBLIC[pre], text)
        assert [text[slice(*span)] for _, span in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == expected


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken"])
def test_a_part_that_is_a_piece_stays_whole(tmp_path, byte_level, pre):
    vocabulary, merges = byte_level
    whole = {**vocabulary, "zqx": len(vocabulary)}  # no merge makes it
    assert _gpt2_like(tmp_path / "m.gguf", (whole, merges), pre).encode("zqx") == [len(vocabulary)]
    assert len(_gpt2_like(tmp_path / "n.gguf", (whole, merges), "dbrx").encode("zqx")) == 3


def _spm(path, scored, **fields):
    pieces, scores = scored
    types = [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259)
    return load_tokenizer(
        _write(path, "llama", pieces, types, token_scores=scores, bos_token_id=1, eos_token_id=2, **fields)
    )


def _merges(scored):
    from transformers.tokenization_utils_base import generate_merges

    vocabulary = {piece: token_id for token_id, piece in enumerate(scored[0])}
    return vocabulary, generate_merges(vocabulary, dict(zip(*scored)))


def test_sentencepiece_ids_equal_transformers(tmp_path, scored):
    from transformers import LlamaTokenizerFast

    vocabulary, merges = _merges(scored)
    theirs = LlamaTokenizerFast(vocab=vocabulary, merges=merges, legacy=True)
    ours = _spm(tmp_path / "m.gguf", scored)
    assert ours.adds_bos
    used = set()
    for text in [*TEXTS, "</s>in</s>text", "<s>"]:
        ids = ours.encode(text, add_special_tokens=False)
        # SentencePiece puts a space before every text, this class only where none is.
        assert ids == theirs.encode(" " + text if text.startswith(" ") else text, add_special_tokens=False)
        assert ours.encode(text) == [1, *ids]
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
        used |= set(ids)
    for text in TEXTS:
        assert ours.decode(ours.encode(text)) == text
    assert used & set(range(3, 259)), "some letters are spelled in bytes"
    assert any(len(scored[0][token]) > 3 for token in used if token >= 259)


def test_sentencepiece_without_a_space_before_the_text(tmp_path, scored):
    from transformers import GemmaTokenizer

    vocabulary, merges = _merges(scored)
    theirs = GemmaTokenizer(
        vocab=vocabulary, merges=merges, bos_token="<s>", eos_token="</s>", pad_token="<unk>", mask_token="<unk>"
    )
    ours = _spm(tmp_path / "m.gguf", scored, add_space_prefix=False, add_bos_token=False)
    assert not ours.adds_bos
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text, add_special_tokens=False)
        assert ours.decode(ids) == text


def test_sentencepiece_without_its_scores_is_refused(tmp_path, scored):
    pieces, scores = scored
    types = [1] * len(pieces)
    with pytest.raises(ModelLoadError, match=r"'tokenizer\.ggml\.scores' is missing"):
        load_tokenizer(_write(tmp_path / "m.gguf", "llama", pieces, types))
    with pytest.raises(ModelLoadError, match=f"{len(pieces)} tokens but {len(pieces) - 1} scores"):
        load_tokenizer(_write(tmp_path / "n.gguf", "llama", pieces, types, token_scores=scores[1:]))


def test_user_defined_pieces_are_matched_whole(tmp_path, scored):
    pieces, scores = scored
    ours = load_tokenizer(
        _write(
            tmp_path / "m.gguf",
            "llama",
            [*pieces, "\n\n", "\u2581" * 2, "\u2581" * 3],
            [2, 3, 3] + [6] * 256 + [1] * (len(pieces) - 259) + [4] * 3,
            token_scores=[*scores, 0.0, 0.0, 0.0],
            add_space_prefix=False,
        )
    )
    first = len(pieces)
    assert ours.encode("\n\n   \n\n  ") == [first, first + 2, first, first + 1]
    assert ours.decode([first, first + 2], skip_special_tokens=True) == "\n\n   "
