"""Reading a model's shape from config.json or from GGUF metadata into one `ModelConfig`.

- What all families state alike is read here, the rest by the family (`base.Family`).
- Everything that changes the computation is either understood or refused by name; nothing is guessed past.
- A missing or odd field is named with its file.
- End ids are the union of what config.json and generation_config.json name; of a GGUF, its eos and eot ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from perdure.api.errors import ModelLoadError, ModelNotFound
from perdure.models.base import PARTIAL, Family, ModelConfig
from perdure.models.fields import Fields, rope_fields, rope_scaling
from perdure.models.float8 import stored_float8
from perdure.models.gguf_file import GGUFFile
from perdure.models.registry import find_family
from perdure.ops.attention import LayerAttention, Sink

GENERATION_FILE = "generation_config.json"
SAMPLING_NAMES = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""What a generation config may suggest, and what `SamplingParams` calls it."""

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

SOFTMAX_TYPES: Mapping[str, Sink | None] = {"vanilla": None, "off-by-one": "off-by-one", "learnable": "learnable"}
"""What config.json may say of attention sinks, in Megatron-core's words. transformers has no such key."""


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file; {} when the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: holds no JSON object")
    return value


def config_from_directory(directory: Path) -> ModelConfig:
    """The shape that config.json and generation_config.json of a Hugging Face directory state."""
    path = directory / "config.json"
    if not path.is_file():
        raise ModelNotFound(f"{directory}: no config.json in this directory")
    values = read_json(path)
    architecture = _architecture(values)
    family = find_family(architecture, str(path))
    fields = Fields(str(path), {**family.defaults, **values})
    rope = rope_fields(fields)
    _refuse_foreign_values(fields, rope, family)

    num_heads, num_layers = fields.integer("num_attention_heads"), fields.integer("num_hidden_layers")
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    rotary_factor = rope.real("partial_rotary_factor", fields.real("partial_rotary_factor", 1.0))
    generation = read_json(directory / GENERATION_FILE)
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("num_key_value_heads", num_heads),
        head_dim=head_dim,
        rotary_dim=int(head_dim * rotary_factor),
        attention=(LayerAttention(head_dim**-0.5, sink=_sink(fields)),) * num_layers,
        vocab_size=fields.integer("vocab_size"),
        max_position_embeddings=fields.integer("max_position_embeddings", 2048),
        rms_norm_eps=fields.real("rms_norm_eps", 1e-6),
        rope_theta=rope.real("rope_theta", fields.real("rope_theta", 10000.0)),
        rope_scaling=rope_scaling(rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings", False),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        bos_token_id=_first(_ids(fields.file, "bos_token_id", values.get("bos_token_id"))),
        eos_token_ids=_union(
            _ids(fields.file, "eos_token_id", values.get("eos_token_id")),
            _ids(str(directory / GENERATION_FILE), "eos_token_id", generation.get("eos_token_id")),
        ),
        dtype=_stored_dtype(fields),
        float8=stored_float8(fields),
    )
    return _checked(family.read_json(fields, config), fields.file)


