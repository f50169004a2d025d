"""Small seeded checkpoints with a tokenizer, made in a moment: for tests, conformance and first steps offline.

- The same arguments give the same files, byte for byte.
- Random weights of the usual scale would make every greedy continuation one repeated id with near ties. These are
  scaled so that it wanders over the vocabulary (of 100 continuations of 250 tokens about one gets stuck, five if the
  head is tied) and the best logit leads by more than 1e-3 at all but 5 in 10,000 positions: two forms that agree to
  1e-4 then give equal ids.
- The tokenizer is byte-level, so any text can be encoded; its ids never exceed the model's vocabulary.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from perdure.api.errors import InvalidValue
from perdure.models.base import ModelConfig, Part
from perdure.models.config import DTYPES, config_from_directory
from perdure.models.registry import find_family
from perdure.models.store import INDEX_FILE, SINGLE_FILE

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 256, 257
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

SCALES = {
    "q_proj": 2.0,
    "k_proj": 1.5,
    "v_proj": 2.0,
    "o_proj": 8.0,
    "gate_proj": 2.0,
    "up_proj": 1.0,
    "down_proj": 8.0,
    "q_norm": 2.0,
    "k_norm": 1.5,
    "lm_head": 2.0,
    "sinks": 3.0,
}
"""By module. A product: standard deviation of its outputs for inputs of size 1; a norm: mean of its weights; embedding,
head and sinks: standard deviation of the weights; 1 where not named. Queries and keys: attention that picks few
positions instead of averaging all; sinks are as large as its scores. Outputs: layers that outweigh the embedding they
are added to, without which a tied head repeats its input."""

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@dataclass(frozen=True, slots=True)
class Recipe:
    """What makes a tiny model of one family.

    config: what its config.json says beyond or instead of the common values.
    scales: where its modules need others than `SCALES`.
    """

    architecture: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    scales: Mapping[str, float] = field(default_factory=dict)


RECIPES = {
    "llama": Recipe("LlamaForCausalLM", "llama"),
    "mistral": Recipe("MistralForCausalLM", "mistral", {"sliding_window": 40}),
    "qwen2": Recipe("Qwen2ForCausalLM", "qwen2", {"use_sliding_window": False}),
    "qwen3": Recipe("Qwen3ForCausalLM", "qwen3", {"head_dim": 32, "use_sliding_window": False}),
    "phi3": Recipe("Phi3ForCausalLM", "phi3", {"partial_rotary_factor": 0.75, "pad_token_id": None}),
    "olmo2": Recipe(
        "Olmo2ForCausalLM",
        "olmo2",
        scales={"post_attention_layernorm": 2.0, "post_feedforward_layernorm": 2.0},
    ),
    "gemma3": Recipe(
        "Gemma3ForCausalLM",
        "gemma3_text",
        {
            "num_hidden_layers": 6,
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "hidden_activation": "gelu_pytorch_tanh",
            "sliding_window": 40,
            "sliding_window_pattern": 6,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        },
        {"embed_tokens": 0.25, "post_attention_layernorm": 4.0, "post_feedforward_layernorm": 12.0, "norm": 4.0},
    ),
}
FAMILIES = tuple(RECIPES)


def make_tiny(
    family: str,
    directory: str | Path,
    *,
    seed: int = 0,
    vocab_size: int = 512,
    max_position_embeddings: int = 256,
    dtype: str = "float32",
    num_shards: int = 1,
    **config: Any,
) -> Path:
    """Write a Hugging Face directory (configuration, weights, tokenizer) of a family and return it.

    vocab_size: at least the bytes, BOS and EOS. config: values of config.json that are to be others.
    """
    if family not in RECIPES:
        raise InvalidValue(f"family={family!r} is none of {', '.join(FAMILIES)}")
    if vocab_size <= EOS_ID:
        raise InvalidValue(f"vocab_size={vocab_size} leaves no room for 256 bytes, BOS and EOS ({EOS_ID + 1} ids)")
    directory, recipe = Path(directory), RECIPES[family]
    directory.mkdir(parents=True, exist_ok=True)
    sizes = {**COMMON, **recipe.config, **config}
    _write_json(
        directory / "config.json",
        {
            "architectures": [recipe.architecture],
            "model_type": recipe.model_type,
            "head_dim": sizes["hidden_size"] // sizes["num_attention_heads"],
            "vocab_size": vocab_size,
            "max_position_embeddings": max_position_embeddings,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "dtype": dtype,
            **sizes,
        },
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    _write_weights(directory, {**SCALES, **recipe.scales}, seed, DTYPES[dtype], num_shards)
    _write_tokenizer(directory, vocab_size, max_position_embeddings)
    return directory


def make_tiny_llama(
    directory: str | Path,
    *,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    tie: bool = False,
    bias: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    **others: Any,
) -> Path:
    """`make_tiny` of a Llama, what tests vary most by shorter names. bias: attention and MLP have biases."""
    return make_tiny(
        "llama",
        directory,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        tie_word_embeddings=tie,
        attention_bias=bias,
        mlp_bias=bias,
        rope_scaling=dict(rope_scaling) if rope_scaling else None,
        **others,
    )


def _drawn(part: Part, config: ModelConfig, scales: Mapping[str, float], generator: torch.Generator) -> Tensor:
    noise = torch.randn(part.shape, generator=generator)
    module, kind = part.hf.split(".")[-2:]
    if kind == "bias":
        return noise.mul_(0.1)
    if kind == "sinks":
        return noise.mul_(scales[kind])
    if module.endswith("norm"):
        return noise.mul_(0.1).add_(scales.get(module, 1.0) - part.gguf_added)
    if module in ("embed_tokens", "lm_head"):
        return noise.mul_(scales.get(module, 1.0))
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    joined = {
        "qkv_proj": {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows},
        "gate_up_proj": {"gate_proj": config.intermediate_size, "up_proj": config.intermediate_size},
    }
    members = joined.get(module, {module: part.shape[0]})
    width = math.sqrt(part.shape[1])
    return torch.cat(
        [rows * (scales[name] / width) for name, rows in zip(members, noise.split(list(members.values())), strict=True)]
    )


def _write_weights(
    directory: Path, scales: Mapping[str, float], seed: int, dtype: torch.dtype, num_shards: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    config = config_from_directory(directory)
    parameters = find_family(config.architecture, str(directory)).parameters(config)
    tensors = {
        part.hf: _drawn(part, config, scales, generator).to(dtype) for parts in parameters.values() for part in parts
    }
    if num_shards == 1:
        save_file(tensors, directory / SINGLE_FILE, metadata={"format": "pt"})
        return
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = list(tensors)[shard::num_shards]
        save_file({name: tensors[name] for name in names}, directory / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    _write_json(directory / INDEX_FILE, {"metadata": {}, "weight_map": weight_map})


def _write_tokenizer(directory: Path, vocab_size: int, max_length: int) -> None:
    """256 ids for the bytes, then BOS and EOS, then common pairs of letters until the vocabulary is full."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: token_id for token_id, letter in enumerate(alphabet)} | {BOS: BOS_ID, EOS: EOS_ID}
    letters = "etaoinshrdlucmfwypvbgkqjxz"
    starts = [("\u0120", letter) for letter in letters]  # U+0120 is how a space is spelled
    pairs = [(first, second) for second in letters[:10] for first in letters]
    merges = [*starts, *pairs][: vocab_size - len(vocabulary)]
    vocabulary |= {first + second: len(vocabulary) + i for i, (first, second) in enumerate(merges)}

    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, BOS_ID)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": BOS,
            "eos_token": EOS,
            "pad_token": EOS,  # what a family's own tokenizer would add ids for
            "unk_token": EOS,
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
