"""Tiny checkpoints do what tests rely on: same files from the same seed, clear best logits, varied continuations."""

import json

import pytest
import torch
from torch.nn import functional

from perdure.api.errors import InvalidValue
from perdure.cli import make_tiny as make_tiny_command
from perdure.engine.tokenizer import load_tokenizer
from perdure.models.tiny import FAMILIES, make_tiny, make_tiny_llama
from perdure.models.weights import load_model

NUM_SEQUENCES, LENGTH = 64, 120


@torch.inference_mode()
def _wander(loaded) -> tuple[torch.Tensor, torch.Tensor]:
    """Greedy ids of many sequences side by side, [LENGTH, NUM_SEQUENCES], and the lead of each over the second best."""
    shape = loaded.config
    keys = torch.zeros(shape.num_layers, LENGTH, NUM_SEQUENCES, shape.num_kv_heads, shape.head_dim)
    values = torch.zeros_like(keys)
    fed = torch.randint(0, shape.vocab_size, (NUM_SEQUENCES,), generator=torch.Generator().manual_seed(0))
    ids, leads = [], []
    for position in range(LENGTH):

        def attend(layer, qk, v, turn, position=position):
            q, k = turn(qk).split((shape.num_heads, shape.num_kv_heads), 1)
            keys[layer, position], values[layer, position] = k, v
            kind = shape.attention[layer]
            seen = slice(max(0, position + 1 - (kind.window or LENGTH)), position + 1)
            past = [cache[layer, seen].permute(1, 2, 0, 3) for cache in (keys, values)]
            sinks = None
            if turn.sinks is not None:  # a key of zeros
                past = [functional.pad(x, (0, 0, 0, 1)) for x in past]
                sinks = functional.pad(turn.sinks[None, :, None, None], (past[0].shape[2] - 1, 0))
            mixed = functional.scaled_dot_product_attention(
                q.unsqueeze(2), *past, attn_mask=sinks, scale=kind.scale, enable_gqa=True
            )
            return mixed.squeeze(2)

        positions = torch.full((NUM_SEQUENCES,), position)
        best = loaded.model.logits(loaded.model.forward(fed, positions, attend)).topk(2)
        fed = best.indices[:, 0]
        ids.append(fed)
        leads.append(best.values[:, 0] - best.values[:, 1])
    return torch.stack(ids), torch.stack(leads)


SHAPES = [(family, {}) for family in FAMILIES] + [
    ("llama", {"tie_word_embeddings": True}),
    ("llama", {"seed": 1, "num_hidden_layers": 4}),
    ("gemma3", {"seed": 1}),
    ("mistral", {"sliding_window": 5, "softmax_type": "off-by-one"}),
    ("qwen2", {"softmax_type": "learnable"}),
]


@pytest.mark.parametrize("family", FAMILIES)
def test_no_id_of_a_text_is_beyond_the_vocabulary(tmp_path, family):
    """Whatever the tokenizer is that transformers takes for this family."""
    directory = make_tiny(family, tmp_path)
    tokenizer = load_tokenizer(directory)
    ids = tokenizer.encode("a<|endoftext|></s><unk><pad>")
    assert max(ids) < json.loads((directory / "config.json").read_text())["vocab_size"]


@pytest.mark.parametrize(("family", "shape"), SHAPES, ids=str)
def test_greedy_is_clear_and_varied(tmp_path, family, shape):
    ids, leads = _wander(load_model(make_tiny(family, tmp_path, **shape)))
    assert (leads > 1e-3).float().mean() > 0.999
    distinct = torch.tensor([len(set(sequence)) / LENGTH for sequence in ids.T.tolist()])
    assert distinct.mean() > 0.4
    assert (distinct > 0.2).float().mean() > 0.85, "few get stuck"
    assert len(ids.unique()) > 300


def test_the_same_arguments_give_the_same_bytes(tmp_path):
    first, second, other = (
        make_tiny_llama(tmp_path / name, seed=seed) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    for file in sorted(first.iterdir()):
        assert file.read_bytes() == (second / file.name).read_bytes(), file.name
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_an_unknown_family_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="family='gpt' is none of llama, mistral, qwen2"):
        make_tiny("gpt", tmp_path)


def test_the_command_knows_every_family():
    assert make_tiny_command.FAMILIES == FAMILIES


def test_a_vocabulary_without_room_for_bytes_is_refused(tmp_path):
    with pytest.raises(InvalidValue, match="vocab_size=256 leaves no room"):
        make_tiny_llama(tmp_path, vocab_size=256)
