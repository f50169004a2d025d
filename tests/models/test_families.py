"""Every family against transformers' own model on the same small random weights, and each layout of its files.

- Weights come from `make_tiny`, the last norm made smaller so that logits of fp32 agree to 1e-4.
- Ids are compared only where the best logit leads by more than 1e-3 (`clear_best`).
"""

import dataclasses
import functools
import sys

import gguf
import pytest
import torch
from safetensors.torch import load_file

from perdure.models.tiny import FAMILIES, make_tiny
from perdure.models.weights import load_model
from tests.models.helpers import DenseAttend, change_weights, clear_best, greedy, logits_in_chunks, write_gguf

LOCAL, GLOBAL = "sliding_attention", "full_attention"
CASES = {family: (family, {}) for family in FAMILIES} | {
    "mistral, no window": ("mistral", {"sliding_window": None, "head_dim": 24}),
    "qwen2, upper windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1}),
    "qwen2, listed windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 20, "layer_types": [LOCAL, GLOBAL], "tie_word_embeddings": True},
    ),
    "qwen3, biases": ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "phi3, whole heads, window": ("phi3", {"partial_rotary_factor": 1.0, "sliding_window": 20}),
    "olmo2, biases": ("olmo2", {"attention_bias": True, "num_key_value_heads": 4}),
    "gemma3, scaled positions": (
        "gemma3",
        {
            "num_hidden_layers": 3,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "layer_types": [LOCAL, GLOBAL, LOCAL],
            "query_pre_attn_scalar": 20,
        },
    ),
    "mistral, off-by-one": ("mistral", {"sliding_window": 5, "softmax_type": "off-by-one"}),
    "qwen2, sinks": (
        "qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "layer_types": [LOCAL, GLOBAL],
            "softmax_type": "learnable",
        },
    ),
    "qwen3, sinks": ("qwen3", {"softmax_type": "learnable"}),
    "phi3, sinks": ("phi3", {"softmax_type": "learnable"}),
    "olmo2, sinks": ("olmo2", {"softmax_type": "learnable"}),
    "gemma3, sinks": ("gemma3", {"softmax_type": "learnable"}),
    "gemma3, soft caps": ("gemma3", {"final_logit_softcapping": 12.0, "attn_logit_softcapping": 3.0}),
}
LOGIT_SCALE = dict.fromkeys(FAMILIES, 0.25) | {"gemma3": 0.5}
IDS = torch.randint(0, 512, (100,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPT = IDS[60:80]


def _directory(folder, family, config):
    """A tiny model with smaller logits."""

    def change(part, tensor):
        if part.hf != "model.norm.weight":
            return tensor
        return (tensor + part.gguf_added) * LOGIT_SCALE[family] - part.gguf_added

    return change_weights(make_tiny(family, folder / "made", **config), folder / "model", change)


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """(directory, transformers' model, ours)"""
    from transformers import AutoModelForCausalLM
    from transformers.models.gemma3 import modeling_gemma3

    family, config = CASES[request.param]
    directory = _directory(tmp_path_factory.mktemp("case"), family, config)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    with pytest.MonkeyPatch.context() as patch:
        if softcap := config.get("attn_logit_softcapping"):
            # transformers' Gemma 3 reads this cap and forgets it; its function of attention knows what to do with it.
            capped = functools.partial(modeling_gemma3.eager_attention_forward, softcap=softcap)
            patch.setattr(modeling_gemma3, "eager_attention_forward", capped)
        if kind := config.get("softmax_type"):
            _give_sinks(theirs, kind, load_file(directory / "model.safetensors"), patch)
        yield directory, theirs, load_model(directory).model


def _give_sinks(model, kind, stored, patch):
    """transformers has sinks in gpt-oss, whose function of attention asks a layer for them."""
    for index, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        if kind == "learnable":
            attention.sinks = torch.nn.Parameter(stored[f"model.layers.{index}.self_attn.sinks"])
        else:
            attention.sinks = torch.zeros(model.config.num_attention_heads)
    from transformers.models.gpt_oss import modeling_gpt_oss

    module = sys.modules[type(model).__module__]
    patch.setattr(module, "eager_attention_forward", modeling_gpt_oss.eager_attention_forward)


@torch.inference_mode()
def _their_logits(model, ids):
    return model(torch.tensor([ids])).logits[0]


def _chunks(size):
    return [min(size, len(IDS) - start) for start in range(0, len(IDS), size)]


@pytest.mark.parametrize("size", [100, 32, 7, 1], ids=["prefill", "chunks of 32", "chunks of 7", "decode"])
def test_logits_equal_transformers(case, size):
    _, theirs, ours = case
    expected = _their_logits(theirs, IDS)
    torch.testing.assert_close(logits_in_chunks(ours, IDS, _chunks(size)), expected, rtol=0, atol=1e-4)
    assert expected.std() > 1.9, "logits of this size make the tolerance mean something"


def test_greedy_ids_equal_transformers(case):
    _, theirs, ours = case
    history = PROMPT
    for _ in range(64):
        history = [*history, clear_best(_their_logits(theirs, history)[-1])]
    assert greedy(ours, PROMPT, 64) == history[len(PROMPT) :]


def test_what_transformers_saves_is_the_same_model(case, tmp_path):
    """Its newer config.json names positions and layers in another way."""
    _, theirs, ours = case
    theirs.save_pretrained(tmp_path)
    saved = load_model(tmp_path)
    ends = {"bos_token_id": None, "eos_token_ids": ()}
    assert dataclasses.replace(saved.config, **ends) == dataclasses.replace(ours.config, **ends)
    assert torch.equal(logits_in_chunks(saved.model, IDS, [100]), logits_in_chunks(ours, IDS, [100]))


STORED = {name: CASES[name] for name in (*FAMILIES, "phi3, whole heads, window", "qwen3, biases")}


@pytest.mark.parametrize("type_name", ["F32", "Q8_0"])
@pytest.mark.parametrize("name", STORED)
def test_a_gguf_gives_the_ids_of_its_directory(tmp_path, name, type_name):
    family, config = STORED[name]
    made = make_tiny(family, tmp_path / "made", **config)
    path = write_gguf(made, tmp_path / "m.gguf", type_name)
    kind = gguf.GGMLQuantizationType[type_name]

    def rounded(part, tensor):
        if tensor.ndim == 1:
            return tensor
        return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(tensor.numpy(), kind), kind).copy())

    directory = change_weights(made, tmp_path / "rounded", rounded)
    expected, actual = load_model(directory).model, load_model(path).model
    assert actual.config.attention == expected.config.attention
    assert greedy(actual, PROMPT, 64) == greedy(expected, PROMPT, 64)


@pytest.mark.parametrize("case", CASES)
def test_rows_that_are_wanted_are_what_they_are_among_all(tmp_path, case):
    """The last layer computes of others what those wanted see of them."""
    family, changes = CASES[case]
    model = load_model(make_tiny(family, tmp_path, **changes)).model
    ids, positions = torch.arange(3, 43), torch.arange(40)
    wanted = torch.tensor([7, 8, 39])
    with torch.inference_mode():
        whole = model.forward(ids, positions, DenseAttend(model.config.attention))
        few = model.forward(ids, positions, DenseAttend(model.config.attention), wanted)
    assert torch.equal(few, whole[wanted])
