"""Turns what a user configured into what runs: every "auto" decided, every size computed, once, at start."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from msgspec.structs import replace

from perdure.api.config import CoreConfig, EngineConfig
from perdure.api.errors import InvalidValue, ModelNotFound
from perdure.api.units import in_units
from perdure.engine import on_cuda
from perdure.engine.fingerprint import fingerprint_of
from perdure.engine.progress import Reporter
from perdure.engine.tokenizer import Tokenizer, load_tokenizer
from perdure.models.default import default_model_path
from perdure.models.hub import find_on_hub, is_hub_id
from perdure.models.weights import LoadedModel, check_float8, load_model
from perdure.runner.base import Device
from perdure.runner.grammars import Grammars
from perdure.runner.kv_store import kv_bytes_per_page, page_dtype
from perdure.runner.runner import Runner
from perdure.runner.shapes import ShapeRules
from perdure.runner.worker import ThreadedRunner

if TYPE_CHECKING:
    from perdure.runner.cuda.runner import CudaRunner

MAX_BATCHED_TOKENS = {"cpu": 512, "cuda": 64 * 132}  # of an H200: tiles of 256 x 128 then fill its processors
MAX_BURST_MS = {"cpu": 0, "cuda": 200}  # a step is long on a CPU, and the host the same
MIXED_PREFILL = {"cpu": 0, "cuda": 4}  # padding is work that only a graph pays back

BESIDE_THE_POOL = (
    "gpu_memory_utilization",
    "max_num_batched_tokens",
    "max_num_seqs",
    "num_cuda_graphs",
    "cuda_graph_max_tokens",
)
"""What decides how much memory is taken, or left, for anything else."""

ABOUT_SHAPES = (
    "cuda_graph_sizing",
    "cuda_graph_max_tokens",
    "cuda_graph_mixed_prefill",
    "cuda_graph_all_prefills",
)
"""What decides, beside how many there shall be, which shapes there are."""

POOL_SHARE = 4
"""The pool takes at most one part in so many of the memory that is free."""


@dataclass(frozen=True)
class Resolved:
    """Everything an engine is made of."""

    config: EngineConfig
    core: CoreConfig
    loaded: LoadedModel
    runner: Runner | CudaRunner
    tokenizer: Tokenizer | None
    model_path: Path
    page_bytes: int

    def device(self) -> Device:
        """What the loop gives plans to."""
        return ThreadedRunner(self.runner) if isinstance(self.runner, Runner) else self.runner

    @property
    def pool(self) -> str:
        """Its size in words."""
        num_tokens = self.core.num_pages * self.core.page_size
        return f"{num_tokens:,} tokens, {num_tokens // self.core.max_model_len:,} requests of full length"

    def describe(self) -> dict[str, Any]:
        """The configuration as resolved, for people."""
        shape, core = self.loaded.config, self.core
        return {
            "model": str(self.model_path),
            "architecture": shape.architecture,
            "parameters": self.loaded.num_parameters,
            "weights_bytes": self.loaded.num_bytes,
            "layers": shape.num_layers,
            "hidden_size": shape.hidden_size,
            "heads": f"{shape.num_heads} query, {shape.num_kv_heads} key-value, of {shape.head_dim}",
            "vocab_size": shape.vocab_size,
            "device": self.config.device if self.config.device == "cpu" else torch.cuda.get_device_name(),
            "threads": torch.get_num_threads(),
            "dtype": str(self.loaded.dtype).removeprefix("torch."),
            "max_model_len": core.max_model_len,
            "max_num_seqs": core.max_num_seqs,
            "max_num_batched_tokens": core.max_num_batched_tokens,
            "page_size": core.page_size,
            "num_pages": core.num_pages,
            "paused_pages": core.paused_pages,
            "admit_beside_paused": core.admit_beside_paused,
            "kv_cache_dtype": self.config.kv_cache_dtype,
            "kv_cache_bytes": core.num_pages * self.page_bytes,
            "pool": self.pool,
            "enable_prefix_caching": core.enable_prefix_caching,
            "steps_in_flight": self.config.steps_in_flight,
            "max_burst_ms": self.config.max_burst_ms,
            "batch_invariant": self.config.batch_invariant,
            **({} if isinstance(self.runner, Runner) else on_cuda.describe(self.config)),
            **self._shapes(),
            "weights_digest": self.loaded.weights.digest,
            "on_mismatch": core.on_mismatch,
            "quantization": self.loaded.quantization or "none",
            "linear_backend": self.loaded.kernels.name,
            "attention_backend": self.runner.attention_backend,
            "sampling_backend": self.runner.sampling_backend,
            "kernels": self.loaded.kernels.version,
            **{f"products {shape}": words for shape, words in self.loaded.products.items()},
            "logprobs_mode": core.logprobs_mode,
            "seed": core.seed,
            "seed_policy": self.config.seed_policy,
            "replica": self.config.replica,
        }

    def _shapes(self) -> dict[str, Any]:
        """What a GPU captured, or a CPU pads steps to, and the settings that decided it."""
        found, is_on_cpu = self.runner.shapes, isinstance(self.runner, Runner)
        if is_on_cpu and found is None:
            return {}
        words = "none: every step runs eagerly" if found is None else found.in_words
        words += ": padded to, not captured" if is_on_cpu else ""
        return {"cuda_graphs": words, **{name: getattr(self.config, name) for name in ABOUT_SHAPES}}


def resolve(config: EngineConfig) -> Resolved:
    """Load the model and settle every setting. Raises `ModelLoadError`, `InvalidValue`."""
    reporter = Reporter(config.progress)
    config = _for_device(config)
    path = _model_path(config, reporter)
    start = time.monotonic()
    reporter.loading(path)
    with on_cuda.memory_for(
        f"model={str(path)!r}, dtype={config.dtype!r}: the device has no room for its weights; a smaller model or type "
        "takes less, or quantization='fp8'"
    ):
        loaded = load_model(
            path,
            dtype=config.dtype,
            load_format=config.load_format,
            seed=config.seed,
            linear=config.linear_backend,
            batch_invariant=bool(config.batch_invariant),
            quantization=config.quantization,
            device=config.device,
            waits=False,
        )
    try:
        tokenizer = _tokenizer(config, loaded)
        core, page_bytes = _core_config(config, loaded)
        to_json = None if tokenizer is None else tokenizer.to_json
        grammars = Grammars(to_json, core.vocab_size, core.end_token_ids, config.grammar_timeout_s)
        runner = _runner(config, core, loaded, grammars, page_bytes)
    except BaseException:
        loaded.weights.stop()
        raise
    dtype = str(loaded.dtype).removeprefix("torch.")
    reporter.say(
        f"ready in {time.monotonic() - start:.1f} s: {loaded.config.architecture}, "
        f"{loaded.num_parameters:,} parameters, {in_units(loaded.num_bytes)} in {dtype}"
    )
    forms = (loaded.kernels.name, runner.attention_backend)
    is_invariant = bool(config.batch_invariant) or (config.device == "cpu" and "plain" not in forms)
    core = replace(core, fingerprint=fingerprint_of(loaded, runner), batch_invariant=is_invariant)
    resolved = Resolved(config, core, loaded, runner, tokenizer, path, page_bytes)
    reporter.say(f"KV pool: {resolved.pool}, {in_units(core.num_pages * page_bytes)}")
    return resolved


def _runner(
    config: EngineConfig, core: CoreConfig, loaded: LoadedModel, grammars: Grammars, page_bytes: int
) -> Runner | CudaRunner:
    """The runner, made while weights are on their way, and the weights whole."""
    make = _on_cpu if config.device == "cpu" else on_cuda.make_runner
    pool = f"a KV pool of {core.num_pages * page_bytes} bytes"
    sizes = ", ".join(f"{name}={getattr(config, name)}" for name in BESIDE_THE_POOL)
    with on_cuda.memory_for(
        f"num_pages={core.num_pages}, {sizes}: beside weights and {pool} the device has no room for graphs and what "
        "steps share; lower one of them"
    ):
        try:
            runner = make(config, core, loaded, grammars)
        except (OSError, MemoryError, OverflowError) as error:
            raise InvalidValue(f"num_pages={core.num_pages}: no room for {pool} ({error})") from error
        try:
            loaded.weights.finish()
        except BaseException:
            runner.release()
            raise
    return runner


def _for_device(config: EngineConfig) -> EngineConfig:
    """With what the device decides where nothing was said. Raises `InvalidValue`, also for what this device has not."""
    device = config.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise InvalidValue(f"device='cuda': torch {torch.__version__} finds no CUDA device here")
    most, invariant, burst_ms = config.max_num_batched_tokens, config.batch_invariant, config.max_burst_ms
    mixed = config.cuda_graph_mixed_prefill
    return replace(
        config,
        device=device,
        max_num_batched_tokens=MAX_BATCHED_TOKENS[device] if most is None else most,
        batch_invariant=device == "cpu" if invariant is None else invariant,
        max_burst_ms=MAX_BURST_MS[device] if burst_ms is None else burst_ms,
        cuda_graph_mixed_prefill=MIXED_PREFILL[device] if mixed is None else mixed,
    )


def _model_path(config: EngineConfig, reporter: Reporter) -> Path:
    """Where the model's files are, fetched if need be."""
    if config.model is None:
        return default_model_path()
    if not is_hub_id(config.model):
        return Path(config.model)
    reporter.say(f"looking for {config.model} in the Hugging Face cache, then on the Hub")
    return find_on_hub(config.model, show_bars=reporter.draws)


