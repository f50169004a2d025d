"""With `batch_invariant` a request's logits have the same bits on a GPU whatever happens beside it and to it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from perdure import LLM, SamplingParams
from perdure.api.output import RequestOutput
from perdure.api.plan import StepPlan
from perdure.models.tiny import make_tiny
from perdure.ops.attention import CacheShape, LayerAttention
from perdure.ops.attention.paged import PagedRows, make_paged
from tests.cuda.conftest import ON_GPU
from tests.cuda.helpers import Random, sinks_of
from tests.engine.helpers import check_equal, num_replays, pressure, prompt
from tests.witness import witness

KINDS = [
    ((16, 8, 128), 16, LayerAttention(0.1)),
    ((32, 8, 128), 128, LayerAttention(0.1)),
    ((9, 3, 64), 5, LayerAttention(0.1, window=333)),
    ((8, 1, 256), 16, LayerAttention(0.1, window=700, softcap=20.0)),
    ((6, 2, 24), 256, LayerAttention(0.2, softcap=3.0)),
    ((6, 2, 64), 16, LayerAttention(0.1, softcap=20.0, sink="learnable")),
    ((6, 2, 64), 16, LayerAttention(0.1, window=5, sink="off-by-one")),
]


@pytest.mark.parametrize(("heads", "page_size", "kind"), KINDS, ids=str)
def test_a_query_has_the_same_bits_alone_and_in_a_prompt(gpu, dtype, heads, page_size, kind):
    """All positions of a row as one prompt, in chunks, and each as a row of one query, alone and among many."""
    num_heads, num_kv_heads, dim = heads
    random, length = Random(gpu), 2300
    width = -(-length // page_size)
    cache = random(2, num_kv_heads, 2 * width, page_size, dim, dtype=dtype)
    table = random.order(2 * width).view(2, width).to(gpu, torch.int32)
    q = random(length, num_heads, dim, dtype=dtype)
    shape = CacheShape(num_heads, num_kv_heads, dim, 2 * width, page_size)
    form = make_paged("auto", shape, kind, dtype, gpu, batch_invariant=True)
    sinks = sinks_of(kind, num_heads, random)

    def ints(values: list[Any], *shape: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=gpu).view(*shape)

    def of_prompt(bounds: list[int]) -> torch.Tensor:
        size = form.block_size
        blocks = [
            (1, low, low, min(size, end - low)) for begin, end in pairwise(bounds) for low in range(begin, end, size)
        ]
        none = ints([], 0)
        return form.run(q, cache, PagedRows(table, none, none, none, ints(blocks, -1, 4)), sinks)

    def of_rows(positions: list[int]) -> torch.Tensor:
        slots = ints([1] * len(positions), -1)
        at = ints(positions, -1)
        return form.run(q, cache, PagedRows(table, at, slots, at, ints([], 0, 4)), sinks)[positions]

    whole = of_prompt([0, length])
    assert torch.equal(of_prompt([0, 1, 64, 100, 1024, 1025, 1700, length]), whole)
    assert torch.equal(of_rows(list(range(length))), whole)
    for count in (1, 2, 5, 40, 100):
        some = [length - 1 - 97 * index % length for index in range(count)]
        assert torch.equal(of_rows(some), whole[some]), f"{count} rows"


X = {1: prompt(1), 100: prompt(100), 1500: prompt(1500)}
OTHERS = [prompt(1 + 37 * n % 300, seed=2) for n in range(64)]
LONG = prompt(8000, seed=3)
MODES = {
    "greedy": SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=5, prompt_logprobs=5),
    "drawn": SamplingParams(temperature=0.9, top_p=0.95, seed=12, max_tokens=24, ignore_eos=True, logprobs=-1),
    "in bursts": SamplingParams(temperature=0.9, top_p=0.95, seed=12, max_tokens=24, ignore_eos=True, logprobs=5),
}
"""Scores of the whole vocabulary are the host's, so "drawn" has no bursts; others have."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """In bfloat16, with depths that are cut into splits."""
    sizes = {"hidden_size": 1024, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 64}  # fmt: skip
    return make_tiny(
        "llama", tmp_path_factory.mktemp("tiny") / "llama", max_position_embeddings=16384, dtype="bfloat16", **sizes
    )


def engine(model, **config: Any) -> LLM:
    settings = {"num_pages": 4096, "max_num_seqs": 66, "enable_prefix_caching": False, "max_model_len": 8192}
    return LLM(str(model), device="cuda", batch_invariant=True, check_integrity=True, **{**settings, **config})


