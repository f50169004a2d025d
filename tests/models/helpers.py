"""What tests of models share: a dense attention as oracle, a greedy loop, and writers of other formats.

- Nothing here is fast; everything is meant to be obviously right.
- Writers turn what is at hand (llama2.c files, a GGUF, a Hugging Face directory) into what a test needs to load.

Shapes: N rows of this call, S positions so far, Hq query heads, Hkv key/value heads, D = head_dim.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors
from torch import Tensor

from perdure.engine.gguf_tokenizer import GGUFTokenizer
from perdure.models.base import Model, Part, Turn
from perdure.models.config import config_from_directory, config_from_gguf
from perdure.models.gemma3 import Gemma3Config
from perdure.models.gguf_file import GGUFFile
from perdure.models.llama import parameters
from perdure.models.registry import find_family
from perdure.models.store import directory_store, gguf_store
from perdure.ops.attention import LayerAttention
from perdure.ops.rope import inverse_frequencies


class DenseAttend:
    """Attention of one sequence over contiguous keys and values, in float64: `perdure.models.base.Attend`."""

    def __init__(self, kinds: Sequence[LayerAttention]) -> None:
        self._kinds = kinds
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}

    def __call__(self, layer: int, qk: Tensor, v: Tensor, turn: Turn) -> Tensor:
        q, k = turn(qk).split((qk.shape[1] - v.shape[1], v.shape[1]), 1)
        keys = self._keys[layer] = torch.cat((self._keys.get(layer, k[:0]), k))  # [S, Hkv, D]
        values = self._values[layer] = torch.cat((self._values.get(layer, v[:0]), v))
        kind, num_rows, group = self._kinds[layer], len(q), q.shape[1] // k.shape[1]
        wide_keys = keys.double().repeat_interleave(group, dim=1)  # [S, Hq, D]
        wide_values = values.double().repeat_interleave(group, dim=1)
        scores = torch.einsum("nhd,shd->hns", q.double(), wide_keys) * kind.scale
        if kind.softcap is not None:
            scores = torch.tanh(scores / kind.softcap) * kind.softcap
        distance = torch.arange(len(keys) - num_rows, len(keys))[:, None] - torch.arange(len(keys))
        hidden = (distance < 0) | (distance >= (math.inf if kind.window is None else kind.window))
        scores = scores.masked_fill(hidden, -math.inf)
        if turn.sinks is not None:  # one more column, whose share goes to no value
            scores = torch.cat((scores, turn.sinks.double()[:, None, None].expand(-1, num_rows, 1)), -1)
        shares = scores.softmax(dim=-1)[..., : len(keys)]
        return torch.einsum("hns,shd->nhd", shares, wide_values).to(q.dtype)


def run_python(script: str, *arguments: object) -> str:
    """What a script prints in a process of its own; what it raises is raised here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout


