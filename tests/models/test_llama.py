"""Llama against transformers on random weights, against itself in other pieces, and on real weights."""

import json

import pytest
import torch

from perdure.engine.tokenizer import load_tokenizer
from perdure.models.tiny import make_tiny_llama
from perdure.models.weights import load_model
from tests.models.helpers import convert_stories260k, greedy, logits_in_chunks

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SHAPES = {
    "llama2": {"num_kv_heads": 4},
    "llama3": {"rope_scaling": LLAMA3},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    "tied": {"tie": True},
    "biases": {"bias": True},
    "bf16": {"dtype": "bfloat16"},
    "wide head": {"num_heads": 2, "num_kv_heads": 1},
}


def _ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 512, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(tmp_path, shape):
    from transformers import AutoModelForCausalLM

    directory = make_tiny_llama(tmp_path, **SHAPES[shape])
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64)  # in float32 it errs as much as ours
    ids = _ids(100)
    with torch.inference_mode():
        expected = theirs(torch.tensor([ids])).logits[0].float()
    logits = logits_in_chunks(load_model(directory).model, ids, [100])
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)
    assert expected.std() > 4, "logits of this size make the tolerance mean something"


@pytest.mark.parametrize("shape", SHAPES)
def test_pieces_give_what_the_whole_gives(tmp_path, shape):
    model = load_model(make_tiny_llama(tmp_path, **SHAPES[shape])).model
    ids = _ids(60)
    whole = logits_in_chunks(model, ids, [60])
    torch.testing.assert_close(logits_in_chunks(model, ids, [1] * 60), whole, rtol=0, atol=1e-4)
    torch.testing.assert_close(logits_in_chunks(model, ids, [7, 30, 1, 22]), whole, rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", ["packed", "plain", "reference", "invariant"])
def test_other_forms_of_linear_layer_give_the_same(tmp_path, form):
    directory = make_tiny_llama(tmp_path)
    ids = _ids(50)
    expected = logits_in_chunks(load_model(directory).model, ids, [50])
    actual = logits_in_chunks(load_model(directory, linear=form).model, ids, [50])
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-4)


def test_a_row_has_the_same_bits_in_other_company(tmp_path):
    """All but attention, which is the runner's: here every row attends to itself alone."""
    model = load_model(make_tiny_llama(tmp_path)).model
    ids, positions = torch.tensor(_ids(40)), torch.randint(0, 256, (40,), generator=torch.Generator().manual_seed(1))

    def attend(layer, qk, v, turn):
        return v.repeat_interleave(qk.shape[1] // v.shape[1] - 1, dim=1)

    with torch.inference_mode():
        whole = model.logits(model.forward(ids, positions, attend))
        for start, stop in ((0, 1), (3, 4), (5, 14), (8, 40)):
            part = model.logits(model.forward(ids[start:stop], positions[start:stop], attend))
            assert torch.equal(part, whole[start:stop])


def test_smollm2_continues_as_recorded(smollm2_path, golden):
    case = golden["gguf_fp32"][0]
    assert greedy(load_model(smollm2_path, dtype="float32").model, case["prompt_ids"], 32) == case["generated_ids"]


def test_stories260k_tells_of_lily(data_dir, tmp_path):
    folder = data_dir / "stories260K"
    directory = convert_stories260k(folder / "stories260K.bin", folder / "tok512.bin", tmp_path)
    model, tokenizer = load_model(directory), load_tokenizer(directory)
    assert model.num_parameters == 260_032
    text = tokenizer.decode(greedy(model.model, [tokenizer.bos_token_id], 60))
    assert text.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the park."
    )
    assert "red ball" in text


@pytest.fixture(scope="module")
def golden(request):
    return json.loads((request.config.rootpath / "tests" / "data" / "smollm2_golden.json").read_text())