def plans_of(llm: LLM) -> list[StepPlan]:
    """From now on."""
    runner, plans = llm._engine.resolved.runner, list[StepPlan]()
    launch = runner.launch
    runner.launch = lambda plan: (plans.append(plan), launch(plan))[1]
    return plans


def num_bursts(plans: list[StepPlan]) -> int:
    return sum(plan.num_steps > 1 for plan in plans)


def others(count: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=n % 3 / 2, seed=n, max_tokens=5 + n % 40, ignore_eos=True, logprobs=n % 4)
        for n in range(count)
    ]


@pytest.fixture(scope="module")
def alone(model) -> dict[tuple[str, int], RequestOutput]:
    """Each X by itself, by mode and length."""
    if not ON_GPU:
        pytest.skip("no CUDA device here")
    with engine(model) as llm:
        assert llm.describe()["linear_backend"] == "triton"
        return {(name, length): llm.generate(ids, mode)[0] for name, mode in MODES.items() for length, ids in X.items()}


def check(found: RequestOutput, right: RequestOutput) -> None:
    assert found.exact
    check_equal(found, right)


@pytest.mark.parametrize("budget", [64, 512, 8192])
def test_T66_in_company(gpu, model, alone, budget):
    """Beside 64 others, first or last, and with a prompt of 8,000 computed while it decodes."""
    with engine(model, max_num_batched_tokens=budget) as llm:
        plans, beside = plans_of(llm), 0
        for (name, length), right in alone.items():
            mode = MODES[name]
            if length == 100:
                check(llm.generate([X[length], *OTHERS], [mode, *others(64)])[0], right)
            check(llm.generate([*OTHERS, X[length]], [*others(64), mode])[-1], right)
            if budget < len(LONG):
                before = len(plans)
                check(llm.generate([X[length], LONG], [mode, MODES["greedy"]])[0], right)
                together = [sorted(plan.length) for plan in plans[before:] if len(plan.length) == 2]
                now = sum(one == 1 and more > 1 for one, more in together)
                assert now > 10, f"it decoded in {now} steps with a part of the long prompt"
                beside += now
        count = {"steps_beside_the_long_prompt": beside} if beside else {}
        witness(
            "T66", budget=budget, lengths=[*X], others=64, replays=num_replays(llm), bursts=num_bursts(plans), **count
        )


@pytest.mark.parametrize("name", ["drawn", "in bursts"])
def test_T66_with_a_prefix_hit(gpu, model, alone, name):
    with engine(model, enable_prefix_caching=True) as llm:
        plans = plans_of(llm)
        for length in (100, 1500):
            hits = [llm.generate(X[length], MODES[name])[0] for _ in range(2)]
            for found in hits:
                check(found, alone[name, length])
            assert hits[0].num_cached_tokens == 0 and hits[1].num_cached_tokens == (length - 1) // 16 * 16
        assert (num_bursts(plans) > 0) == (name == "in bursts")
        witness("T66", cached=hits[1].num_cached_tokens, mode=name, replays=num_replays(llm))


@pytest.mark.parametrize("name", MODES)
def test_T66_evicted_and_resumed(gpu, model, alone, name):
    """An older request takes the page that X needs when it has some tokens."""
    older = SamplingParams(temperature=1.0, seed=1, max_tokens=30, ignore_eos=True)
    with engine(model, num_pages=10, paused_pages=0, max_num_batched_tokens=64) as llm:
        _, found = llm.generate([prompt(33), X[100]], [older, MODES[name]])
        evictions, _ = pressure(found)
        check(found, alone[name, 100])
        witness("T66", evictions=evictions, mode=name)


def test_families(gpu, tmp_path):
    """Norms of heads, windows, soft caps, biases, partial rotation: alone and beside others."""
    for family in ("mistral", "qwen2", "qwen3", "phi3", "olmo2", "gemma3"):
        model = make_tiny(family, tmp_path / family, dtype="bfloat16")
        with engine(model, max_model_len=256, max_num_batched_tokens=64, max_num_seqs=20) as llm:
            (right,) = llm.generate([X[100]], MODES["greedy"])
            found = llm.generate([*OTHERS[:8], X[100], *OTHERS[3:9]], [*others(8), MODES["greedy"], *others(6)])[8]
            check(found, right)
