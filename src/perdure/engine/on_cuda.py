"""Settling what runs on a GPU: how much of its memory is the pool's, and the runner. Imports Triton when it is used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from perdure.api.config import CoreConfig, EngineConfig
from perdure.api.errors import InvalidValue
from perdure.models.weights import LoadedModel
from perdure.runner.cuda.arena import MANAGED_MOST
from perdure.runner.grammars import Grammars
from perdure.runner.kv_store import page_dtype
from perdure.runner.shapes import ShapeRules

if TYPE_CHECKING:
    from perdure.runner.cuda.runner import CudaRunner

EAGER = ("reference", "flashinfer", "fa4")
"""Forms of attention that no graph holds."""

FOR_GRAPHS = 1 << 30
"""Left free for what graphs, libraries and the allocator take beside a measured step."""

NO_ROOM = ("out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "can't allocate memory")
"""What the driver, cuBLAS and torch's allocator for a CPU say; that for a GPU has an error of its own."""


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Raises `InvalidValue` in these words where the device has no memory left."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(words in str(error) for words in NO_ROOM):
            raise
        reason, *_ = str(error).splitlines() or [type(error).__name__]
        raise InvalidValue(f"{what} ({reason})") from error


def room_for_pages(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Bytes that weights and the largest step leave of the device's memory. Raises `InvalidValue` if there are none."""
    peak = _largest_step(config, loaded, max_model_len)
    free, whole = torch.cuda.mem_get_info()
    left = int(whole * config.gpu_memory_utilization) - (whole - free) - peak - FOR_GRAPHS
    if config.kv_memory == "managed":
        left = min(left, MANAGED_MOST)
    if left <= 0:
        raise InvalidValue(
            f"gpu_memory_utilization={config.gpu_memory_utilization}: weights and a step of "
            f"{config.max_num_batched_tokens} tokens leave no memory for pages ({-left} bytes too few)"
        )
    return left


def _largest_step(config: EngineConfig, loaded: LoadedModel, max_model_len: int) -> int:
    """Bytes that a step of the most tokens and rows takes beside weights and pages, measured."""
    with memory_for(
        f"max_num_batched_tokens={config.max_num_batched_tokens}, max_num_seqs={config.max_num_seqs}: beside weights "
        "the device has no room for a step of so many; lower them"
    ):
        runner = _runner(config, loaded, num_pages=1, max_model_len=max_model_len, captures=False)
        try:
            torch.cuda.empty_cache()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            runner.run_padding()
            peak = torch.cuda.max_memory_allocated() - before
        finally:
            runner.release()
        del runner
    torch.cuda.empty_cache()
    return peak


def rules(config: EngineConfig, max_model_len: int) -> ShapeRules | None:
    """Of the shapes that are captured; None: there are none."""
    if config.num_cuda_graphs == 0 or config.attention_backend in EAGER:
        return None
    return ShapeRules.of(config, max_model_len)


def make_runner(config: EngineConfig, core: CoreConfig, loaded: LoadedModel, grammars: Grammars) -> CudaRunner:
    """Raises `MemoryError` where the pool has no room, `InvalidValue` for settings that do not fit."""
    return _runner(
        config, loaded, num_pages=core.num_pages, max_model_len=core.max_model_len, captures=True, grammars=grammars
    )


def _runner(
    config: EngineConfig,
    loaded: LoadedModel,
    *,
    num_pages: int,
    max_model_len: int,
    captures: bool,
    grammars: Grammars | None = None,
) -> CudaRunner:
    from perdure.runner.cuda.runner import CudaRunner

    assert config.max_num_batched_tokens is not None
    try:
        return CudaRunner(
            loaded.model,
            num_pages=num_pages,
            page_size=config.page_size,
            max_num_seqs=config.max_num_seqs,
            max_model_len=max_model_len,
            max_num_batched_tokens=config.max_num_batched_tokens,
            device=torch.device("cuda", torch.cuda.current_device()),
            dtype=loaded.dtype,
            kv_dtype=page_dtype(config.kv_cache_dtype, loaded.dtype),
            attention_backend=config.attention_backend,
            batch_invariant=bool(config.batch_invariant),
            sampling_backend=config.sampling_backend,
            has_managed_pages=config.kv_memory == "managed",
            rules=rules(config, max_model_len) if captures else None,
            weights=loaded.weights,
            grammars=grammars,
        )
    except ValueError as error:
        raise InvalidValue(str(error)) from None


def describe(config: EngineConfig) -> dict[str, Any]:
    """What is said of a GPU beside what is said of every device."""
    return {"gpu_memory_utilization": config.gpu_memory_utilization, "kv_memory": config.kv_memory}
