"""parity: logits of small models in float32 and bfloat16 against transformers on the same device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gpu_sections.report import Found, Setup, close, workload
from perdure import LLM, SamplingParams
from perdure.models.tiny import make_tiny

FAMILIES = ("llama", "qwen3", "gemma3")
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 1024, "max_position_embeddings": 1024,
}  # fmt: skip
NUM_IDS = 300


def parity(setup: Setup) -> Found:
    """Relative errors of log-probabilities against transformers in float32: ours, held to theirs in the same type."""
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for family in FAMILIES:
        model = make_tiny(family, setup.folder / family, **SIZES)
        ids = torch.randint(0, SIZES["vocab_size"], (NUM_IDS,), generator=generator)
        right = _theirs(model, ids, torch.float32)
        for dtype in ("float32", "bfloat16"):
            ours, theirs = _ours(model, ids, dtype), _theirs(model, ids, getattr(torch, dtype))
            found[f"parity {family} {dtype}"] = workload(
                _error(ours, right),
                "relative error",
                gate=1e-5 if dtype == "float32" else _error(theirs, right),
                less_is_better=True,
                argmax_equal=int((ours.argmax(1) == right.argmax(1)).sum()),
                argmax_equal_of_theirs=int((theirs.argmax(1) == right.argmax(1)).sum()),
                num_positions=NUM_IDS - 1,
            )
    return {"workloads": found}


def _error(found: torch.Tensor, right: torch.Tensor) -> float:
    return float((found - right).norm() / right.norm())


def _theirs(model: Path, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Scores [N - 1, V] of every id at every position but the last."""
    from transformers import AutoModelForCausalLM

    net = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).cuda().eval()
    with torch.inference_mode():
        return net(ids[None].cuda()).logits[0, :-1].double().log_softmax(-1).cpu()


def _ours(model: Path, ids: torch.Tensor, dtype: str) -> torch.Tensor:
    llm = LLM(str(model), device="cuda", dtype=dtype, num_pages=64, enable_prefix_caching=False)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    scores = llm.generate([ids.tolist()], params)[0].prompt_logprobs
    close(llm)
    assert scores is not None
    shape = len(ids) - 1, SIZES["vocab_size"]
    top, values = torch.tensor(scores.top_ids), torch.tensor(scores.top_scores).double()
    ours = torch.empty(shape, dtype=torch.float64)
    return ours.scatter_(1, top.view(-1, shape[1])[-shape[0] :], values.view(-1, shape[1])[-shape[0] :])
