"""Text to ids and back, from a Hugging Face directory or from a GGUF's metadata, behind one small interface.

- A directory is read by transformers (local files only, no remote code), a GGUF by the `tokenizers` library alone:
  importing transformers costs seconds, so the GGUF path never does.
- Decoding gives exactly what the ids say: nothing cleans up spaces.
- A chat template runs in a sandbox; one that refuses its messages raises `InvalidValue`.
- A tokenizer is read-only after loading and knows nothing of requests.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from perdure.api.errors import InvalidValue, ModelLoadError, ModelNotFound
from perdure.models.gguf_file import GGUFFile
from perdure.models.store import open_gguf

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tokenizer_config.json")


class Tokenizer(Protocol):
    """What the engine asks of a tokenizer.

    vocab_size: ids it knows, which may be fewer than the model's logits. adds_bos: `encode` begins with BOS.
    """

    vocab_size: int
    bos_token_id: int | None
    eos_token_id: int | None
    all_special_ids: tuple[int, ...]
    adds_bos: bool

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> list[int]:
        """The ids of a conversation, as the model's own template lays it out."""
        ...

    def id_to_piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of an id (bytes shown as letters); empty for an id it lacks."""
        ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory or a GGUF file."""
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or directory")
    if not path.is_dir():
        return GGUFTokenizer(open_gguf(path))
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        raise ModelNotFound(f"{path}: no tokenizer in this directory (none of {', '.join(TOKENIZER_FILES)})")
    return DirectoryTokenizer(path)


class DirectoryTokenizer:
    """The tokenizer of a Hugging Face directory, as transformers reads it."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoTokenizer

        try:
            self._inner: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True, trust_remote_code=False)
        except Exception as error:  # transformers raises whatever the damaged file made it trip over
            raise ModelLoadError(f"{directory}: the tokenizer cannot be read ({_one_line(error)})") from error
        self.vocab_size = len(self._inner)
        self.bos_token_id: int | None = self._inner.bos_token_id
        self.eos_token_id: int | None = self._inner.eos_token_id
        self.all_special_ids = tuple(sorted(self._inner.all_special_ids))
        self.adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        text: str = self._inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(
        self, messages: Messages, add_generation_prompt: bool = True, tools: Tools | None = None
    ) -> list[int]:
        from jinja2 import TemplateError

        if not self._inner.chat_template:
            _refuse_chat()
        try:
            text = self._inner.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except TemplateError as error:
            raise InvalidValue(f"the chat template refused the messages: {_one_line(error)}") from error
        return self.encode(text, add_special_tokens=False)

    def id_to_piece(self, token_id: int) -> str:
        return self._inner.convert_ids_to_tokens(token_id) or ""


class GGUFTokenizer:
    """A byte-level BPE tokenizer built from a GGUF's metadata."""

    def __init__(self, file: GGUFFile) -> None:
        metadata = file.metadata
        name = str(file.path)
        kind = metadata.get("tokenizer.ggml.model")
        if kind != "gpt2":
            raise ModelLoadError(f"{name}: tokenizer.ggml.model={kind!r} is not supported; supported: 'gpt2'")
        pre = metadata.get("tokenizer.ggml.pre", "default")
        pieces = _column(name, metadata, "tokenizer.ggml.tokens")
        special = _special_ids(name, metadata, len(pieces))
        self._inner = _byte_level_bpe(name, metadata, pre, pieces, special)
        self._pieces = pieces
        self._template: str | None = metadata.get("tokenizer.chat_template")
        self.vocab_size = len(pieces)
        self.bos_token_id: int | None = metadata.get("tokenizer.ggml.bos_token_id")
        self.eos_token_id: int | None = metadata.get("tokenizer.ggml.eos_token_id")
        self.all_special_ids = special
        wants_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", pre in LLAMA3_NAMES))
        self.adds_bos = wants_bos and self.bos_token_id is not None
