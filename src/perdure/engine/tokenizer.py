"""Text to ids and back, from a Hugging Face directory or from a GGUF's metadata, behind one small interface.

- A directory is read by transformers (local files only, no remote code), a GGUF by the `tokenizers` library alone:
  importing transformers costs seconds, so the GGUF path never does.
- Decoding gives exactly what the ids say: nothing cleans up spaces.
- A chat template runs in a sandbox; one that refuses its messages raises `InvalidValue`.
- A tokenizer is read-only after loading and knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from perdure.api.errors import InvalidValue, ModelLoadError, ModelNotFound
from perdure.engine.chat_template import (
    Messages,
    TemplateKwargs,
    Tools,
    checked_text,
    one_line,
    refuse_missing_template,
    refusing_bad_messages,
)
from perdure.engine.gguf_tokenizer import GGUFTokenizer
from perdure.engine.spelling import Spelling
from perdure.models.store import open_gguf

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

    @property
    def spelling(self) -> Spelling | None:
        """The bytes of its ids, where text is these joined; None = only `decode` knows."""
        ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        template_kwargs: TemplateKwargs | None = None,
    ) -> list[int]:
        """The ids of a conversation, as the model's own template lays it out."""
        ...

    def id_to_piece(self, token_id: int) -> str:
        """The vocabulary's own spelling of an id (bytes shown as letters); empty for an id it lacks."""
        ...

    def to_json(self) -> str:
        """All of it as a tokenizer.json. Raises `InvalidValue` where it has no such form."""
        ...


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model directory or a GGUF file. `ModelNotFound`: there is none."""
    path = Path(path)
    if not path.exists():
        raise ModelNotFound(f"{path}: no such file or directory")
    if not path.is_dir():
        file = open_gguf(path)
        if not any(key.startswith("tokenizer.") for key in file.metadata):
            raise ModelNotFound(f"{path}: no tokenizer in this file")
        return GGUFTokenizer(file)
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
            raise ModelLoadError(f"{directory}: the tokenizer cannot be read ({one_line(error)})") from error
        self.vocab_size = len(self._inner)
        self.bos_token_id: int | None = self._inner.bos_token_id
        self.eos_token_id: int | None = self._inner.eos_token_id
        # `all_special_ids` of transformers are the named ones only; decoding drops every token marked special.
        marked = (token_id for token_id, token in self._inner.added_tokens_decoder.items() if token.special)
        self.all_special_ids = tuple(sorted({*self._inner.all_special_ids, *marked}))
        fast = getattr(self._inner, "backend_tokenizer", None)
        self.spelling = None if fast is None else Spelling.of(fast, self.all_special_ids)
        self.adds_bos = self.bos_token_id is not None and self.encode("")[:1] == [self.bos_token_id]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # verbose: it would warn of texts longer than it thinks the model can take, which admission decides
        return list(self._inner.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        if self.spelling is not None:
            return self.spelling.decode(ids, skip_special_tokens)
        text: str = self._inner.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat_template(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        tools: Tools | None = None,
        template_kwargs: TemplateKwargs | None = None,
    ) -> list[int]:
        if not self._inner.chat_template:
            refuse_missing_template()
        with refusing_bad_messages():
            text = self._inner.apply_chat_template(
                list(messages),
                **(template_kwargs or {}),
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        return self.encode(checked_text(text), add_special_tokens=False)

    def id_to_piece(self, token_id: int) -> str:
        return self._inner.convert_ids_to_tokens(token_id) or ""

    def to_json(self) -> str:
        inner = getattr(self._inner, "backend_tokenizer", None)
        if inner is None:
            raise InvalidValue(f"the tokenizer {type(self._inner).__name__} has no form for the `tokenizers` library")
        return str(inner.to_str())
