"""What config.json and generation_config.json may say, and how it is understood."""

import json

import gguf
import numpy as np
import pytest
import torch

from perdure.api.errors import ModelLoadError
from perdure.models.config import config_from_directory, config_from_gguf
from perdure.models.gguf_file import GGUFFile

MINIMAL = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 100,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 8192,
}


@pytest.fixture
def read(tmp_path):
    def read(generation=None, **changes):
        (tmp_path / "config.json").write_text(json.dumps({**MINIMAL, **changes}))
        if generation is not None:
            (tmp_path / "generation_config.json").write_text(json.dumps(generation))
        return config_from_directory(tmp_path)

    return read


def test_defaults_of_what_files_leave_out(read):
    config = read()
    assert (config.num_kv_heads, config.head_dim) == (4, 16)
    assert (config.rms_norm_eps, config.rope_theta, config.rope_scaling) == (1e-6, 10000.0, None)
    assert not (config.tie_word_embeddings or config.attention_bias or config.mlp_bias)
    assert (config.bos_token_id, config.eos_token_ids, config.dtype) == (None, (), torch.float32)


def test_end_ids_are_the_union_of_both_files(read):
    assert read(eos_token_id=7).eos_token_ids == (7,)
    assert read({"eos_token_id": [9, 7, 8]}, eos_token_id=7).eos_token_ids == (7, 8, 9)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_both_names_of_the_stored_type(read, key):
    assert read(**{key: "bfloat16"}).dtype == torch.bfloat16


