"""Loading: every layout of the same weights gives the same model, in the type asked for, within its memory."""

import json

import pytest
import torch

from perdure.api.errors import InvalidValue
from perdure.models import weights
from perdure.models.tiny import make_tiny_llama
from perdure.models.weights import load_model, resolve_dtype
from perdure.ops.choice import Choice
from tests.models.helpers import logits_in_chunks, run_python

IDS = list(range(3, 40))


def _logits(path, **options):
    return logits_in_chunks(load_model(path, **options).model, IDS, [len(IDS)])


def test_shards_equal_one_file(tmp_path):
    whole = make_tiny_llama(tmp_path / "whole")
    shards = make_tiny_llama(tmp_path / "shards", num_shards=3)
    assert not (shards / "model.safetensors").exists()
    assert len(list(shards.glob("*.safetensors"))) == 3
    assert torch.equal(_logits(shards), _logits(whole))


def test_bf16_files_are_computed_in_fp32_on_a_cpu(tmp_path):
    directory = make_tiny_llama(tmp_path, dtype="bfloat16")
    loaded = load_model(directory)
    assert loaded.config.dtype == torch.bfloat16
    assert loaded.dtype == torch.float32
    assert torch.equal(_logits(directory), _logits(directory, dtype="float32"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_types_are_computed_when_asked_for(tmp_path, dtype):
    directory = make_tiny_llama(tmp_path, num_layers=1)
    loaded = load_model(directory, dtype=dtype)
    assert loaded.dtype == getattr(torch, dtype)
    hidden = loaded.model.forward(
        torch.tensor(IDS), torch.arange(len(IDS)), lambda layer, qk, v, turn: turn(qk)[:, : -v.shape[1]]
    )
    assert hidden.dtype == loaded.dtype
    assert loaded.model.logits(hidden).dtype == loaded.dtype
    error = (_logits(directory, dtype=dtype) - _logits(directory)).abs().mean()
    assert error < (1.0 if dtype == "bfloat16" else 0.1)


def test_auto_takes_the_stored_type_elsewhere():
    assert resolve_dtype("auto", torch.bfloat16, torch.device("cuda")) == torch.bfloat16
    assert resolve_dtype("auto", torch.bfloat16, torch.device("cpu")) == torch.float32
    assert resolve_dtype("float16", torch.bfloat16, torch.device("cpu")) == torch.float16


def test_unknown_settings_are_refused(tmp_path):
    directory = make_tiny_llama(tmp_path)
    with pytest.raises(InvalidValue, match="dtype='fp8' is none of auto, float32"):
        load_model(directory, dtype="fp8")
    with pytest.raises(InvalidValue, match="load_format='pt' is none of auto, dummy"):
        load_model(directory, load_format="pt")


def test_dummy_weights_need_a_configuration_only_and_follow_the_seed(tmp_path):
    directory = make_tiny_llama(tmp_path, bias=True)
    (directory / "model.safetensors").unlink()
    first = _logits(directory, load_format="dummy", seed=1)
    assert torch.equal(first, _logits(directory, load_format="dummy", seed=1))
    assert not torch.allclose(first, _logits(directory, load_format="dummy", seed=2))
    assert first.std() > 0


def test_counts_of_parameters_and_bytes(tmp_path):
    tied = load_model(make_tiny_llama(tmp_path / "tied", tie=True))
    untied = load_model(make_tiny_llama(tmp_path / "untied"), dtype="bfloat16")
    assert untied.num_parameters - tied.num_parameters == 512 * 64, "a tied head counts once"
    assert tied.num_bytes == 4 * tied.num_parameters
    assert untied.num_bytes == 2 * untied.num_parameters


def test_a_tied_head_ignores_a_stored_one(tmp_path):
    directory = make_tiny_llama(tmp_path)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    assert load_model(directory).config.tie_word_embeddings


def test_sampling_defaults_are_reported_by_our_names(tmp_path):
    directory = make_tiny_llama(tmp_path)
    assert load_model(directory).sampling_defaults == {}
    suggested = {"temperature": 0.6, "top_p": 0.9, "top_k": None, "max_new_tokens": 99, "do_sample": True}
    (directory / "generation_config.json").write_text(json.dumps(suggested))
    assert load_model(directory).sampling_defaults == {"temperature": 0.6, "top_p": 0.9, "max_tokens": 99}


def test_each_shape_gets_the_product_that_was_chosen_for_it(tmp_path, monkeypatch):
    """A tied embedding among them. The model is the same to rounding, and a row its own in any chunk."""
    directory = make_tiny_llama(tmp_path, tie=True)
    native = load_model(directory, linear="native")
    assert native.kernels.name == "native" and native.products == {}, "a form that was asked for is not measured"
    chosen = Choice({(512, 64): (0.1, 0.1, 0.1), (64, 192): (0.1, 0.1, 0.1), (64, 64): (2.0, 2.0, 2.0)})
    monkeypatch.setattr(weights, "choose", lambda library, shapes: chosen)
    mixed = load_model(directory)
    assert {shape: words.split()[0] for shape, words in mixed.products.items()} == {
        "512 x 64": "packed",
        "64 x 192": "packed",
        "64 x 64": "native",
    }
    laid_out = set(mixed.weights._weights.products)
    assert laid_out == {"embedding.weight", "layers.0.down.weight", "layers.1.down.weight"}
    one, other = (logits_in_chunks(loaded.model, IDS, [len(IDS)]) for loaded in (native, mixed))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    assert torch.equal(logits_in_chunks(mixed.model, IDS, [7, 1, len(IDS) - 8]), other)


def test_weights_own_their_memory(tmp_path):
    """A model must outlive its files."""
    directory = make_tiny_llama(tmp_path)
    model = load_model(directory).model
    before = logits_in_chunks(model, IDS, [len(IDS)])
    for file in directory.iterdir():
        file.write_bytes(b"")
    assert torch.equal(logits_in_chunks(model, IDS, [len(IDS)]), before)


def test_peak_memory_is_the_weights_and_little_more(smollm2_path):
    script = """if True:
        import resource, sys
        from perdure.models.weights import load_model
        peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        before = peak()
        loaded = load_model(sys.argv[1])
        print((peak() - before - loaded.num_bytes) / 1e6)
    """
    assert float(run_python(script, smollm2_path)) < 150