@torch.inference_mode()
def logits_in_chunks(model: Model, token_ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits of every position, the tokens fed in pieces of these lengths."""
    assert sum(chunks) == len(token_ids)
    attend, start, rows = DenseAttend(model.config.attention), 0, []
    for length in chunks:
        piece = torch.tensor(token_ids[start : start + length])
        rows.append(model.logits(model.forward(piece, torch.arange(start, start + length), attend)))
        start += length
    return torch.cat(rows)


@torch.inference_mode()
def greedy(model: Model, prompt_ids: Sequence[int], num_tokens: int) -> list[int]:
    """The naive loop: the prompt at once, then one token at a time, each the best logit, and clearly so."""
    attend, start, fed, output = DenseAttend(model.config.attention), 0, list(prompt_ids), []
    while len(output) < num_tokens:
        hidden = model.forward(torch.tensor(fed), torch.arange(start, start + len(fed)), attend)
        start += len(fed)
        fed = [clear_best(model.logits(hidden[-1:])[0])]
        output += fed
    return output


def clear_best(logits: Tensor) -> int:
    """The best id by logits [V], which must lead by so much that no rounding could change it."""
    best = logits.topk(2)
    assert best.values[0] - best.values[1] > 1e-3, f"ids prove nothing: {best.values} of {best.indices}"
    return int(best.indices[0])


def convert_stories260k(weights_path: Path, tokenizer_path: Path, directory: Path) -> Path:
    """llama2.c's files as a Hugging Face directory. Its rotary is interleaved, so q and k rows are taken apart."""
    directory.mkdir(parents=True, exist_ok=True)
    with weights_path.open("rb") as file:
        dim, inner, num_layers, num_heads, num_kv_heads, vocab_size, length = struct.unpack("<7i", file.read(28))
        assert vocab_size > 0, "llama2.c marks a head of its own by a negative vocabulary; this one is tied"
        head_dim = dim // num_heads
        config = {
            **_llama_config(dim, inner, num_layers, num_heads, num_kv_heads, vocab_size, length),
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "dtype": "float32",
        }

        def take(*shape: int) -> Tensor:
            return torch.from_numpy(np.fromfile(file, "<f4", math.prod(shape)).reshape(shape))

        tensors = {"model.embed_tokens.weight": take(vocab_size, dim)}
        for name, shape in (
            ("input_layernorm", (dim,)),
            ("self_attn.q_proj", (dim, dim)),
            ("self_attn.k_proj", (num_kv_heads * head_dim, dim)),
            ("self_attn.v_proj", (num_kv_heads * head_dim, dim)),
            ("self_attn.o_proj", (dim, dim)),
            ("post_attention_layernorm", (dim,)),
            ("mlp.gate_proj", (inner, dim)),
            ("mlp.down_proj", (dim, inner)),
            ("mlp.up_proj", (inner, dim)),
        ):
            for layer, tensor in enumerate(take(num_layers, *shape)):
                is_rotary = name.endswith(("q_proj", "k_proj"))
                stored = _halves_from_interleaved(tensor, head_dim) if is_rotary else tensor.clone()
                tensors[f"model.layers.{layer}.{name}.weight"] = stored
        tensors["model.norm.weight"] = take(dim)
    save_file(tensors, directory / "model.safetensors")
    _write_json(directory / "config.json", config)
    _write_sentencepiece(tokenizer_path, vocab_size, directory)
    return directory


def _halves_from_interleaved(rows: Tensor, head_dim: int) -> Tensor:
    """Each head's rows from pairs (i and i + D/2 side by side) to halves."""
    return rows.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)


