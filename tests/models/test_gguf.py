"""GGUF files: the reader against the gguf package's own, the loader against the directory a file was made from."""

import gguf
import pytest
import torch

from perdure.models.default import default_model_path
from perdure.models.gguf_file import SUPPORTED_TYPES, GGUFFile
from perdure.models.llama import parameters
from perdure.models.tiny import make_tiny_llama
from perdure.models.weights import load_model
from tests.models.helpers import change_weights, logits_in_chunks, write_gguf

IDS = list(range(3, 40))
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def _logits(path):
    return logits_in_chunks(load_model(path).model, IDS, [len(IDS)])


@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"tie": True},
        {"bias": True},
        {"num_kv_heads": 4},
        {"rope_scaling": LLAMA3},
        {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ],
    ids=str,
)
def test_fp32_file_equals_its_directory(tmp_path, shape):
    directory = make_tiny_llama(tmp_path, **shape)
    expected, actual = (
        load_model(directory).config,
        load_model(write_gguf(directory, tmp_path / "m.gguf", "F32")).config,
    )
    for field in ("hidden_size", "num_kv_heads", "head_dim", "vocab_size", "tie_word_embeddings", "attention_bias"):
        assert getattr(actual, field) == getattr(expected, field)
    assert (actual.bos_token_id, actual.eos_token_ids) == (expected.bos_token_id, expected.eos_token_ids)
    torch.testing.assert_close(_logits(tmp_path / "m.gguf"), _logits(directory), rtol=0, atol=1e-4)


@pytest.mark.parametrize("type_name", SUPPORTED_TYPES)
def test_every_type_is_decoded_as_the_package_does(tmp_path, type_name):
    directory = make_tiny_llama(tmp_path, hidden_size=256, intermediate_size=256, num_layers=1)
    path = write_gguf(directory, tmp_path / "m.gguf", type_name)
    file, reference = GGUFFile(path), gguf.GGUFReader(path)
    assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
    assert {tensor.type for tensor in file.tensors.values()} == {type_name, "F32"}
    for tensor in reference.tensors:
        expected = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
        num_rows = expected.shape[0]
        assert expected.isfinite().all() and len(expected.unique()) > 10
        assert torch.equal(file.rows(tensor.name, 0, num_rows).float(), expected)
        assert torch.equal(file.rows(tensor.name, 1, num_rows - 2).float(), expected[1 : num_rows - 2])


@pytest.mark.parametrize("type_name", ["Q5_1", "Q4_K", "Q6_K", "IQ4_NL"])
def test_a_model_of_blocks_equals_one_of_their_values(tmp_path, type_name):
    """All the way through the loader: joined parts, interleaved heads, pieces of a tensor."""
    made = make_tiny_llama(tmp_path / "made", hidden_size=256, intermediate_size=256, num_layers=1)
    path = write_gguf(made, tmp_path / "m.gguf", type_name)
    file = gguf.GGUFReader(path)
    blocks = {tensor.name: tensor for tensor in file.tensors}

    def decoded(part, tensor):
        stored = blocks[part.gguf]
        values = torch.from_numpy(gguf.quants.dequantize(stored.data, stored.tensor_type).copy())
        if part.rotary_heads:
            values = values.unflatten(0, (part.rotary_heads, -1, 2)).transpose(1, 2).flatten(0, 2)
        return values.contiguous()

    directory = change_weights(made, tmp_path / "decoded", decoded)
    assert torch.equal(_logits(path), _logits(directory))


@pytest.mark.parametrize(
    ("type_name", "error"),
    [("F16", 0.05), ("BF16", 0.5), ("Q8_0", 0.5), ("Q5_0", 5.0), ("Q5_1", 5.0), ("Q4_0", 8.0), ("Q4_1", 8.0)],
)
def test_quantised_models_stay_near_the_original(tmp_path, type_name, error):
    directory = make_tiny_llama(tmp_path, num_layers=1)
    path = write_gguf(directory, tmp_path / "m.gguf", type_name)
    assert (_logits(path) - _logits(directory)).abs().mean() < error


def test_metadata_equals_the_packages(smollm2_path):
    """Arrays of 49,152 are compared at their ends: the package takes seconds to spell them out."""
    file, reference = GGUFFile(smollm2_path), gguf.GGUFReader(smollm2_path)
    fields = {name: field for name, field in reference.fields.items() if not name.startswith("GGUF.")}
    assert list(file.metadata) == list(fields)
    for name, field in fields.items():
        value = file.metadata[name]
        if isinstance(value, list):
            assert len(value) == len(field.data)
            assert [value[0], value[-1]] == [field.contents(0), field.contents(len(value) - 1)]
        else:
            assert value == field.contents()


def test_default_model_is_the_installed_file(smollm2_path):
    assert default_model_path() == smollm2_path
    config = load_model(smollm2_path, load_format="dummy").config
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.vocab_size) == (30, 9, 3, 49152)
    assert config.eos_token_ids == (2,)
    names = [part.gguf for parts in parameters(config).values() for part in parts]
    assert sorted(names) == sorted(GGUFFile(smollm2_path).tensors)
