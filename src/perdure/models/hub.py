"""Models by their Hub id, `org/name`: found in the local Hugging Face cache, fetched where there is a network.

- The cache goes first and is not checked for news: a model that is there loads without a network, and stays the same.
- Only files that are read are fetched: safetensors, JSON and what tokenizers are made of, from the repository's top.
  No code and no pickles; a repository that offers nothing else is refused by the loader.
- Whatever is wrong is one line: what was looked for, where, and why it could not be fetched.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from perdure.api.errors import ModelLoadError, ModelNotFound
from perdure.models.config import read_json
from perdure.models.store import INDEX_FILE, SINGLE_FILE

FETCHED = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model", "merges.txt")
LEFT_OUT = ("*/*", "consolidated*")
"""Folders hold other formats of the same weights, `consolidated` files the same weights under other names."""

_ID = re.compile(r"[a-z0-9][\w.-]*/[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE)


def is_hub_id(model: str) -> bool:
    """Whether a model's name can be a Hub id. What exists as a path is a path, and a .gguf is a file."""
    return _ID.fullmatch(model) is not None and not model.endswith(".gguf") and not Path(model).exists()


def find_on_hub(model_id: str, *, show_bars: bool = False) -> Path:
    """The directory of a model's files. show_bars: let huggingface_hub draw its progress while it fetches.

    Raises `ModelNotFound` when it is neither in the cache nor to be had.
    """
    from huggingface_hub import constants

    cached = _snapshot(model_id)
    if cached is not None and _is_whole(cached):
        return cached
    place = f"the Hugging Face cache ({constants.HF_HUB_CACHE})"
    lack = f"is not in {place}" if cached is None else f"is incomplete in {place}"
    missing = f"{model_id}: no such file or directory, and as a Hub id it {lack}"
    if constants.HF_HUB_OFFLINE:
        raise ModelNotFound(f"{missing}; HF_HUB_OFFLINE forbids fetching it")
    return _fetched(model_id, missing, show_bars)


def _snapshot(model_id: str) -> Path | None:
    """What the cache has of a model, whole or not."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        found = snapshot_download(
            model_id, local_files_only=True, allow_patterns=list(FETCHED), ignore_patterns=list(LEFT_OUT)
        )
    except LocalEntryNotFoundError:
        return None
    except HFValidationError as error:
        raise ModelNotFound(f"{model_id}: no such file or directory, and no Hub id ({_line(error)})") from None
    return Path(found)


def _is_whole(directory: Path) -> bool:
    """Whether a configuration and all weights lie there; a cache may hold a tokenizer alone, or half a download."""
    if not (directory / "config.json").is_file():
        return False
    if (directory / SINGLE_FILE).is_file():
        return True
    try:
        shards = read_json(directory / INDEX_FILE).get("weight_map", {}).values()
    except ModelLoadError:
        return False
    return bool(shards) and all((directory / shard).is_file() for shard in set(shards))


def _fetched(model_id: str, missing: str, show_bars: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        found = snapshot_download(
            model_id,
            allow_patterns=list(FETCHED),
            ignore_patterns=list(LEFT_OUT),
            tqdm_class=None if show_bars else _no_bars(),
        )
    except GatedRepoError:
        raise ModelNotFound(f"{missing}; the Hub gives it only to those who accepted its terms and logged in") from None
    except RepositoryNotFoundError:
        raise ModelNotFound(f"{missing}; the Hub does not know it, or it is private") from None
    except LocalEntryNotFoundError:
        raise ModelNotFound(f"{missing}; the Hub cannot be reached to fetch it") from None
    except Exception as error:  # the errors of several network libraries, which have no class in common
        raise ModelNotFound(f"{missing}; fetching it failed ({_line(error)})") from error
    return Path(found)


def _no_bars() -> type[Any]:
    """Bars that are never drawn. (huggingface_hub's own switch would be the whole process's.)"""
    from huggingface_hub.utils.tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "disable": True})

    return Silent


def _line(error: BaseException) -> str:
    message = str(error).strip().splitlines()
    return f"{type(error).__name__}: {message[0]}" if message else type(error).__name__