def _on_cpu(config: EngineConfig, core: CoreConfig, loaded: LoadedModel, grammars: Grammars) -> Runner:
    try:
        return Runner(
            loaded.model,
            num_pages=core.num_pages,
            page_size=core.page_size,
            max_num_seqs=core.max_num_seqs,
            max_model_len=core.max_model_len,
            batch_invariant=bool(config.batch_invariant),
            attention_backend=config.attention_backend,
            row_tile=loaded.kernels.row_tile,
            kv_dtype=page_dtype(config.kv_cache_dtype),
            rules=_rules(config, core.max_model_len),
            weights=loaded.weights,
            grammars=grammars,
        )
    except ValueError as error:
        raise InvalidValue(str(error)) from None


def _rules(config: EngineConfig, max_model_len: int) -> ShapeRules | None:
    """Of the shapes of steps; None: there are none."""
    if config.device == "cuda":
        return on_cuda.rules(config, max_model_len)
    return ShapeRules.of(config, max_model_len) if config.num_cuda_graphs > 0 else None


def _tokenizer(config: EngineConfig, loaded: LoadedModel) -> Tokenizer | None:
    if config.tokenizer is not None:
        return load_tokenizer(config.tokenizer)
    try:
        return load_tokenizer(loaded.tokenizer_source)
    except ModelNotFound:
        return None  # a model without one takes and gives ids


