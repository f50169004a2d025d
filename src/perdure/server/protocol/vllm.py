"""What clients of vLLM ask a server about itself."""

from __future__ import annotations

from typing import Any, Literal

from perdure.server.protocol.common import Told


class ServerInfo(Told, kw_only=True):
    """vllm_config: the settings that clients look up, under vLLM's names; configuration: all of ours."""

    vllm_config: dict[str, Any]
    configuration: dict[str, Any]


class WorldSize(Told, kw_only=True):
    world_size: int


class TokenizerInfo(Told, kw_only=True):
    """Enough to use `/tokenize` and `/detokenize` as a tokenizer."""

    bos_token: str | None
    eos_token: str | None
    model_max_length: int | None = None


class CacheCleared(Told, kw_only=True):
    status: Literal["ok"] = "ok"
    success: bool = True
