"""FlashInfer's kernels against the reference, and through the engine; and a clear word where they do not serve."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest
import torch

from perdure import LLM, InvalidValue, SamplingParams
from perdure.models.tiny import make_tiny
from perdure.ops.attention import AttentionRows, CacheShape, LayerAttention
from perdure.ops.attention.paged import PagedRows, make_paged
from perdure.ops.attention.reference import ReferenceAttention
from tests.cuda.helpers import Random, check_close, check_poisoned
from tests.engine.helpers import prompt
from tests.witness import witness

installed = pytest.mark.skipif(find_spec("flashinfer") is None, reason="flashinfer-python is not installed")
SHAPE = CacheShape(8, 2, 64, 16, 256)


# What is compiled for minutes comes first, so that workers begin with it.


@installed
def test_back_fa2(gpu, tmp_path):
    """Whole requests over pages of 256, prompts in chunks, as with kernels of our own."""
    model = make_tiny("llama", tmp_path / "llama", dtype="float16", head_dim=64, max_position_embeddings=2048)
    prompts = [prompt(length) for length in (5, 300, 700)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    outputs = {}
    for backend in ("triton", "flashinfer"):
        config: dict[str, Any] = {"page_size": 256, "num_pages": 32, "max_num_batched_tokens": 256}
        with LLM(str(model), device="cuda", attention_backend=backend, **config) as llm:
            form = next(iter(llm._engine.resolved.runner._forms.values()))
            if backend == "flashinfer":
                ran = {"prefill": _counted(form._prompts), "decode": _counted(form._decode)}
                assert llm.describe()["cuda_graphs"].startswith("none")
            outputs[backend] = llm.generate(prompts, params)
    for ours, theirs in zip(outputs["triton"], outputs["flashinfer"], strict=True):
        assert theirs.error is None and ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert (ours.prompt_token_ids, ours.outputs[0].text) == (theirs.prompt_token_ids, theirs.outputs[0].text)
    witness("back-fa2", page_size=256, **{name: len(calls) for name, calls in ran.items()})


@installed
def test_T58_poisoned_pages(gpu, half):
    check_poisoned(half, "flashinfer")


@installed
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [(torch.float16, LayerAttention(0.125)), (torch.bfloat16, LayerAttention(0.125, window=100, softcap=5.0))],
    ids=["plain", "window and cap"],
)
def test_against_the_reference(gpu, dtype, kind):
    """Rows of one query between prompts with a past, over shuffled pages of 256. Each type with a kind is compiled for
    minutes: the first is that of `test_back_fa2`."""
    random, lengths, starts = Random(gpu), np.array([1, 300, 1, 40, 1]), np.array([0, 0, 600, 511, 255])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = random.order(15).view(5, 3)
    cache = random(2, 2, 16, 256, 64, dtype=dtype)
    q = random(int(offsets[-1]) + 3, 8, 64, dtype=dtype)  # padding at the end
    rows = AttentionRows(offsets, starts, table.numpy())
    form = make_paged("flashinfer", SHAPE, kind, dtype, gpu)
    none = torch.empty(0, dtype=torch.int32, device=gpu)
    form.plan(rows)
    found = form.run(q, cache, PagedRows(table.to(gpu), none, none, none, none.view(0, 4)))[:-3]
    check_close(found, ReferenceAttention(SHAPE, kind).plan(rows).run(q, cache)[:-3], dtype)


@pytest.mark.parametrize(
    ("shape", "sink", "dtype", "kv_dtype", "reason"),
    [
        (SHAPE, None, torch.float32, None, "it computes in float16 and bfloat16, not in float32"),
        (CacheShape(8, 2, 80, 16, 256), None, torch.float16, None, "it has heads of 64, 128, 256, not of 80"),
        (SHAPE, None, torch.bfloat16, torch.float8_e4m3fn, "it reads pages in the model's type, not in float8_e4m3fn"),
        (SHAPE, "off-by-one", torch.bfloat16, None, "it is run without sinks"),
    ],
)
def test_refused_where_it_does_not_serve(monkeypatch, shape, sink, dtype, kv_dtype, reason):
    monkeypatch.setattr("perdure.ops.attention.flashinfer.find_spec", lambda name: object())
    with pytest.raises(ValueError, match=f"attention_backend='flashinfer' does not serve here: {reason}"):
        make_paged("flashinfer", shape, LayerAttention(0.1, sink=sink), dtype, torch.device("cuda"), kv_dtype=kv_dtype)
    monkeypatch.setattr("perdure.ops.attention.flashinfer.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="the package flashinfer-python is not installed"):
        make_paged("flashinfer", shape, LayerAttention(0.1), dtype, torch.device("cuda"))


def test_the_engine_says_so_too(gpu, tmp_path):
    model = make_tiny("llama", tmp_path / "llama", dtype="float32", head_dim=64)
    with pytest.raises(InvalidValue, match="attention_backend='flashinfer' is not batch invariant on device='cuda'"):
        LLM(str(model), device="cuda", attention_backend="flashinfer", batch_invariant=True)
    with pytest.raises(InvalidValue, match="attention_backend='flashinfer' does not serve here"):
        LLM(str(model), device="cuda", attention_backend="flashinfer")


def _counted(wrapper: Any) -> list[None]:
    """Grows with each of its runs."""
    calls, run = [], wrapper.run

    def counted(*arguments: Any) -> Any:
        calls.append(None)
        return run(*arguments)

    wrapper.run = counted
    return calls
