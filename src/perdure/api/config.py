"""Configuration, read once into frozen values. Everything "auto" is resolved by the engine at start and can be printed.

- `EngineConfig`: what a user may have an opinion on, in vLLM's words where it has one.
- `CoreConfig`: the part the scheduler needs, with every value resolved.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from perdure.api.errors import InvalidValue, shown
from perdure.api.fingerprint import Fingerprint
from perdure.api.sampling import LogprobsMode

OnMismatch = Literal["continue", "refuse"]
RoutingPolicy = Literal["round_robin", "load_balanced", "longest_prefix", "first_prefix_block"]
OnReplicaLoss = Literal["resume", "fail"]
Launcher = Literal["local", "ray"]


class CoreConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What decisions depend on. Lengths are in tokens.

    max_num_mixed_tokens: of a step in which a request decodes, unless nobody follows any or they leave prompts less
    than their floor (`core.budget.beside`); 0 = as of every step. prompts_first: whether rows that nobody follows wait
    while prompts fill steps.
    vocab_size: the width of the logits. end_token_ids: the model's whole set. paused_pages: how many pages paused
    requests may keep together; admit_beside_paused: whether requests are taken in while one is paused. replica: what
    of this engine's index takes part in derived seeds. batch_invariant: whether the forms in use give a row the same
    bits in any schedule. fingerprint, on_mismatch: for checkpoints that come from elsewhere. poison_free_pages: have
    pages that nobody owns filled with NaN, for debugging.
    """

    num_pages: int
    page_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    vocab_size: int
    max_num_mixed_tokens: int = 0
    prompts_first: bool = False
    end_token_ids: tuple[int, ...] = ()
    paused_pages: int = 0
    admit_beside_paused: bool = True
    enable_prefix_caching: bool = True
    max_num_waiting: int | None = None
    logprobs_mode: LogprobsMode = "raw"
    seed: int = 0
    replica: int = 0
    batch_invariant: bool = True
    fingerprint: Fingerprint = Fingerprint()
    on_mismatch: OnMismatch = "continue"
    poison_free_pages: bool = False

    @property
    def max_num_tokens(self) -> int:
        """The longest request, prompt and output together, that can ever run here."""
        return min(self.max_model_len, self.num_pages * self.page_size)


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of an engine; None and "auto" are resolved at start (`perdure info` prints them).

    model: a directory, a .gguf file, a Hub id, or None for the default model. dtype: float32 is what a CPU without a
    bf16 unit runs, whatever the checkpoint says. num_pages or kv_cache_bytes: size of the KV pool; neither = room for
    max_num_seqs requests of full length, within a quarter of the memory that is free.
    seed: what the seeds of requests without one are derived from, with their arrival. seed_policy: "per_replica" =
    with this engine's index, `replica`, too, so that replicas draw differently; "shared" = without it.
    device: "auto" = cuda where there is one. max_num_batched_tokens: most positions computed in one step; None = 512 on
    a CPU, 8448 on CUDA. steps_in_flight: 1 = plan only after the step before is known, 2 = overlapped, up to 4.
    max_burst_ms: how long the device may go on alone, several steps at a time, where nobody waits and every request
    decodes; new requests and aborts wait that long. 0 = never; None = 200 on CUDA, 0 on a CPU. Unless all that runs is
    of `LLM`'s calls in this process, it is 10 at most.
    batch_invariant: bitwise results whatever the schedule; None = on a CPU, and not on CUDA, where it costs time.
    on_mismatch: whether a checkpoint whose bits come from another kind of engine goes on, with `exact=False` in its
    result, or is refused.
    own_process: an engine that is alone, too, is in a process of its own behind a coordinator, which others may call
    (`AsyncLLM.connect`; `describe` says where).
    data_parallel_size: how many engines, each in a process of its own, behind one coordinator; what follows is for
    that one. launcher: where they run; "local" = on this machine, and one alone in this process; "ray" = over the Ray
    cluster at ray_address (auto = this machine's), each with replica_cpus cores and as many threads, and replica_gpus
    GPUs. routing_policy: by turns, by load, or by who was sent the beginning of the prompt, wholly or its
    first page. routing_alpha: what load counts against a prefix (0: nothing). affinity_ttl: seconds after which a
    prefix that was sent counts no more. on_replica_loss: whether the requests of a replica that is lost go on at
    others or fail. replica_wait_s: how long requests wait where no replica serves. replica_silence_s: after how long
    one that is not heard of is lost; where it was heard of less often than each quarter of that, after four times as
    long as that took. replica_stall_s: the same of one that has work and completes no step. blocking_collectives:
    whether replicas compute nothing between the two phases of an order that all must agree on.
    paused_pages: how many pages requests that wait for one may keep together, others are evicted and computed again;
    None = a tenth of the pool. admit_beside_paused: False = while a request waits so, no other is taken in.
    grammar_timeout_s: a request whose structured outputs take longer to compile is refused.
    gpu_memory_utilization: how much of the device's memory all of it may take, as a part; what weights and a step
    leave of that is the pool. kv_memory: "managed" = the driver moves the pool between host and device, up to 1 GiB.
    num_cuda_graphs: sizes of steps that are captured, -1 = as many as the rule has, 0: none;
    cuda_graph_sizing: the rule (`runner.shapes`); cuda_graph_max_tokens: of a captured step, or, with
    cuda_graph_all_prefills, max_num_batched_tokens; cuda_graph_mixed_prefill: prompts in a captured step that has some,
    0 = none are captured, None = 4 on CUDA, 0 on a CPU. Unless it is 0 or all that runs is of `LLM`'s calls in this
    process, prompts are cut so that a step in which others decode has at most cuda_graph_max_tokens (or max_num_seqs),
    or 128 of prompts (or half of max_num_batched_tokens) where that leaves less. On a CPU, which captures nothing,
    steps are padded to these shapes if num_cuda_graphs > 0.
    attention_backend, linear_backend: "reference" is the slow, obvious form, "plain" the library's own.
    sampling_backend: what finds the ids that top_k and top_p keep; "torch" = the engine's own form.
    quantization: "gguf" keeps the blocks of a GGUF file as they are instead of expanding them; "fp8" rounds the weights
    of layers' products to 8 bits when they are loaded, and their inputs when they come; None = as the checkpoint says.
    kv_cache_dtype: "auto" = pages as the device computes, "fp8" = of 8 bits. progress: say on stderr what is being
    done. check_integrity, poison_free_pages: for debugging; account for everything after every turn, and fill pages
    that nobody owns with NaN in every step.
    """

    model: str | None = None
    tokenizer: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    seed_policy: Literal["shared", "per_replica"] = "per_replica"
    replica: int = 0
    max_model_len: int | None = None
    max_num_seqs: int = 64
    max_num_batched_tokens: int | None = None
    page_size: int = 16
    num_pages: int | None = None
    kv_cache_bytes: int | None = None
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    gpu_memory_utilization: float = 0.9
    kv_memory: Literal["device", "managed"] = "device"
    paused_pages: int | None = None
    admit_beside_paused: bool = True
    enable_prefix_caching: bool = True
    steps_in_flight: int = 2
    max_burst_ms: int | None = None
    batch_invariant: bool | None = None
    on_mismatch: OnMismatch = "continue"
    logprobs_mode: LogprobsMode = "raw"
    attention_backend: str = "auto"
    linear_backend: str = "auto"
    sampling_backend: str = "auto"
    num_cuda_graphs: int = -1
    cuda_graph_sizing: Literal["exponential", "linear", "hybrid"] = "hybrid"
    cuda_graph_max_tokens: int = 512
    cuda_graph_mixed_prefill: int | None = None
    cuda_graph_all_prefills: bool = False
    quantization: str | None = None
    max_num_waiting: int | None = None
    return_prompt: bool = False
    progress: bool = False
    journal: str | None = None
    check_integrity: bool = False
    poison_free_pages: bool = False
    own_process: bool = False
    data_parallel_size: int = 1
    launcher: Launcher = "local"
    replica_cpus: int = 1
    replica_gpus: int = 0
    ray_address: str = "auto"
    routing_policy: RoutingPolicy = "longest_prefix"
    routing_alpha: float = 0.5
    affinity_ttl: float = 300.0
    on_replica_loss: OnReplicaLoss = "resume"
    replica_wait_s: float = 60.0
    replica_silence_s: float = 1.2
    replica_stall_s: float = 30.0
    grammar_timeout_s: float = 30.0
    blocking_collectives: bool = False

    def __post_init__(self) -> None:
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise InvalidValue(f"{name}={shown(value)} is not an integer")
            if value < low or value > (2**63 - 1 if high is None else high):
                bounds = f"at least {low}, below 2**63" if high is None else f"{low} to {high}"
                raise InvalidValue(f"{name}={value} is out of range: {bounds}")
        for name in _TEXTS:
            if not isinstance(getattr(self, name), (str, type(None))):
                raise InvalidValue(f"{name}={getattr(self, name)!r} is not a str")
        for name in _BOOLEANS:
            value = getattr(self, name)
            if not isinstance(value, bool) and not (value is None and name in _OPTIONAL):
                raise InvalidValue(f"{name}={shown(value)} is not a bool")
        for name, allowed in _CHOICES:
            if getattr(self, name) is None and name in _OPTIONAL:
                continue
            if getattr(self, name) not in allowed:
                raise InvalidValue(f"{name}={getattr(self, name)!r} is none of {', '.join(allowed)}")
        for name, least, most in _SECONDS_AND_WEIGHTS:
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, int | float) or not least <= number <= most:
                raise InvalidValue(f"{name}={shown(number)} is no number from {least:g} to {most:g}")
        share = self.gpu_memory_utilization
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise InvalidValue(f"gpu_memory_utilization={shown(share)} is no part: above 0, up to 1")
        self._check_device()
        if self.quantization == "gguf":
            self._check_quantization()
        if self.num_pages is not None and self.kv_cache_bytes is not None:
            raise InvalidValue(f"num_pages={self.num_pages} and kv_cache_bytes={self.kv_cache_bytes}: give only one")

    def _check_device(self) -> None:
        """What is asked must be what there is on the device. Of "auto" that is seen once it is resolved."""
        for name, fitting in _ON_DEVICE[self.device]:
            if (value := getattr(self, name)) not in fitting:
                there = ", ".join(map(str, fitting))
                raise InvalidValue(f"{name}={value!r} is not for device={self.device!r}, which takes {there}")
        if self.attention_backend in ("flashinfer", "fa4") and self.kv_cache_dtype == "fp8":
            form = self.attention_backend
            raise InvalidValue(f"kv_cache_dtype='fp8' does not go with attention_backend={form!r}: it needs 'auto'")
        if self.batch_invariant or (self.batch_invariant is None and self.device == "cpu"):
            where = "" if self.device == "auto" else f" on device={self.device!r}"
            for name in ("attention_backend", "linear_backend"):
                if (form := getattr(self, name)) in _VARYING[self.device]:
                    raise InvalidValue(f"{name}={form!r} is not batch invariant{where}: it needs batch_invariant=False")

    def _check_quantization(self) -> None:
        """Only the compiled kernels read blocks, and they compute in float32."""
        for name, fitting in _QUANTIZED:
            if getattr(self, name) not in fitting:
                raise InvalidValue(
                    f"{name}={getattr(self, name)!r} does not go with quantization={self.quantization!r}: "
                    f"it needs {' or '.join(fitting)}"
                )

    @staticmethod
    def of(**settings: Any) -> EngineConfig:
        """Build from keywords as users write them; `block_size` is accepted for `page_size`."""
        if "block_size" in settings:
            settings.setdefault("page_size", settings["block_size"])
            if settings.pop("block_size") != settings["page_size"]:
                raise InvalidValue("block_size is another name of page_size; they differ")
        known = EngineConfig.__struct_fields__
        for name in settings:
            if name not in known:
                raise InvalidValue(f"unknown setting {name!r}; the settings are: {', '.join(known)}")
        return EngineConfig(**settings)


_RANGES: tuple[tuple[str, int, int | None], ...] = (
    ("seed", 0, 2**64 - 1),
    ("replica", 0, 65535),
    ("max_model_len", 1, None),
    ("max_num_seqs", 1, 65536),
    ("max_num_batched_tokens", 1, None),
    ("page_size", 1, 256),
    ("num_pages", 1, None),
    ("kv_cache_bytes", 1, None),
    ("paused_pages", 0, None),
    ("steps_in_flight", 1, 4),
    ("max_burst_ms", 0, 60_000),
    ("num_cuda_graphs", -1, 4096),
    ("cuda_graph_max_tokens", 1, 2**20),
    ("cuda_graph_mixed_prefill", 0, 65536),
    ("max_num_waiting", 1, None),
    ("data_parallel_size", 1, 65536),
    ("replica_cpus", 1, 65536),
    ("replica_gpus", 0, 65536),
)
_SECONDS_AND_WEIGHTS: tuple[tuple[str, float, float], ...] = (
    ("routing_alpha", 0, 1e6),
    ("affinity_ttl", 0, 1e9),
    ("replica_wait_s", 0, 1e9),
    ("replica_silence_s", 0.5, 1e9),
    ("replica_stall_s", 0.5, 1e9),
    ("grammar_timeout_s", 0.1, 1e6),
)
_TEXTS = ("model", "tokenizer", "journal", "ray_address")
_BOOLEANS = (
    "admit_beside_paused",
    "enable_prefix_caching",
    "batch_invariant",
    "cuda_graph_all_prefills",
    "return_prompt",
    "progress",
    "check_integrity",
    "poison_free_pages",
    "blocking_collectives",
    "own_process",
)
_OPTIONAL = (
    "max_model_len",
    "max_num_batched_tokens",
    "num_pages",
    "kv_cache_bytes",
    "paused_pages",
    "max_burst_ms",
    "batch_invariant",
    "cuda_graph_mixed_prefill",
    "quantization",
    "max_num_waiting",
)
_VARYING: dict[str, tuple[str, ...]] = {
    "auto": ("plain",),
    "cpu": ("plain",),
    "cuda": ("plain", "reference", "hopper", "flashinfer", "fa4"),
}
"""Forms whose bits depend on a row's company; of "auto", those of which that holds on every device."""
_CHOICES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dtype", ("auto", "float32", "bfloat16", "float16")),
    ("device", ("auto", "cpu", "cuda")),
    ("load_format", ("auto", "dummy")),
    ("on_mismatch", ("continue", "refuse")),
    ("logprobs_mode", ("raw", "processed")),
    ("seed_policy", ("shared", "per_replica")),
    ("attention_backend", ("auto", "native", "tiled", "plain", "triton", "hopper", "flashinfer", "fa4", "reference")),
    ("linear_backend", ("auto", "native", "packed", "invariant", "triton", "plain", "reference")),
    ("sampling_backend", ("auto", "torch", "flashinfer")),
    ("kv_cache_dtype", ("auto", "fp8")),
    ("kv_memory", ("device", "managed")),
    ("quantization", ("gguf", "fp8")),
    ("launcher", get_args(Launcher)),
    ("routing_policy", get_args(RoutingPolicy)),
    ("on_replica_loss", get_args(OnReplicaLoss)),
    ("cuda_graph_sizing", ("exponential", "linear", "hybrid")),
)
_ON_DEVICE: dict[str, tuple[tuple[str, tuple[str | None, ...]], ...]] = {
    "auto": (),
    "cpu": (
        ("attention_backend", ("auto", "native", "tiled", "plain", "reference")),
        ("linear_backend", ("auto", "native", "packed", "invariant", "plain", "reference")),
        ("sampling_backend", ("auto", "torch")),
        ("kv_memory", ("device",)),
    ),
    "cuda": (
        ("attention_backend", ("auto", "triton", "hopper", "flashinfer", "fa4", "reference")),
        ("linear_backend", ("auto", "triton", "plain", "reference")),
        ("quantization", (None, "fp8")),
    ),
}
"""What each device has of what another may have; of "auto" nothing is known yet."""
_QUANTIZED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("dtype", ("auto", "float32")),
    ("load_format", ("auto",)),
    ("linear_backend", ("auto", "native")),
)
"""What fits weights that stay in blocks."""
