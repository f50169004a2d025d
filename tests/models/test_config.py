"""What config.json and generation_config.json may say, and how it is understood."""

import json

import pytest
import torch

from perdure.api.errors import ModelLoadError
from perdure.models.config import config_from_directory

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
        ({"head_dim": 15}, "head size 15 is odd"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; supported: 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes' is not true or false"),
        ({"eos_token_id": [1, "x"]}, r"eos_token_id=\[1, 'x'\] is not a token id"),
        ({"dtype": "float8"}, "dtype='float8' is not supported"),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            "rope_type='yarn' is not supported; supported: default, linear, llama3",
        ),
        ({"rope_scaling": {**LLAMA3, "factor": None}}, "'factor' is missing"),
        ({"rope_scaling": [1]}, "rope parameters are no JSON object"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "'Qwen3ForCausalLM' is not supported; supported: LlamaForCausalLM"),
        ({"architectures": None}, r"'\(none\)' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization 'awq' is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq' is not supported"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(read, tmp_path, changes, message):
    with pytest.raises(ModelLoadError, match=message) as refusal:
        read(**changes)
    assert str(tmp_path / "config.json") in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_a_file_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelLoadError, match=r"config\.json: (not valid JSON|holds no JSON object)"):
        config_from_directory(tmp_path)
