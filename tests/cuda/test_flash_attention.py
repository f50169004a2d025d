"""FlashAttention-4's kernels against the reference and through the engine, and a clear word where they do not serve."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch

from perdure import LLM, InvalidValue, SamplingParams
from perdure.models.tiny import make_tiny
from perdure.ops.attention import AttentionRows, CacheShape, LayerAttention, flash_attention
from perdure.ops.attention.paged import PagedRows, make_paged
from perdure.ops.attention.reference import ReferenceAttention
from tests.cuda.helpers import Random, check_close, check_poisoned
from tests.engine.helpers import prompt
from tests.witness import witness

installed = pytest.mark.skipif(not flash_attention.is_installed(), reason="flash-attn-4 is not installed")
SHAPE = CacheShape(8, 2, 128, 16, 128)
LENGTHS, STARTS = np.array([1, 300, 1, 40, 1]), np.array([0, 0, 600, 511, 255])


@installed
def test_back_fa4(gpu, tmp_path):
    """Whole requests of 128 channels in heads of 128, prompts in chunks, as with kernels of our own."""
    sizes = {"hidden_size": 128, "head_dim": 128, "max_position_embeddings": 2048}
    model = make_tiny("llama", tmp_path / "llama", seed=1, dtype="float16", **sizes)  # best ids lead by 0.2 at least
    prompts = [prompt(length) for length in (5, 300, 700)]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    outputs, queries = {}, []
    for backend in ("triton", "fa4"):
        config: dict[str, Any] = {"page_size": 128, "num_pages": 64, "max_num_batched_tokens": 256}
        with LLM(str(model), device="cuda", attention_backend=backend, **config) as llm:
            if backend == "fa4":
                form = next(iter(llm._engine.resolved.runner._forms.values()))
                form._attend = _counted(form._attend, queries)
                assert llm.describe()["cuda_graphs"].startswith("none")
                hidden = llm._engine.resolved.loaded.config.hidden_size
            outputs[backend] = llm.generate(prompts, params)
    for ours, theirs in zip(outputs["triton"], outputs["fa4"], strict=True):
        assert theirs.error is None and ours.outputs[0].token_ids == theirs.outputs[0].token_ids
        assert (ours.prompt_token_ids, ours.outputs[0].text) == (theirs.prompt_token_ids, theirs.outputs[0].text)
    ran = {"prefill": sum(most > 1 for most in queries), "decode": sum(most == 1 for most in queries)}
    assert all(ran.values())
    witness("back-fa4", hidden=hidden, head_dim=128, **ran)


@installed
def test_T58_poisoned_pages(gpu, half):
    check_poisoned(half, "fa4")


@installed
@pytest.mark.parametrize("page_size", [16, 128, 256])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "kind"),
    [
        (torch.float16, 128, LayerAttention(0.125)),
        (torch.bfloat16, 128, LayerAttention(0.125, window=100, softcap=5.0)),
        (torch.bfloat16, 64, LayerAttention(0.125, window=100)),
        (torch.bfloat16, 256, LayerAttention(0.06)),
    ],
    ids=str,
)
def test_against_the_reference(gpu, dtype, head_dim, kind, page_size):
    """Rows of one query between prompts with a past, over shuffled pages; another step with the same form after it."""
    random, width = Random(gpu), -(-640 // page_size)
    shape = CacheShape(8, 2, head_dim, 5 * width + 1, page_size)
    form = make_paged("fa4", shape, kind, dtype, gpu)
    for order in ([0, 1, 2, 3, 4], [4, 2]):
        lengths, starts = LENGTHS[order], STARTS[order]
        rows, q, cache, table = step_of(random, shape, dtype, lengths, starts, width)
        none = torch.empty(0, dtype=torch.int32, device=gpu)
        form.plan(rows)
        found = form.run(q, cache, PagedRows(table.to(gpu), none, none, none, none.view(0, 4)))[:-3]
        check_close(found, ReferenceAttention(shape, kind).plan(rows).run(q, cache)[:-3], dtype)


def step_of(random, shape, dtype, lengths, starts, width):
    """Rows of these lengths from these positions; queries with padding at the end; pages."""
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    table = random.order(shape.num_pages)[: len(lengths) * width].view(-1, width)
    cache = random(2, shape.num_kv_heads, shape.num_pages, shape.page_size, shape.head_dim, dtype=dtype)
    q = random(int(offsets[-1]) + 3, shape.num_heads, shape.head_dim, dtype=dtype)
    return AttentionRows(offsets, starts, table.numpy()), q, cache, table


def test_what_it_is_asked():
    """Each step's rows as its function takes them, with a plain form of that in its place."""
    shape, kind = CacheShape(4, 2, 8, 80, 16), LayerAttention(0.3, window=50, softcap=4.0)

    class Stand(flash_attention.FlashAttentionPaged):
        def __init__(self):
            self._page_size, self._device, self._parts, self._attend = 16, torch.device("cpu"), [], attend

    def attend(q, keys, values, *, cu_seqlens_q, max_seqlen_q, seqused_k, page_table):
        assert {x.dtype for x in (cu_seqlens_q, seqused_k, page_table)} == {torch.int32}
        lengths = np.diff(cu_seqlens_q.numpy())
        assert lengths.max() == max_seqlen_q and keys.shape == (80, 16, 2, 8)
        rows = AttentionRows(cu_seqlens_q.numpy(), seqused_k.numpy() - lengths, page_table.numpy())
        cache = torch.stack((keys, values)).permute(0, 3, 1, 2, 4).contiguous()
        return ReferenceAttention(shape, kind).plan(rows).run(q, cache), None

    form = Stand()
    rows, q, cache, _ = step_of(Random(torch.device("cpu")), shape, torch.float32, LENGTHS // 3 + 1, STARTS // 3, 16)
    form.plan(rows)
    right = ReferenceAttention(shape, kind).plan(rows).run(q, cache)
    check_close(form.run(q, cache, None)[:-3], right[:-3], torch.float32)
    assert len(form._parts) == 2


@installed
def test_it_compiles_for_hopper():
    """Where there is no GPU, too: tensors without memory, and no launch."""
    code = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from perdure.ops.attention import CacheShape, LayerAttention
from perdure.ops.attention.flash_attention import FlashAttentionPaged, _Part
for kind in (LayerAttention(0.1), LayerAttention(0.1, window=100, softcap=5.0)):
    for page_size in (16, 128):
        form = FlashAttentionPaged(CacheShape(8, 2, 128, 40, page_size), kind, torch.device("cuda"))
        with FakeTensorMode():
            def ints(*shape, dtype=torch.int32):
                return torch.empty(shape, dtype=dtype, device="cuda")
            form._parts = [_Part(ints(90, dtype=torch.int64), ints(4), 60, ints(3), ints(3, 7)),
                           _Part(ints(5, dtype=torch.int64), ints(6), 1, ints(5), ints(5, 7))]
            q = torch.empty(100, 8, 128, dtype=torch.bfloat16, device="cuda")
            cache = torch.empty(2, 2, 40, page_size, 128, dtype=q.dtype, device="cuda")
            assert form.run(q, cache, None).shape == q.shape
"""
    of_a_gpu = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
    environment = os.environ | of_a_gpu | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.mark.parametrize(
    ("shape", "sink", "dtype", "kv_dtype", "capability", "reason"),
    [
        (SHAPE, None, torch.float32, None, 9, "it computes in float16 and bfloat16, not in float32"),
        (CacheShape(8, 2, 80, 16, 256), None, torch.float16, None, 9, "it has heads of 64, 128, 256, not of 80"),
        (
            SHAPE,
            None,
            torch.bfloat16,
            torch.float8_e4m3fn,
            9,
            "it reads pages in the model's type, not in float8_e4m3fn",
        ),
        (SHAPE, "off-by-one", torch.bfloat16, None, 9, "it is run without sinks"),
        (SHAPE, None, torch.bfloat16, None, 8, "it needs a GPU of compute capability 9, not of 8"),
    ],
)
def test_refused_where_it_does_not_serve(monkeypatch, shape, sink, dtype, kv_dtype, capability, reason):
    monkeypatch.setattr("perdure.ops.attention.flash_attention.is_installed", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (capability, 0))
    with pytest.raises(ValueError, match=f"attention_backend='fa4' does not serve here: {reason}"):
        make_paged("fa4", shape, LayerAttention(0.1, sink=sink), dtype, torch.device("cuda"), kv_dtype=kv_dtype)
    monkeypatch.setattr("perdure.ops.attention.flash_attention.is_installed", lambda: False)
    with pytest.raises(ValueError, match="the package flash-attn-4 is not installed"):
        make_paged("fa4", shape, LayerAttention(0.1), dtype, torch.device("cuda"))


def test_the_engine_says_so_too(gpu, tmp_path):
    model = make_tiny("llama", tmp_path / "llama", dtype="float32", head_dim=64)
    with pytest.raises(InvalidValue, match="attention_backend='fa4' is not batch invariant on device='cuda'"):
        LLM(str(model), device="cuda", attention_backend="fa4", batch_invariant=True)
    with pytest.raises(InvalidValue, match="kv_cache_dtype='fp8' does not go with attention_backend='fa4'"):
        LLM(str(model), device="cuda", attention_backend="fa4", kv_cache_dtype="fp8")
    with pytest.raises(InvalidValue, match="attention_backend='fa4' does not serve here"):
        LLM(str(model), device="cuda", attention_backend="fa4")


def _counted(attend: Any, queries: list[int]) -> Any:
    """Notes how many queries the longest row of each call has."""

    def counted(*arguments: Any, **named: Any) -> Any:
        queries.append(named["max_seqlen_q"])
        return attend(*arguments, **named)

    return counted
