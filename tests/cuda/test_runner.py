"""The runner for CUDA against the one for a CPU, on the same plans: chunks, neighbours, scores, graphs and padding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from perdure.api.plan import Adjustments, StepOutput
from perdure.models.base import ModelConfig, Weights, joined_shape
from perdure.models.llama import LlamaModel, parameters
from perdure.ops.attention import LayerAttention
from perdure.ops.kernels import triton_kernels
from perdure.runner.bursts import joined
from perdure.runner.cuda.pages import DevicePages
from perdure.runner.cuda.runner import CudaRunner
from perdure.runner.shapes import ShapeRules
from tests.cuda.conftest import ON_GPU
from tests.runner.plans import CONFIG, Driver, Row, entries, prompt, tiny_model
from tests.witness import witness

NUM_DECODES = 20 if ON_GPU else 1
GRAPHS = ShapeRules(8, 120, 128, 4, "hybrid", 64, 2)


class CudaDriver(Driver):
    """Plans for `CudaRunner` over the same weights."""

    def __init__(
        self,
        device: torch.device,
        *,
        rules: ShapeRules | None = None,
        backend: str = "auto",
        batch_invariant: bool = False,
        config: ModelConfig = CONFIG,
    ) -> None:
        super().__init__(tiny_model(config))
        self.runner.release()
        generator = torch.Generator().manual_seed(0)
        weights = {}
        for name, parts in parameters(config).items():
            shape = joined_shape(parts)
            scale = shape[-1] ** -0.5 * (4 if name == "head.weight" else 1)
            w = torch.ones(shape) if "norm" in name else torch.randn(shape, generator=generator) * scale
            weights[name] = w.to(device)
        self.device = CudaRunner(
            LlamaModel(config, Weights(weights), triton_kernels(batch_invariant=batch_invariant)),
            num_pages=8 * self.pages_per_slot,
            page_size=4,
            max_num_seqs=8,
            max_model_len=120,
            max_num_batched_tokens=128,
            device=device,
            dtype=torch.float32,
            attention_backend=backend,
            batch_invariant=batch_invariant,
            rules=rules,
        )

    def run(self, *rows: Row) -> StepOutput:
        return self.device.launch(self.plan(*rows)).wait()


def life(driver: Driver) -> list[StepOutput]:
    """Four rows: greedy; seeded with scores, its prompt in chunks; top-k with prompt scores; held back and scored."""
    prompts = [prompt(length) for length in (5, 33, 9, 6)]
    driver.admit(0, 5)
    driver.admit(1, 33, temperature=0.8, top_p=0.95, seed=7, num_logprobs=3)
    driver.admit(2, 9, temperature=1.0, top_k=9, seed=2**40 + 5, num_prompt_logprobs=2)
    driver.admit(3, 6, min_tokens=2, masked_ids=(3, 5, 7), num_logprobs=0)
    outputs = [
        driver.run(
            Row(0, prompts[0]),
            Row(1, prompts[1][:20], sample=False),
            Row(2, prompts[2], targets=prompts[2][1:], target_start=1),
            Row(3, prompts[3]),
        ),
        driver.run(Row(0), Row(2), Row(1, prompts[1][20:], start=20), Row(3)),
    ]
    return outputs + [driver.run(Row(0), Row(1), Row(2), Row(3)) for _ in range(NUM_DECODES)]


def check_equal(found: StepOutput, right: StepOutput) -> None:
    assert (found.tokens, found.num_sampled, found.errors) == (right.tokens, right.num_sampled, right.errors)
    for one, two in ((found.records, right.records), (found.prompt_records, right.prompt_records)):
        ours, theirs = entries(one), entries(two)
        assert len(ours) == len(theirs)
        for (*where, chosen, rank, top), (*there, score, place, best) in zip(ours, theirs):
            assert (where, rank) == (there, place) and abs(chosen - score) <= 1e-4
            assert [i for i, _ in top] == [i for i, _ in best]
            assert all(abs(x - y) <= 1e-4 for (_, x), (_, y) in zip(top, best))


FORMS: dict[str, dict[str, Any]] = {
    "eager": {},
    "graphs": {"rules": GRAPHS},
    "invariant": {"rules": GRAPHS, "batch_invariant": True},
    "reference": {"backend": "reference"},
}


@pytest.fixture(scope="module")
def right():
    return life(Driver(tiny_model()))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_life_as_on_a_cpu(device, right, form):
    if not ON_GPU and form in ("eager", "invariant"):
        pytest.skip("the interpreter runs the padded shapes eagerly, and test_linear's products")
    driver = CudaDriver(device, **FORMS[form])
    for found, expected in zip(life(driver), right, strict=True):
        check_equal(found, expected)
    if driver.device.graphs is not None:
        replays = {str(shape.num_tokens): n for shape, n in driver.device.shapes.num_steps.items() if n}
        assert replays["4"] == NUM_DECODES
        witness("feat-cuda-graph", replays=replays, shapes=[shape.num_tokens for shape in driver.device.shapes.shapes])


SINKS = replace(
    CONFIG, attention=(LayerAttention(8**-0.5, 5, sink="learnable"), LayerAttention(8**-0.5, sink="off-by-one"))
)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_life_with_sinks(device, form):
    """Of two kinds, beside a window and alone."""
    if not ON_GPU and form in ("eager", "invariant"):
        pytest.skip("the interpreter runs the padded shapes eagerly, and test_linear's products")
    right = life(Driver(tiny_model(SINKS)))
    for found, expected in zip(life(CudaDriver(device, config=SINKS, **FORMS[form])), right, strict=True):
        check_equal(found, expected)


def test_a_capture_that_fails_gives_the_pool_back(device, monkeypatch):
    released = []

    def graphs(*_):
        raise torch.OutOfMemoryError("planted")

    monkeypatch.setattr("perdure.runner.cuda.runner.Graphs", graphs)
    monkeypatch.setattr(DevicePages, "release", lambda pages: released.append(pages.num_bytes))
    with pytest.raises(torch.OutOfMemoryError, match="planted"):
        CudaDriver(device, rules=GRAPHS)
    assert released and released[0] > 0


BURST = (9, 6, 1, 9) if ON_GPU else (2, 2, 1, 2)
LENGTHS = (5, 33, 9, 6) if ON_GPU else (3, 5, 4, 2)


def bursts(driver: Driver, lengths: tuple[int, ...]) -> list[StepOutput]:
    """The same four rows but for prompt scores, two that look back and one that is given, then two bursts of them."""
    prompts = [prompt(length) for length in LENGTHS]
    words = Adjustments(bad_words=((3, 4), (7,)), repetition_penalty=1.4, history=tuple(prompts[0]))
    driver.admit(0, len(prompts[0]), adjustments=words)
    driver.admit(1, len(prompts[1]), temperature=0.8, top_p=0.95, seed=7, num_logprobs=3)
    driver.admit(2, len(prompts[2]), temperature=1.0, top_k=9, seed=2**40 + 5, forced_ids=(5, 6, 7, 8))
    driver.admit(
        3, len(prompts[3]), min_tokens=4, masked_ids=tuple(range(0, 200, 2)), num_logprobs=0, listed_ids=(1, 2)
    )
    first = driver.run(*(Row(slot, ids) for slot, ids in enumerate(prompts)))
    times = range(1 + ON_GPU)
    return [first, *(driver.run(*(Row(slot, steps=n) for slot, n in enumerate(lengths))) for _ in times)]


def one_by_one(driver: Driver, lengths: tuple[int, ...]) -> list[StepOutput]:
    """A burst's outputs from single steps."""
    run, driver.run = driver.run, lambda *rows: _stepped(run, rows)  # type: ignore[method-assign]
    return bursts(driver, lengths)