def _core_config(config: EngineConfig, loaded: LoadedModel) -> tuple[CoreConfig, int]:
    """The scheduler's part, and the bytes of one page."""
    shape = loaded.config
    longest = shape.max_position_embeddings
    max_model_len = config.max_model_len or longest
    if max_model_len > longest:
        raise InvalidValue(f"max_model_len={max_model_len} is more than the model's own limit {longest}")
    on_gpu = config.device == "cuda"
    if config.kv_cache_dtype == "fp8":
        check_float8("kv_cache_dtype='fp8'", torch.device(config.device))
    dtype = page_dtype(config.kv_cache_dtype, *((loaded.dtype,) if on_gpu else ()))
    page_bytes = kv_bytes_per_page(shape, config.page_size, dtype)
    assert config.max_num_batched_tokens is not None
    rules = _rules(config, max_model_len)
    num_pages = config.num_pages or _num_pages(config, loaded, max_model_len, page_bytes)
    core = CoreConfig(
        num_pages=num_pages,
        page_size=config.page_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_mixed_tokens=0 if rules is None else rules.most_mixed,
        prompts_first=on_gpu,
        vocab_size=shape.vocab_size,
        end_token_ids=shape.eos_token_ids,
        paused_pages=num_pages // 10 if config.paused_pages is None else config.paused_pages,
        admit_beside_paused=config.admit_beside_paused,
        enable_prefix_caching=config.enable_prefix_caching,
        max_num_waiting=config.max_num_waiting,
        logprobs_mode=config.logprobs_mode,
        seed=config.seed,
        replica=config.replica if config.seed_policy == "per_replica" else 0,
        on_mismatch=config.on_mismatch,
        poison_free_pages=config.poison_free_pages,
    )
    return core, page_bytes


def _num_pages(config: EngineConfig, loaded: LoadedModel, max_model_len: int, page_bytes: int) -> int:
    if config.kv_cache_bytes is not None:
        if config.kv_cache_bytes < page_bytes:
            raise InvalidValue(f"kv_cache_bytes={config.kv_cache_bytes} is less than one page: {page_bytes} bytes")
        return config.kv_cache_bytes // page_bytes
    wanted = config.max_num_seqs * -(-max_model_len // config.page_size)
    if config.device == "cuda":
        return min(wanted, on_cuda.room_for_pages(config, loaded, max_model_len) // page_bytes)
    return max(1, min(wanted, _free_memory() // POOL_SHARE // page_bytes))


def _free_memory() -> int:
    """Bytes the machine could give now, as far as it says."""
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
