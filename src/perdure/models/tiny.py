"""Small seeded Llama checkpoints with a tokenizer, made in a moment: for tests, conformance and first steps offline.

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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor

from perdure.api.errors import InvalidValue
from perdure.models.config import DTYPES, config_from_directory
from perdure.models.llama import parameters
from perdure.models.store import INDEX_FILE, SINGLE_FILE

BOS, EOS = "<s>", "</s>"
BOS_ID, EOS_ID = 256, 257
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

HEAD_SCALE = 2.0
GAINS = {"q_proj": 2.0, "k_proj": 1.5, "v_proj": 2.0, "o_proj": 8.0, "gate_proj": 2.0, "up_proj": 1.0, "down_proj": 8.0}
"""Standard deviation of each product's outputs for inputs of size 1. Queries and keys: attention that picks few
positions instead of averaging all. Outputs: layers that outweigh the embedding they are added to, without which a tied
head repeats its input."""


def make_tiny_llama(
    directory: str | Path,
    *,
    seed: int = 0,
    vocab_size: int = 512,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 192,
    max_position_embeddings: int = 256,
    tie: bool = False,
    bias: bool = False,
    rope_scaling: Mapping[str, Any] | None = None,
    dtype: str = "float32",
    num_shards: int = 1,
) -> Path:
    """Write a Hugging Face directory (configuration, weights, tokenizer) and return it.

    bias: attention and MLP have biases. rope_scaling: as in config.json. vocab_size: at least the bytes, BOS and EOS.
    """
    if vocab_size <= EOS_ID:
        raise InvalidValue(f"vocab_size={vocab_size} leaves no room for 256 bytes, BOS and EOS ({EOS_ID + 1} ids)")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(
        directory / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden_size,
            "intermediate_size": intermediate_size,
            "num_hidden_layers": num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": hidden_size // num_heads,
            "vocab_size": vocab_size,
            "max_position_embeddings": max_position_embeddings,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "rope_scaling": dict(rope_scaling) if rope_scaling else None,
            "tie_word_embeddings": tie,
            "attention_bias": bias,
            "mlp_bias": bias,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "dtype": dtype,
        },
    )
    _write_json(directory / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    _write_weights(directory, seed, DTYPES[dtype], num_shards)
    _write_tokenizer(directory, vocab_size, max_position_embeddings)
    return directory


def _drawn(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    noise = torch.randn(shape, generator=generator)
    module, kind = name.split(".")[-2:]
    if kind == "bias":
        return noise.mul_(0.1)
    if module.endswith("norm"):
        return noise.mul_(0.1).add_(1.0)
    if module == "embed_tokens":
        return noise
    if module == "lm_head":
        return noise.mul_(HEAD_SCALE)
    return noise.mul_(GAINS[module] / math.sqrt(shape[-1]))


def _write_weights(directory: Path, seed: int, dtype: torch.dtype, num_shards: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts = [part for joined in parameters(config_from_directory(directory)).values() for part in joined]
    tensors = {part.hf: _drawn(part.hf, part.shape, generator).to(dtype) for part in parts}
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
            "model_max_length": max_length,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
