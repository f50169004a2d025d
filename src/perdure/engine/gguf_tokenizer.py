"""A byte-level BPE tokenizer built from a GGUF's metadata with the `tokenizers` library.

- Merges and pieces come from the file; how text is cut before merging is named there (`tokenizer.ggml.pre`) and known
  here. An unknown name is refused: guessing would give other ids than the model was trained on.
- Control pieces are special (dropped from decoded text on demand); user-defined ones are matched whole but are text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as BPETokenizer

from perdure.api.errors import ModelLoadError
from perdure.engine.chat_template import Messages, Tools, refuse_missing_template, render
from perdure.models.gguf_file import GGUFFile

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # of tokenizer.ggml.token_type

LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _llama3_split() -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(LLAMA3_PATTERN), behavior="isolated")
    return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


SPLITS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "default": _gpt2_split,
    "gpt-2": _gpt2_split,
    "smollm": _smollm_split,
    **dict.fromkeys(LLAMA3_NAMES, _llama3_split),
}


class GGUFTokenizer:
    """The tokenizer of one GGUF (`perdure.engine.tokenizer.Tokenizer`)."""

    def __init__(self, file: GGUFFile) -> None:
        name, metadata = str(file.path), file.metadata
        kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "default")
        if kind != "gpt2":
            raise ModelLoadError(f"{name}: tokenizer.ggml.model={kind!r} is not supported; supported: 'gpt2'")
        if pre not in SPLITS:
            raise ModelLoadError(f"{name}: tokenizer.ggml.pre={pre!r} is not supported; supported: {', '.join(SPLITS)}")
        self._pieces = _column(file, "tokenizer.ggml.tokens")
        types = _column(file, "tokenizer.ggml.token_type")
        if len(types) != len(self._pieces):
            raise ModelLoadError(f"{name}: {len(self._pieces)} tokens but {len(types)} token types")

        self._inner = BPETokenizer(_bpe(file, self._pieces, ignore_merges=pre in LLAMA3_NAMES))
        self._inner.pre_tokenizer = SPLITS[pre]()
        self._inner.decoder = decoders.ByteLevel()
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
        wants_bos = metadata.get("tokenizer.ggml.add_bos_token", pre in LLAMA3_NAMES)
        self.adds_bos = bool(wants_bos) and self.bos_token_id is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        ids: list[int] = self._inner.encode(text, add_special_tokens=False).ids
        if add_special_tokens and self.adds_bos and self.bos_token_id is not None:
            return [self.bos_token_id, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self._inner.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> list[int]:
        if not self._template:
            refuse_missing_template()
        special = {
            f"{kind}_token": self.id_to_piece(token_id)
            for kind, token_id in (("bos", self.bos_token_id), ("eos", self.eos_token_id))
            if token_id is not None
        }
        text = render(self._template, messages, add_generation_prompt, tools, special)
        return self.encode(text, add_special_tokens=False)

    def id_to_piece(self, token_id: int) -> str:
        return self._pieces[token_id] if 0 <= token_id < len(self._pieces) else ""


def _bpe(file: GGUFFile, pieces: list[str], ignore_merges: bool) -> models.BPE:
    merges = [tuple(merge.split(" ")) for merge in _column(file, "tokenizer.ggml.merges")]
    try:
        vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
        return models.BPE(vocab=vocabulary, merges=merges, ignore_merges=ignore_merges)
    except Exception as error:  # the library names the merge that does not fit, in errors of no common class
        raise ModelLoadError(f"{file.path}: tokenizer.ggml.merges do not fit the tokens ({error})") from error


def _column(file: GGUFFile, key: str) -> list[Any]:
    value = file.metadata.get(key)
    if not isinstance(value, list):
        raise ModelLoadError(f"{file.path}: {key!r} is missing")
    return value