def _stepped(run: Any, rows: tuple[Row, ...]) -> StepOutput:
    parts = []
    for step in range(max(row.steps for row in rows)):
        present = [at for at, row in enumerate(rows) if row.steps > step]
        parts.append((present, run(*(replace(rows[at], steps=1) for at in present))))
    return joined(run.__self__.plan(*rows), parts)


@pytest.mark.parametrize("form", FORMS)
def test_a_burst_is_single_steps(device, form):
    if not ON_GPU and form != "graphs":
        pytest.skip("the interpreter takes a second a step, and one form says most")
    right = one_by_one(Driver(tiny_model()), BURST)
    driver = CudaDriver(device, **FORMS[form])
    for found, expected in zip(bursts(driver, BURST), right, strict=True):
        check_equal(found, expected)
    assert right[1].num_sampled == [*BURST] and len(right[1].records.row) == BURST[1] + BURST[3]
    if (shapes := driver.device.shapes) is not None:
        replays = {str(shape.num_tokens): n for shape, n in shapes.num_steps.items() if n}
        witness("burst-runner", form=form, steps=max(BURST), replays=replays, tokens=len(right[1].tokens))


def test_a_row_that_ends_in_a_burst_writes_no_more(device):
    """By its third new token: its last pages stay clear in this burst and the next, and its neighbour does not notice.
    The request that gets its slot then begins anew."""
    form = "auto" if ON_GPU else "reference"
    driver = CudaDriver(device, backend=form)
    driver.admit(0, 3)
    driver.admit(1, 2)
    rows = [Row(0, prompt(3)), Row(1, prompt(2))]
    driver.run(*rows)
    right = driver.run(Row(0, steps=6), Row(1, steps=6)).tokens
    again = CudaDriver(device, backend=form)
    again.admit(0, 3, end_ids=(199, right[2]), min_tokens=3)
    again.admit(1, 2, end_ids=(right[6],), min_tokens=9)
    plan = again.plan(*rows)
    again.device.launch(plan).wait()
    found = [again.run(Row(0, steps=6), Row(1, steps=6)) for _ in range(2)]
    pool, table = again.device._kv._pool, plan.table_page[: again.pages_per_slot]
    written = [bool(pool[:, :, :, page].any()) for page in table[:3]]
    # Once it has ended it may draw from anything, or nothing.
    assert (found[0].tokens[:3], found[0].tokens[-6:]) == (right[:3], right[-6:])
    assert written == [True, True, False], written
    again.admit(0, 4)
    later = again.run(Row(0, prompt(4)), Row(1))
    assert later.num_sampled == [1, 1] and again.run(Row(0, steps=4), Row(1, steps=4)).num_sampled == [4, 4]
    witness("burst-ends-on-device", tokens=len(found[0].tokens), pages_written=sum(written))