def _write_sentencepiece(path: Path, vocab_size: int, directory: Path) -> None:
    """llama2.c's list of pieces and scores as a byte-fallback BPE: a merge ranks as the piece it makes."""
    pieces, scores = [], []
    with path.open("rb") as file:
        file.read(4)  # the longest piece's length
        for _ in range(vocab_size):
            score, length = struct.unpack("<fi", file.read(8))
            pieces.append(file.read(length).decode().strip("\n").replace(" ", "\u2581"))
            scores.append(score)
    pieces[1], pieces[2] = "<s>", "</s>"
    vocabulary = {piece: token_id for token_id, piece in enumerate(pieces)}
    splits = (
        (p[:i], p[i:]) for p in sorted(pieces[3:], key=lambda p: -scores[vocabulary[p]]) for i in range(1, len(p))
    )
    merges = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]

    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in ("<unk>", "<s>", "</s>")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_tokenizer_config(directory, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def gguf_to_bf16_directory(gguf_path: Path, directory: Path) -> Path:
    """A GGUF's weights, rounded to bf16, as a Hugging Face directory with its tokenizer."""
    directory.mkdir(parents=True, exist_ok=True)
    file = GGUFFile(gguf_path)
    config, store = config_from_gguf(file), gguf_store(file, interleaved=True)
    tensors = {
        part.hf: torch.cat([rows.to(torch.bfloat16) for _, rows in store.pieces(part)])
        for parts in parameters(config).values()
        for part in parts
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    shape = _llama_config(
        config.hidden_size,
        config.intermediate_size,
        config.num_layers,
        config.num_heads,
        config.num_kv_heads,
        config.vocab_size,
        config.max_position_embeddings,
    )
    special = {"bos_token_id": config.bos_token_id, "eos_token_id": list(config.eos_token_ids)}
    others = {
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": "bfloat16",
    }
    _write_json(directory / "config.json", {**shape, **others, **special})
    _write_json(directory / "generation_config.json", special)
    write_gguf_tokenizer(file, directory)
    return directory


def write_gguf_tokenizer(file: GGUFFile, directory: Path) -> None:
    """A GGUF's tokenizer and chat template as the files a Hugging Face directory has."""
    tokenizer = GGUFTokenizer(file)
    tokenizer._inner.save(str(directory / "tokenizer.json"))
    named = {
        f"{kind}_token": tokenizer.id_to_piece(token_id)
        for kind, token_id in (("bos", tokenizer.bos_token_id), ("eos", tokenizer.eos_token_id))
        if token_id is not None
    }
    _write_tokenizer_config(directory, **named, chat_template=file.metadata.get("tokenizer.chat_template"))


def write_gguf(directory: Path, out: Path, type_name: str | Callable[[Part], str]) -> Path:
    """A Hugging Face directory as a GGUF: matrices in `type_name` (of each), vectors in F32, tokenizer included."""
    type_of = type_name if callable(type_name) else lambda part: type_name
    config = config_from_directory(directory)
    name = find_family(config.architecture, str(directory)).gguf or "llama"  # Mistral is stored under this name
    writer = gguf.GGUFWriter(out, name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.rotary_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(max(kind.window or 0 for kind in config.attention))
    if isinstance(config, Gemma3Config) and config.final_softcap is not None:
        writer.add_final_logit_softcapping(config.final_softcap)
    _add_tokenizer(writer, directory, config.bos_token_id, config.eos_token_ids[0])
    if config.rope_scaling is not None and config.rope_scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_scaling["factor"])
    elif config.rope_scaling is not None:
        plain = inverse_frequencies(config.rotary_dim, config.rope_theta)
        scaled = inverse_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy())
    for part, tensor in stored_tensors(directory):
        if part.rotary_heads and name == "llama":
            tensor = tensor.unflatten(0, (part.rotary_heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
        kind = gguf.GGMLQuantizationType[type_of(part) if tensor.ndim == 2 else "F32"]
        values = (tensor + part.gguf_added).numpy()
        writer.add_tensor(part.gguf, _quantised(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


SCALES_AT: dict[str, tuple[slice, ...]] = {
    "Q2_K": (slice(80, 82), slice(82, 84)),
    "Q3_K": (slice(108, 110),),
    "Q4_K": (slice(0, 2), slice(2, 4)),
    "Q5_K": (slice(0, 2), slice(2, 4)),
    "Q6_K": (slice(208, 210),),
    "IQ4_NL": (slice(0, 2),),
    "IQ4_XS": (slice(0, 2),),
}
"""Where blocks hold their fp16 scales, of the types that the gguf package decodes and cannot make."""


def _quantised(values: np.ndarray, kind: gguf.GGMLQuantizationType) -> np.ndarray:
    """values [R, K] in blocks; of a type that nobody here can make, any blocks of about that size."""
    if kind.name not in SCALES_AT:
        return gguf.quants.quantize(values, kind)
    size, num_bytes = gguf.constants.GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(list(values.shape))
    blocks = rng.integers(0, 256, (*values.shape[:-1], values.shape[-1] // size, num_bytes), dtype=np.uint8)
    for at in SCALES_AT[kind.name]:
        scales = rng.uniform(0.2, 1.0, blocks.shape[:-1]) * values.std() / 100
        blocks[..., at] = scales.astype(np.float16)[..., None].view(np.uint8)
    return blocks.reshape(*values.shape[:-1], -1)


def stored_tensors(directory: Path) -> Iterator[tuple[Part, Tensor]]:
    """Every tensor of a Hugging Face directory in fp32, with its names."""
    config, store = config_from_directory(directory), directory_store(directory)
    for parts in find_family(config.architecture, str(directory)).parameters(config).values():
        for part in parts:
            yield part, torch.cat([rows.float() for _, rows in store.pieces(part)])


def change_weights(directory: Path, out: Path, change: Callable[[Part, Tensor], Tensor]) -> Path:
    """A copy of a directory with other weights."""
    shutil.copytree(directory, out)
    save_file({part.hf: change(part, tensor) for part, tensor in stored_tensors(directory)}, out / "model.safetensors")
    return out


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, bos_id: int | None, eos_id: int) -> None:
    tokenizer = json.loads((directory / "tokenizer.json").read_text())
    special = {token["id"] for token in tokenizer["added_tokens"]}
    pieces = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(pieces)
    writer.add_token_types([3 if token_id in special else 1 for token_id in range(len(pieces))])
    writer.add_token_merges([" ".join(merge) for merge in tokenizer["model"]["merges"]])
    writer.add_eos_token_id(eos_id)
    if bos_id is not None:
        writer.add_bos_token_id(bos_id)
        writer.add_add_bos_token(True)
    writer.add_chat_template(json.loads((directory / "tokenizer_config.json").read_text())["chat_template"])


def _llama_config(
    dim: int, inner: int, num_layers: int, num_heads: int, num_kv_heads: int, vocab_size: int, length: int
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": dim,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "vocab_size": vocab_size,
        "max_position_embeddings": length,
    }


def _write_tokenizer_config(directory: Path, **fields: Any) -> None:
    common = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    _write_json(directory / "tokenizer_config.json", {**common, **fields})


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
