"""A tokenizer built from a GGUF's metadata with the `tokenizers` library: byte-level BPE, or SentencePiece's BPE.

- Byte-level ("gpt2"): merges and pieces come from the file; how text is cut before merging is named there
  (`tokenizer.ggml.pre`) and known here. An unknown name is refused: guessing would give other ids than the model was
  trained on.
- SentencePiece ("llama"): pieces come with scores; of all neighbours that make a piece those merge first whose piece
  scores best. Spaces are spelled U+2581, one is put before the text, and what no piece covers is spelled in bytes.
- Control pieces are special (dropped from decoded text on demand); user-defined ones are matched whole but are text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as BPETokenizer

from perdure.api.errors import ModelLoadError
from perdure.engine.chat_template import (
    Messages,
    TemplateKwargs,
    Tools,
    checked_text,
    refuse_missing_template,
    render,
)
from perdure.engine.spelling import SPACE, Spelling
from perdure.models.gguf_file import GGUFFile

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of tokenizer.ggml.token_type

ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


@dataclass(frozen=True, slots=True)
class Cut:
    """How text is cut before pieces are merged.

    pattern: the parts to cut out, in their order; None = GPT-2's own, which the library has.
    single_digits: digits are cut apart first. nfc: text is composed first.
    whole_first: a part that is a piece stays whole, whatever the merges. adds_bos: unless the file says otherwise.
    """

    pattern: str | None = None
    single_digits: bool = False
    nfc: bool = False
    whole_first: bool = False
    adds_bos: bool = False

    def apply(self, tokenizer: BPETokenizer) -> None:
        if self.nfc:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        if self.single_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if self.pattern is not None:
            steps.append(pre_tokenizers.Split(Regex(self.pattern), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=self.pattern is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)


def _words(digits: str) -> str:
    """Words with what comes before them, digits by `digits`, punctuation, and spaces: since GPT-4 the usual cut."""
    return rf"{ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{REST}"


def _cased_words(endings: str, digits: str) -> str:
    """The same with words cut where a capital follows a small letter."""
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{UPPER}*{LOWER}+{endings}|{start}{UPPER}+{LOWER}*{endings}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{REST}"


GPT2, SINGLE_DIGITS = Cut(), Cut(single_digits=True)
GPT4 = Cut(_words(r"\p{N}{1,3}"))
LLAMA3 = Cut(_words(r"\p{N}{1,3}"), whole_first=True, adds_bos=True)
QWEN2 = Cut(_words(r"\p{N}"), nfc=True)
GPT4O = Cut(_cased_words(f"{ENDINGS}?", r"\p{N}{1,3}"))
TEKKEN = Cut(_cased_words("", r"\p{N}"), whole_first=True, adds_bos=True)

CUTS: dict[str, Cut] = {
    "default": GPT2,
    "gpt-2": GPT2,
    "smollm": SINGLE_DIGITS,
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), QWEN2),
    "olmo": GPT2,
    "dbrx": GPT4,
    "gpt-4o": GPT4O,
    "tekken": TEKKEN,
    "starcoder": SINGLE_DIGITS,
}
"""By `tokenizer.ggml.pre`. Files of OLMo 2 and Phi-4 say "dbrx", Phi-4-mini's "gpt-4o", Mistral Nemo's "tekken"."""


class GGUFTokenizer:
    """The tokenizer of one GGUF (`perdure.engine.tokenizer.Tokenizer`)."""

    def __init__(self, file: GGUFFile) -> None:
        name, metadata = str(file.path), file.metadata
        self._pieces: list[str] = _column(file, "tokenizer.ggml.tokens")
        types = _column(file, "tokenizer.ggml.token_type")
        if len(types) != len(self._pieces):
            raise ModelLoadError(f"{name}: {len(self._pieces)} tokens but {len(types)} token types")
        kind = metadata.get("tokenizer.ggml.model")
        if kind == "gpt2":
            self._inner, adds_bos = _byte_level(file, self._pieces)
        elif kind == "llama":
            self._inner, adds_bos = _sentencepiece(file, self._pieces, types), True
        else:
            raise ModelLoadError(f"{name}: tokenizer.ggml.model={kind!r} is not supported; supported: 'gpt2', 'llama'")
        self._inner.add_special_tokens(
            [
                AddedToken(piece, special=True, normalized=False)
                for piece, kind in zip(self._pieces, types)
                if kind in (UNKNOWN, CONTROL)
            ]
        )
        self._inner.add_tokens(
            [AddedToken(piece, normalized=False) for piece, kind in zip(self._pieces, types) if kind == USER_DEFINED]
        )

        self._template: str | None = metadata.get("tokenizer.chat_template")
        self.vocab_size = len(self._pieces)
        self.bos_token_id: int | None = metadata.get("tokenizer.ggml.bos_token_id")
        self.eos_token_id: int | None = metadata.get("tokenizer.ggml.eos_token_id")
        self.all_special_ids = tuple(i for i, kind in enumerate(types) if kind in (UNKNOWN, CONTROL))
        spelling = Spelling.of(self._inner, self.all_special_ids)
        assert spelling is not None
        self.spelling: Spelling = spelling
        wants_bos = metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
        self.adds_bos = bool(wants_bos) and self.bos_token_id is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # As a batch, and without offsets: other threads go on meanwhile, which they do not beside a text of its own.
        ids: list[int] = self._inner.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if add_special_tokens and self.adds_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.spelling.decode(ids, skip_special_tokens)

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        template_kwargs: TemplateKwargs | None = None,
    ) -> list[int]:
        if not self._template:
            refuse_missing_template()
        special = {
            f"{kind}_token": self.id_to_piece(token_id)
            for kind, token_id in (("bos", self.bos_token_id), ("eos", self.eos_token_id))
            if token_id is not None
        }
        text = render(self._template, messages, add_generation_prompt, tools, special, template_kwargs)
        return self.encode(checked_text(text), add_special_tokens=False)

    def id_to_piece(self, token_id: int) -> str:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else ""

    def to_json(self) -> str:
        return self._inner.to_str()


def _byte_level(file: GGUFFile, pieces: list[str]) -> tuple[BPETokenizer, bool]:
    """The tokenizer, and whether it adds BOS when the file does not say."""
    pre = file.metadata.get("tokenizer.ggml.pre", "default")
    if pre not in CUTS:
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.pre={pre!r} is not supported; supported: {', '.join(CUTS)}")
    cut = CUTS[pre]
    merges = [tuple(merge.split(" ")) for merge in _column(file, "tokenizer.ggml.merges")]
    try:
        vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.whole_first)
    except Exception as error:  # the library names the merge that does not fit, in errors of no common class
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.merges do not fit the tokens ({error})") from error
    tokenizer = BPETokenizer(model)
    cut.apply(tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.adds_bos


def _sentencepiece(file: GGUFFile, pieces: list[str], types: list[int]) -> BPETokenizer:
    scores = _column(file, "tokenizer.ggml.scores")
    if len(scores) != len(pieces):
        raise ModelLoadError(f"{file.path}: {len(pieces)} tokens but {len(scores)} scores")
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    made = [token_id for token_id, kind in enumerate(types) if kind in (NORMAL, USER_DEFINED)]
    made.sort(key=lambda token_id: -scores[token_id])
    merges = [merge for token_id in made for merge in _merges_into(pieces[token_id], vocabulary)]
    tokenizer = BPETokenizer(models.BPE(vocab=vocabulary, merges=merges, fuse_unk=True, byte_fallback=True))
    spell = normalizers.Replace(" ", SPACE)
    read = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spell])
        tokenizer.decoder = decoders.Sequence([*read, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spell
        tokenizer.decoder = decoders.Sequence(read)
    return tokenizer


def _merges_into(piece: str, vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """Every pair of pieces that makes this one, the longest first part first."""
    pairs = ((piece[:at], piece[at:]) for at in range(len(piece) - 1, 0, -1))
    return [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]


def _column(file: GGUFFile, key: str) -> list[Any]:
    value = file.metadata.get(key)
    if not isinstance(value, list):
        raise ModelLoadError(f"{file.path}: {key!r} is missing")
    return value