def test_a_row_that_fails_in_a_burst_keeps_what_came_before(device):
    """Nothing is left for its fourth token; its neighbour goes on, and in a burst after it, too."""
    driver = CudaDriver(device, backend="auto" if ON_GPU else "reference")
    only = Adjustments(allowed_ids=(3,), bad_words=((3, 3, 3, 3),), history=tuple(prompt(5)))
    driver.admit(0, 5, adjustments=only, num_logprobs=0)
    driver.admit(1, 2)
    driver.run(Row(0, prompt(5)), Row(1, prompt(2)))
    found = driver.run(Row(0, steps=4), Row(1, steps=4))
    assert [row for row, _ in found.errors] == [0] and found.num_sampled == [2, 4]
    assert found.tokens[:2] == [3, 3] and len(found.tokens) == 6 and found.records.position == [6, 7]
    later = driver.run(Row(0, steps=2), Row(1, steps=2))
    assert [row for row, _ in later.errors] == [0] and later.num_sampled == [0, 2]


def test_T59_padding_writes_nowhere(gpu):
    """Three rows in a graph of four, many times and in bursts that they leave one by one, two in flight: no page
    outside the three rows' changes, and no row of nobody's."""
    driver = CudaDriver(gpu, rules=ShapeRules(8, 120, 128, 4, "linear", 8))
    ids = [prompt(length) for length in (5, 7, 9)]
    for slot in range(3):
        driver.admit(slot, len(ids[slot]))
    plan = driver.plan(*(Row(slot, ids[slot]) for slot in range(3)))
    mine = {*plan.table_page}
    driver.device.launch(plan).wait()
    pool = driver.device._kv._pool
    others = [page for page in range(pool.shape[3]) if page not in mine]
    with torch.inference_mode():
        pool[:, :, :, others] = torch.randn(pool[:, :, :, others].shape).to(gpu)
        driver.device._table[:, driver.pages_per_slot - 2 :] = others[0]  # what nobody should follow
    before = pool[:, :, :, others].clone()
    steps = [(1, 1, 1)] * 20 + [(4, 2, 3), (1, 6, 3), (2, 2, 2)]
    tickets, tokens = [], 0
    for lengths in steps:
        tickets.append(driver.device.launch(driver.plan(*(Row(slot, steps=n) for slot, n in enumerate(lengths)))))
        if len(tickets) == 2:
            tokens += len(tickets.pop(0).wait().tokens)
    tokens += len(tickets.pop().wait().tokens)
    assert torch.equal(pool[:, :, :, others], before)
    assert tokens == sum(map(sum, steps))
    replays = sum(driver.device.shapes.num_steps.values())
    assert replays == sum(map(max, steps)) and driver.device.shapes.num_others == 1  # that of the prompts
    witness("T59", pages_outside=len(others), replays=replays, bursts=3, in_flight=2)