def config_from_gguf(file: GGUFFile) -> ModelConfig:
    """The shape that a GGUF's metadata and table of tensors state."""
    name = str(file.path)
    architecture = file.metadata.get("general.architecture", "(none)")
    family = find_family(architecture, name)
    prefix = f"{architecture}."
    fields = Fields(name, {k.removeprefix(prefix): v for k, v in file.metadata.items() if k.startswith(prefix)})
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelLoadError(f"{name}: tensor 'token_embd.weight' is missing")

    hidden_size = fields.integer("embedding_length")
    num_heads = fields.integer("attention.head_count")
    num_layers = fields.integer("block_count")
    head_dim = fields.integer("attention.key_length", hidden_size // num_heads)
    whole = ("attention.value_length", *(("rope.dimension_count",) if PARTIAL in family.required else ()))
    for field in whole:
        if fields.integer(field, head_dim) != head_dim:
            raise ModelLoadError(f"{name}: {field}={fields.values[field]} differs from the head size {head_dim}")
    window = fields.integer("attention.sliding_window", 0, least=0)  # 0 is how some writers say: none
    config = ModelConfig(
        architecture=architecture,
        hidden_size=hidden_size,
        intermediate_size=fields.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=fields.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        rotary_dim=fields.integer("rope.dimension_count", head_dim),
        attention=(LayerAttention(head_dim**-0.5, window or None),) * num_layers,
        vocab_size=embedding.shape[0],
        max_position_embeddings=fields.integer("context_length"),
        rms_norm_eps=fields.real("attention.layer_norm_rms_epsilon"),
        rope_theta=fields.real("rope.freq_base", 10000.0),
        rope_scaling=_gguf_rope_scaling(file, fields),
        tie_word_embeddings="output.weight" not in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        bos_token_id=_first(_ids(name, "bos_token_id", file.metadata.get("tokenizer.ggml.bos_token_id"))),
        eos_token_ids=_union(
            _ids(name, "eos_token_id", file.metadata.get("tokenizer.ggml.eos_token_id")),
            _ids(name, "eot_token_id", file.metadata.get("tokenizer.ggml.eot_token_id")),
        ),
        dtype=torch.float32,
    )
    return _checked(family.read_gguf(fields, config), name)


def sampling_defaults(directory: Path) -> dict[str, Any]:
    """The sampling settings a directory suggests; nothing applies them by itself."""
    suggested = read_json(directory / GENERATION_FILE)
    return {ours: suggested[theirs] for theirs, ours in SAMPLING_NAMES.items() if suggested.get(theirs) is not None}


def _architecture(values: Mapping[str, Any]) -> str:
    named = values.get("architectures")
    return str(named[0]) if isinstance(named, list) and named else "(none)"


def _refuse_foreign_values(fields: Fields, rope: Fields, family: Family) -> None:
    for name, supported in family.required.items():
        value = rope.values.get(name, fields.values.get(name, supported))
        if value is not None and value != supported:
            raise ModelLoadError(f"{fields.file}: {name}={value!r} is not supported; supported: {supported!r}")


def _sink(fields: Fields) -> Sink | None:
    """Every layer's sinks."""
    name = fields.values.get("softmax_type")
    if name is None:
        return None
    if not isinstance(name, str) or name not in SOFTMAX_TYPES:
        supported = ", ".join(SOFTMAX_TYPES)
        raise ModelLoadError(f"{fields.file}: softmax_type={name!r} is not supported; supported: {supported}")
    return SOFTMAX_TYPES[name]


def _gguf_rope_scaling(file: GGUFFile, fields: Fields) -> Mapping[str, Any] | None:
    if "rope_freqs.weight" in file.tensors:
        factors = file.rows("rope_freqs.weight", 0, file.tensors["rope_freqs.weight"].shape[0])
        return {"rope_type": "factors", "factors": tuple(factors.tolist())}
    kind = fields.values.get("rope.scaling.type", "none")
    if kind == "none":
        return None
    return rope_scaling(Fields(fields.file, {"rope_type": kind, "factor": fields.values.get("rope.scaling.factor")}))


def _stored_dtype(fields: Fields) -> torch.dtype:
    name = fields.values.get("dtype") or fields.values.get("torch_dtype") or "float32"
    if name not in DTYPES:
        raise ModelLoadError(f"{fields.file}: dtype={name!r} is not supported; supported: {', '.join(DTYPES)}")
    return DTYPES[name]


def _ids(file: str, name: str, value: Any) -> tuple[int, ...]:
    """An id, a list of ids or nothing, as a tuple."""
    given = () if value is None else tuple(value) if isinstance(value, list) else (value,)
    for item in given:
        if isinstance(item, bool) or not isinstance(item, int) or item < 0:
            raise ModelLoadError(f"{file}: {name}={value!r} is not a token id or a list of them")
    return given


def _first(ids: tuple[int, ...]) -> int | None:
    return ids[0] if ids else None


def _union(*ids: Iterable[int]) -> tuple[int, ...]:
    return tuple(sorted({item for group in ids for item in group}))


def _checked(config: ModelConfig, file: str) -> ModelConfig:
    if config.num_heads % config.num_kv_heads:
        raise ModelLoadError(
            f"{file}: {config.num_heads} heads cannot be shared by {config.num_kv_heads} key-value heads evenly"
        )
    if config.rotary_dim % 2 or not 0 < config.rotary_dim <= config.head_dim:
        raise ModelLoadError(
            f"{file}: of a head of size {config.head_dim}, {config.rotary_dim} elements would turn with position; "
            "that must be an even number of them"
        )
    num_factors = len((config.rope_scaling or {}).get("factors", ()))
    if num_factors not in (0, config.rotary_dim // 2):
        raise ModelLoadError(f"{file}: 'rope_freqs.weight' holds {num_factors} factors, not {config.rotary_dim // 2}")
    return config