def test_both_layouts_of_rope(read):
    old = read(rope_theta=500000.0, rope_scaling=LLAMA3)
    new = read(rope_parameters={**LLAMA3, "rope_theta": 500000.0})
    assert old == new
    assert old.rope_theta == 500000.0
    assert old.rope_scaling == LLAMA3
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).rope_scaling == {"rope_type": "linear", "factor": 2.0}
    assert read(rope_parameters={"rope_type": "default", "rope_theta": 5.0}).rope_theta == 5.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "'hidden_size' is missing"),
        ({"hidden_size": "64"}, "hidden_size='64' is not a positive number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0 is not a positive number"),
        ({"num_key_value_heads": 3}, "4 heads cannot be shared by 3 key-value heads"),
        ({"head_dim": 15}, "of a head of size 15, 15 elements would turn"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"softmax_type": "off_by_one"}, "softmax_type='off_by_one' .*; supported: vanilla, off-by-one, learnable"),
        ({"softmax_type": ["vanilla"]}, r"softmax_type=\['vanilla'\] is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
        ({"eos_token_id": [1, "x"]}, r"eos_token_id=\[1, 'x'\] is not a token id"),
        ({"dtype": "float8"}, "dtype='float8' is not supported"),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope_type='yarn' is not supported; supported: default, linear, llama3",
        ),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "'factor' is missing"),
        ({"rope_scaling": [1]}, r"rope_scaling=\[1\] is no JSON object"),
        ({"architectures": ["Qwen9ForCausalLM"]}, "'Qwen9ForCausalLM' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, r"'\(none\)' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq' is not supported"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "format": "pack-quantized"}},
            "quantization_config.format='pack-quantized' is not supported; supported: 'float-quantized'",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(read, tmp_path, changes, message):
    with pytest.raises(ModelLoadError, match=message) as refusal:
        read(**changes)
    assert str(tmp_path / "config.json") in str(refusal.value)
    assert "\n" not in str(refusal.value)


def _windows(config):
    return [kind.window for kind in config.attention]


def test_windows(read):
    mistral = {"architectures": ["MistralForCausalLM"], "num_key_value_heads": 4}
    assert _windows(read(**mistral)) == [4096, 4096], "transformers' default, which files leave out"
    assert _windows(read(**mistral, sliding_window=None)) == [None, None]
    assert _windows(read(**mistral, sliding_window=7)) == [7, 7]
    qwen = {"architectures": ["Qwen3ForCausalLM"], "num_key_value_heads": 4, "sliding_window": 7}
    assert _windows(read(**qwen)) == [None, None], "off unless switched on"
    assert _windows(read(**qwen, use_sliding_window=True)) == [None, None], "from layer 28 on"
    assert _windows(read(**qwen, use_sliding_window=True, max_window_layers=1)) == [None, 7]
    assert _windows(read(**qwen, use_sliding_window=True, max_window_layers=0)) == [7, 7]
    listed = ["sliding_attention", "full_attention"]
    assert _windows(read(**qwen, use_sliding_window=True, layer_types=listed)) == [7, None]


def test_what_gemma3_files_leave_out(read):
    gemma3 = {"architectures": ["Gemma3ForCausalLM"], "num_hidden_layers": 7}
    config = read(**gemma3)
    assert (config.head_dim, config.rope_theta, config.local_theta) == (256, 1e6, 1e4)
    assert config.tie_word_embeddings and config.final_softcap is None
    assert _windows(config) == [4096] * 5 + [None, 4096]
    assert {(kind.scale, kind.softcap) for kind in config.attention} == {(1 / 16, None)}
    assert _windows(read(**gemma3, sliding_window_pattern=2)) == [4096, None] * 3 + [4096]
    capped = read(**gemma3, attn_logit_softcapping=50.0, final_logit_softcapping=30, query_pre_attn_scalar=64)
    assert capped.final_softcap == 30.0
    assert {(kind.scale, kind.softcap) for kind in capped.attention} == {(1 / 8, 50.0)}


def _gemma3_header(path, num_layers, **fields):
    writer = gguf.GGUFWriter(path, "gemma3")
    writer.add_block_count(num_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(96)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_key_length(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_sliding_window(8)
    for name, value in fields.items():
        getattr(writer, f"add_{name}")(value)
    writer.add_tensor("token_embd.weight", np.zeros((10, 96), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return config_from_gguf(GGUFFile(path))


def test_what_a_gguf_says_of_gemma3(tmp_path):
    config = _gemma3_header(tmp_path / "a", 7)
    assert _windows(config) == [8] * 5 + [None, 8]
    assert {kind.scale for kind in config.attention} == {32**-0.5}
    deep = _gemma3_header(tmp_path / "b", 62)
    assert {kind.scale for kind in deep.attention} == {48**-0.5}, "of the 27B model, by width and heads"
    said = _gemma3_header(
        tmp_path / "c",
        4,
        sliding_window_pattern=2,
        attention_scale=0.5,
        rope_freq_base_swa=100.0,
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )
    assert _windows(said) == [8, None, 8, None]
    assert {(kind.scale, kind.softcap) for kind in said.attention} == {(0.5, 50.0)}
    assert (said.local_theta, said.final_softcap) == (100.0, 30.0)


def test_a_part_of_each_head_may_turn(read):
    phi = {"architectures": ["Phi3ForCausalLM"]}
    assert read(**phi).rotary_dim == 16
    assert read(**phi, partial_rotary_factor=0.75).rotary_dim == 12
    assert read(**phi, rope_parameters={"partial_rotary_factor": 0.5, "rope_theta": 1e4}).rotary_dim == 8


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("Phi3", {"rope_scaling": {"type": "longrope", "short_factor": [1]}}, "rope_type='longrope' is not supported"),
        ("Phi3", {"partial_rotary_factor": 0.45}, "of a head of size 16, 7 elements would turn"),
        ("Phi3", {"partial_rotary_factor": 1.5}, "of a head of size 16, 24 elements would turn"),
        ("Qwen2", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5 is not supported"),
        ("Qwen2", {"layer_types": ["full_attention"]}, "layer_types=.* does not name sliding_attention or full_"),
        ("Qwen3", {"layer_types": ["linear_attention"] * 2}, "layer_types=.* for each of 2 layers"),
        ("Gemma3", {"hidden_activation": "gelu"}, "hidden_activation='gelu' is not supported; supported: 'gelu_pyt"),
        ("Gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("Gemma3", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping=-1.0 is not a positive number"),
    ],
)
def test_what_a_family_does_not_understand_is_refused_by_name(read, family, changes, message):
    with pytest.raises(ModelLoadError, match=message):
        read(architectures=[f"{family}ForCausalLM"], **changes)


def test_a_model_that_sees_images_is_refused(read):
    with pytest.raises(ModelLoadError, match="'Gemma3ForConditionalGeneration' is not supported"):
        read(architectures=["Gemma3ForConditionalGeneration"])


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json: (not valid JSON|holds no JSON object)"):
        config_from_directory(tmp_path)