def test_a_row_with_unusable_logits_fails_alone(device):
    driver = CudaDriver(device)
    ids = [prompt(length) for length in (5, 6)]
    for slot in range(2):
        driver.admit(slot, len(ids[slot]))
    plan = driver.plan(Row(0, ids[0], sample=False), Row(1, ids[1]))
    driver.device.launch(plan).wait()
    with torch.inference_mode():
        driver.device._kv._pool[:, :, :, plan.table_page[0]] = torch.nan
    found = driver.device.launch(driver.plan(Row(0, ids[0][:1], start=5), Row(1))).wait()
    assert [row for row, _ in found.errors] == [0] and found.num_sampled == [0, 1]
    later = driver.run(Row(0), Row(1))
    assert [row for row, _ in later.errors] == [0] and later.num_sampled == [0, 1]


@pytest.mark.parametrize("form", ["eager", "graphs"])
def test_no_launch_waits(nothing_on_host, gpu, right, form):
    """New rows, prompts in chunks and scores among them. One that waited would fail its rows."""
    for found, expected in zip(life(CudaDriver(gpu, **FORMS[form])), right, strict=True):
        check_equal(found, expected)


def test_two_steps_in_flight(gpu, right):
    """Results are taken one step late, in order, and are the same."""
    driver = CudaDriver(gpu)
    ids = prompt(5)
    driver.admit(0, 5)
    tickets = [driver.device.launch(driver.plan(Row(0, ids)))]
    found = []
    for _ in range(NUM_DECODES + 1):
        tickets.append(driver.device.launch(driver.plan(Row(0))))
        found += tickets.pop(0).wait().tokens
    assert found == [output.tokens[0] for output in right[: NUM_DECODES + 1]]


def test_a_step_that_cannot_be_launched_fails_its_rows_and_no_other(device):
    driver = CudaDriver(device)
    driver.admit(0, 5)
    wrong = driver.plan(Row(0, prompt(5)))
    wrong.request[0] += 1
    output = driver.device.launch(wrong).wait()
    assert [row for row, _ in output.errors] == [0] and "AssertionError" in output.errors[0][1].message
    driver.admit(1, 6)
    assert driver.run(Row(1, prompt(6))).num_sampled == [1]
