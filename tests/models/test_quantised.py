"""Weights that stay in a GGUF's blocks: the bits of the expanded model, in less memory, and never silently something
else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from perdure.api.errors import InvalidValue
from perdure.models.base import Part
from perdure.models.gguf_file import GGUFFile
from perdure.models.tiny import FAMILIES, make_tiny
from perdure.models.weights import load_model
from perdure.ops.native import library, why_not
from tests.models.helpers import logits_in_chunks, run_python, write_gguf
from tests.witness import witness

WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}  # whole blocks of the K-quants
CONFIG = dict.fromkeys(FAMILIES, WIDE) | {
    "qwen3": {**WIDE, "head_dim": 64},
    "gemma3": {
        **WIDE,
        "head_dim": 64,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}
IDS = torch.randint(0, 512, (50,), generator=torch.Generator().manual_seed(0)).tolist()


def mixed(part: Part) -> str:
    """Parts of one product in several types, as Q4_K_M has them, and floats of all kinds."""
    kinds = {"attn_q": "Q4_K", "attn_k": "Q5_0", "attn_v": "Q6_K", "ffn_gate": "IQ4_XS", "ffn_up": "F16"}
    kinds |= {"ffn_down": "Q3_K", "attn_output": "BF16", "token_embd": "Q8_0", "output.": "F32"}
    return next((kind for name, kind in kinds.items() if name in part.gguf), "Q2_K")


STORED: dict[str, str | Callable[[Part], str]] = {"Q8_0": "Q8_0", "Q4_K": "Q4_K", "mixed": mixed}


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    assert library() is not None, f"the tests need a C compiler: {why_not()}"
    return make_tiny(request.param, tmp_path_factory.mktemp("made"), **CONFIG[request.param])


@pytest.mark.parametrize("stored", STORED)
def test_blocks_in_memory_give_the_bits_of_the_expanded_model(directory: Path, tmp_path: Path, stored: str) -> None:
    path = write_gguf(directory, tmp_path / "m.gguf", STORED[stored])
    types = {tensor.type for tensor in GGUFFile(path).tensors.values()} - {"F32"}
    expanded, kept = load_model(path, linear="native"), load_model(path, quantization="gguf")
    assert (expanded.quantization, kept.quantization) == (None, "gguf")
    assert kept.num_parameters == expanded.num_parameters
    whole = logits_in_chunks(expanded.model, IDS, [50])
    assert whole.isfinite().all() and whole.std() > 0.01
    for chunks in ([50], [7, 32, 11], [1] * 5 + [45]):
        assert torch.equal(logits_in_chunks(kept.model, IDS, chunks), whole), f"chunks of {chunks}"
    saved = expanded.num_bytes / kept.num_bytes
    assert saved > {"Q8_0": 3.5, "Q4_K": 5.5, "mixed": 2.0}[stored]
    witness("quantised-bits", types=" ".join(sorted(types)), times_smaller=round(saved, 2))


PEAK = """if True:
    import json, pathlib, re, resource, sys
    from perdure.models.weights import load_model
    def peak():
        status = pathlib.Path("/proc/self/status")
        if status.exists():  # Linux: ru_maxrss begins with the peak of the process that started this one
            return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1]) * 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    before = peak()
    loaded = load_model(sys.argv[1], quantization=sys.argv[2] or None)
    print(json.dumps([peak() - before, loaded.num_bytes]))
"""


def test_the_process_is_smaller_by_what_the_blocks_save(smollm2_path: Path) -> None:
    """SmolLM2 loaded in a process each: what the weights count, and what the process took at most."""
    peak, num_bytes = json.loads(run_python(PEAK, smollm2_path, ""))
    kept_peak, kept_bytes = json.loads(run_python(PEAK, smollm2_path, "gguf"))
    file_bytes = smollm2_path.stat().st_size
    assert kept_bytes < 1.6 * file_bytes < num_bytes / 2
    assert kept_peak < kept_bytes + 150_000_000
    assert peak - kept_peak > 0.8 * (num_bytes - kept_bytes)
    witness("quantised-memory", peak=peak, kept_peak=kept_peak, num_bytes=num_bytes, kept_bytes=kept_bytes)


def test_what_has_no_blocks_to_keep_is_refused(tmp_path: Path) -> None:
    made = make_tiny("llama", tmp_path / "made")
    with pytest.raises(InvalidValue, match=r"quantization='gguf' keeps the blocks of a GGUF file; .*made is loaded"):
        load_model(made, quantization="gguf")
    path = write_gguf(made, tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(InvalidValue, match=r"m.gguf is loaded as none"):
        load_model(path, quantization="gguf", load_format="dummy")
    with pytest.raises(InvalidValue, match="quantization='awq' is none of gguf, fp8"):
        load_model(path, quantization="awq")


@pytest.mark.parametrize("options", [{"linear": "packed"}, {"linear": "reference"}, {"dtype": "bfloat16"}], ids=str)
def test_only_compiled_kernels_in_float32_keep_blocks(tmp_path: Path, options: dict[str, str]) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "made"), tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(InvalidValue, match="needs compiled kernels in float32: other products or another type"):
        load_model(path, quantization="gguf", **options)


def test_without_a_compiler_blocks_are_refused_and_the_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(make_tiny("llama", tmp_path / "made"), tmp_path / "m.gguf", "Q8_0")
    monkeypatch.setenv("PERDURE_NATIVE", "0")
    script = """if True:
        import sys
        from perdure import InvalidValue, LLM
        try:
            LLM(sys.argv[1], quantization="gguf", num_pages=8)
        except InvalidValue as error:
            print(error)
    """
    assert run_python(script, path) == "quantization='gguf' needs compiled kernels in float32: PERDURE_NATIVE=0\n"
