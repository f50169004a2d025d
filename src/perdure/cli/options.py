"""The options that several commands share, each written once.

- A group of options is a frozen dataclass, a field an option. A command takes the group as one parameter, and
  `spelled_out` shows Typer the fields in its place.
- None means "not given", so that the default is the library's own.
- Values are checked before a model is loaded.
"""

import inspect
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from perdure import EngineConfig, InvalidValue, SamplingParams

_ENGINE = EngineConfig()
_ID = re.compile(r"-?[0-9]{1,20}")


def _engine(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Engine")


def _sampling(text: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Sampling", show_default=False, metavar=metavar)


@dataclass(frozen=True)
class EngineOptions:
    """Which model runs, and how."""

    model: Annotated[
        str | None, _engine("A model directory, a .gguf file or a Hub id; without it, the default model.")
    ] = None
    dtype: Annotated[str, _engine("auto, float32, bfloat16 or float16.")] = _ENGINE.dtype
    device: Annotated[str, _engine("auto, cpu or cuda.")] = _ENGINE.device
    load_format: Annotated[str, _engine("auto, or dummy: random weights, drawn from --seed.")] = _ENGINE.load_format
    quantization: Annotated[
        str | None, _engine("gguf: keep a GGUF's blocks in memory, not expanded; fp8: round layers' weights to 8 bits.")
    ] = None
    kv_cache_dtype: Annotated[str, _engine("auto, or fp8: keys and values in 8 bits.")] = _ENGINE.kv_cache_dtype
    gpu_memory_utilization: Annotated[float, _engine("Part of a GPU's memory that all of it may take.")] = (
        _ENGINE.gpu_memory_utilization
    )
    kv_memory: Annotated[str, _engine("device, or managed: a GPU's driver moves the pool, up to 1 GiB.")] = (
        _ENGINE.kv_memory
    )
    attention_backend: Annotated[
        str, _engine("auto; on a CPU native, tiled, plain; on a GPU triton, hopper, flashinfer, fa4; reference.")
    ] = _ENGINE.attention_backend
    linear_backend: Annotated[
        str, _engine("auto; on a CPU native, packed, invariant; on a GPU triton; plain, reference.")
    ] = _ENGINE.linear_backend
    sampling_backend: Annotated[str, _engine("auto, torch, or, on a GPU, flashinfer.")] = _ENGINE.sampling_backend
    logprobs_mode: Annotated[str, _engine("raw or processed: what scores are of, where a request does not say.")] = (
        _ENGINE.logprobs_mode
    )
    seed: Annotated[int, _engine("What every draw is derived from: another seed, another sample.")] = _ENGINE.seed
    max_model_len: Annotated[int | None, _engine("Longest request in tokens; without it, the model's limit.")] = None
    max_num_seqs: Annotated[int, _engine("Most requests that run together.")] = _ENGINE.max_num_seqs
    max_num_batched_tokens: Annotated[
        int | None, _engine("Most positions in one step; without it, 512 on a CPU and 8448 on a GPU.")
    ] = None
    num_pages: Annotated[int | None, _engine("Pages of the KV pool; without it, as memory allows.")] = None
    page_size: Annotated[int, _engine("Tokens in one page.")] = _ENGINE.page_size
    enable_prefix_caching: Annotated[bool, _engine("Compute what prompts begin with in common once.")] = (
        _ENGINE.enable_prefix_caching
    )
    steps_in_flight: Annotated[int, _engine("1: one step after another; 2 to 4: overlapped.")] = _ENGINE.steps_in_flight
    max_burst_ms: Annotated[
        int | None, _engine("How long a GPU may go on alone, 0: never; without it, 200, and 10 when serving.")
    ] = None
    num_cuda_graphs: Annotated[
        int, _engine("Sizes of steps that a GPU captures at start; -1: as many as fit, 0: none.")
    ] = _ENGINE.num_cuda_graphs
    cuda_graph_sizing: Annotated[str, _engine("Which sizes: exponential, linear or hybrid.")] = (
        _ENGINE.cuda_graph_sizing
    )
    cuda_graph_max_tokens: Annotated[
        int, _engine("Most positions of a captured step, and of one with prompts while others stream.")
    ] = _ENGINE.cuda_graph_max_tokens
    cuda_graph_mixed_prefill: Annotated[
        int | None, _engine("Prompts in a captured step; 0: none, and prompts are not cut; without it, 4 on a GPU.")
    ] = None
    cuda_graph_all_prefills: Annotated[bool, _engine("Capture steps with prompts up to --max-num-batched-tokens.")] = (
        _ENGINE.cuda_graph_all_prefills
    )
    batch_invariant: Annotated[
        bool | None, _engine("The same bits in any company; without it, on a CPU and not on a GPU.")
    ] = None
    progress: Annotated[bool, typer.Option("--progress", help="Say what is being done.", rich_help_panel="Engine")] = (
        False
    )
    journal: Annotated[Path | None, _engine("Record the run in this file.")] = None

    def settings(self) -> dict[str, Any]:
        """Keywords for `LLM` and `AsyncLLM`, checked."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        given |= {name: str(value) for name, value in given.items() if isinstance(value, Path)}
        EngineConfig.of(**given)
        return given


def _launcher(text: str) -> Any:
    return typer.Option(help=text, rich_help_panel="Launcher")


@dataclass(frozen=True)
class LauncherOptions:
    """Whether replicas are started over a cluster, and what each gets of it."""

    launcher: Annotated[str | None, _launcher("ray: place replicas over a Ray cluster, and lost ones anew.")] = None
    replica_cpus: Annotated[int, _launcher("Cores, and threads, of each.")] = _ENGINE.replica_cpus
    replica_gpus: Annotated[int, _launcher("GPUs of each.")] = _ENGINE.replica_gpus
    ray_address: Annotated[str, _launcher("Of the cluster; auto: the one that this machine is of.")] = (
        _ENGINE.ray_address
    )

    def settings(self) -> dict[str, Any]:
        """Keywords for `LLM` and `AsyncLLM`; none without a launcher. Raises `InvalidValue`."""
        if self.launcher not in (None, "ray"):
            raise InvalidValue(f"--launcher: {self.launcher!r} is not ray")
        if self.launcher is None and self != LauncherOptions():
            raise InvalidValue("--replica-cpus, --replica-gpus, --ray-address are of a cluster: give --launcher ray")
        return {} if self.launcher is None else asdict(self)


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are drawn, and when to stop."""

    max_tokens: Annotated[int | None, _sampling("New tokens at most; without it, up to the length limit.")] = None
    min_tokens: Annotated[int | None, _sampling("New tokens before which nothing may end it.")] = None
    temperature: Annotated[float | None, _sampling("0: greedy. Without it 1, in chat 0.7.")] = None
    top_k: Annotated[int | None, _sampling("Draw from the k best.")] = None
    top_p: Annotated[float | None, _sampling("Draw from the best that have this mass.")] = None
    min_p: Annotated[float | None, _sampling("Least probability, as a part of the best.")] = None
    repetition_penalty: Annotated[float | None, _sampling("Above 1: ids of prompt and output become less likely.")] = (
        None
    )
    presence_penalty: Annotated[float | None, _sampling("Taken off each id that the output has; -2 to 2.")] = None
    frequency_penalty: Annotated[float | None, _sampling("The same for each time it has it; -2 to 2.")] = None
    logit_bias: Annotated[
        list[str] | None, _sampling("Add to an id's logit; may be repeated.", "--logit-bias", metavar="ID=X")
    ] = None
    bad_words: Annotated[
        list[str] | None, _sampling("A word never to say; may be repeated.", "--bad-word", metavar="TEXT")
    ] = None
    stop: Annotated[list[str] | None, _sampling("Stop before this text; may be repeated.")] = None
    json_schema: Annotated[
        str | None, _sampling("Answer in JSON of the schema in this file.", "--json-schema", metavar="FILE")
    ] = None
    json_object: Annotated[bool, _sampling("Answer with a JSON object, whichever.", "--json-object")] = False
    grammar: Annotated[
        str | None, _sampling("Answer in the grammar (Lark's or GBNF's) in this file.", "--grammar", metavar="FILE")
    ] = None
    regex: Annotated[str | None, _sampling("Answer with a text that this pattern matches.")] = None
    choice: Annotated[
        list[str] | None, _sampling("Answer with this text, or another so given.", "--choice", metavar="TEXT")
    ] = None
    ignore_eos: Annotated[bool, _sampling("Go on after the model's end.", "--ignore-eos")] = False

    def params(self, **others: Any) -> SamplingParams:
        """Settings of a request; what the user gave goes before `others`."""
        given = {name: value for name, value in asdict(self).items() if value is not None}
        options = {"json_schema": "json", "grammar": "grammar", "regex": "regex", "choice": "choice"}
        structure = {field: given.pop(option) for option, field in options.items() if option in given}
        if self.json_schema is not None:
            structure["json"] = _text_of("--json-schema", self.json_schema)
        if self.grammar is not None:
            structure["grammar"] = _text_of("--grammar", self.grammar)
        if given.pop("json_object"):
            structure["json_object"] = True
        if structure:
            given["structured_outputs"] = structure
        if self.logit_bias is not None:
            given["logit_bias"] = dict(_bias_from(one) for one in self.logit_bias)
        return SamplingParams(**(others | given))


JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, one object a line.")]
SecretOption = Annotated[
    Path | None, typer.Option(help="A file whose content clients, coordinator and replicas share.", show_default=False)
]
IdsOption = Annotated[str | None, typer.Option(metavar="1,2,3", help="A prompt of token ids.", show_default=False)]


def spelled_out(command: Callable[..., None]) -> Callable[..., None]:
    """The command with each parameter that is a group replaced by the group's fields."""
    parameters = inspect.signature(command, eval_str=True).parameters
    groups: dict[str, Any] = {name: p.annotation for name, p in parameters.items() if is_dataclass(p.annotation)}

    def run(**values: Any) -> None:
        filled = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        command(**values, **filled)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [p.replace(kind=keyword) for name, p in parameters.items() if name not in groups]
    shared = [
        inspect.Parameter(field.name, keyword, default=field.default, annotation=field.type)
        for group in groups.values()
        for field in fields(group)
    ]
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    return run


def _bias_from(given: str) -> tuple[str, float]:
    """ID=X as typed."""
    token, _, value = given.partition("=")
    try:
        return token.strip(), float(value)
    except ValueError:
        raise InvalidValue(f"--logit-bias: {given[:40]!r} is not ID=X, as in 42=-1.5") from None


def _text_of(option: str, path: str) -> str:
    if not path:
        raise InvalidValue(f"{option}: the file's name is empty")
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise InvalidValue(f"{option}: {path!r} cannot be read: {reason}") from None


def ids_from(given: str) -> list[int]:
    """Token ids as typed: numbers with commas between them."""
    parts = [part.strip() for part in given.split(",")] if given.strip() else []
    wrong = next((part for part in parts if not _ID.fullmatch(part)), None)
    if wrong is not None:
        raise InvalidValue(f"--ids: {wrong[:40]!r} is not a token id; write them as 1,2,3")
    return [int(part) for part in parts]
