"""The compiled kernels against the slow form of each operation, and against themselves: in other company, on other
threads, from other storage."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from perdure.ops.activation import gelu_tanh_mul, silu_mul
from perdure.ops.kernels import native_kernels
from perdure.ops.linear import reference
from perdure.ops.native import Library, library, why_not
from perdure.ops.native.weights import BLOCKS, FLOAT_TYPES, JoinedWeight, PackedWeight, packed_floats
from perdure.ops.norm import rms_norm
from perdure.ops.rope import rotate
from tests.ops.rows import assert_rows_independent
from tests.witness import witness

SIZES = [(64, 96), (576, 960), (1536, 100), (8, 1), (300, 33), (1, 17)]  # inputs, outputs


@pytest.fixture(scope="module")
def native() -> Library:
    found = library()
    assert found is not None, f"the tests need a C compiler: {why_not()}"
    return found


@pytest.fixture(params=[1, 2], autouse=True)
def threads(request: pytest.FixtureRequest, native: Library) -> Iterator[int]:
    native.c.set_threads(request.param)
    yield request.param
    native.c.set_threads(torch.get_num_threads())


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 13, 200])
def test_products_equal_the_reference(native: Library, size: tuple[int, int], num_rows: int) -> None:
    k, n = size
    x, w, b = drawn(num_rows, k), drawn(n, k, seed=1) / k**0.5, drawn(n, seed=2)
    linear = native_kernels(native).linear
    torch.testing.assert_close(linear(w, b)(x), reference(w, b)(x), rtol=0, atol=1e-5)
    torch.testing.assert_close(linear(w, None)(x), reference(w)(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_a_rows_bits_depend_on_that_row_alone(native: Library, size: tuple[int, int]) -> None:
    k, n = size
    product = native_kernels(native).linear(drawn(n, k, seed=1), drawn(n, seed=2))
    assert_rows_independent(product, drawn(130, k))
    many = drawn(601, k)
    whole = product(many)
    for rows in (slice(0, 1), slice(191, 194), slice(380, 386), slice(596, 601)):
        assert torch.equal(product(many[rows]), whole[rows])


def test_bits_do_not_depend_on_the_threads(native: Library) -> None:
    x, w = drawn(67, 576), drawn(960, 576, seed=1)
    results = []
    for count in (1, 2, 5):
        native.c.set_threads(count)
        results.append(packed_floats(native, w).multiply(x, None))
    assert all(torch.equal(other, results[0]) for other in results)


def test_rows_that_lie_apart_are_multiplied_where_they_are(native: Library) -> None:
    wide, w = drawn(20, 200), drawn(48, 64, seed=1)
    product = native_kernels(native).linear(w, None)
    assert torch.equal(product(wide[:, 100:164]), product(wide[:, 100:164].contiguous()))
    assert product(wide[:0, :64]).shape == (0, 48)


@pytest.mark.parametrize("dtype", FLOAT_TYPES)
def test_narrow_weights_give_the_bits_of_their_expansion(native: Library, dtype: torch.dtype) -> None:
    n, k = 70, 600
    w = (drawn(n, k, seed=1) * torch.logspace(-9, 2, k)).to(dtype)  # fp16's subnormals, too
    narrow = PackedWeight(native, FLOAT_TYPES[dtype], n, k)
    for first in range(0, n, 9):
        narrow.fill(first, w[first : first + 9])
    ids = torch.tensor([69, 0, 16, 15, 0])
    assert torch.equal(narrow.rows(ids), w[ids].float())
    for num_rows in (1, 2, 6, 16, 40):
        x = drawn(num_rows, k)
        assert torch.equal(
            JoinedWeight((narrow,)).multiply(x, None), packed_floats(native, w.float()).multiply(x, None)
        )


def blocks(name: str, n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks of a type as bytes [n, row bytes], and what the gguf package reads in them, fp32 [n, k]."""
    kind = GGMLQuantizationType[name]
    size, num_bytes = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(3)
    raw = rng.integers(0, 256, (n * k // size, num_bytes), dtype=np.uint8)
    # Every two bytes that may be a scale become a small half: exponents that are neither infinite nor vast.
    for at in {"Q2_K": (80, 82), "Q3_K": (108,), "Q6_K": (208,)}.get(name, (0, 2)):
        halves = rng.normal(0, 0.01, len(raw)).astype(np.float16)
        if at + 2 <= num_bytes and (at == 0 or name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K", "Q2_K", "Q3_K", "Q6_K")):
            raw[:, at : at + 2] = halves.view(np.uint8).reshape(-1, 2)
    values = getattr(quants, name).dequantize_blocks(raw)
    return torch.from_numpy(raw.reshape(n, -1)), torch.from_numpy(values.reshape(n, k))


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_give_the_bits_of_their_expansion(native: Library, name: str) -> None:
    n, k = 41, 768
    raw, values = blocks(name, n, k)
    assert values.isfinite().all() and values.std() > 0
    kept = PackedWeight(native, name, n, k)
    for first in range(0, n, 7):
        kept.fill(first, raw[first : first + 7])
    assert torch.equal(kept.rows(torch.arange(n)), values)
    for num_rows in (1, 3, 20):
        x = drawn(num_rows, k)
        ours = JoinedWeight((kept,)).multiply(x, None)
        assert torch.equal(ours, packed_floats(native, values).multiply(x, None))
    for first in range(0, n, 7):  # filled again in place: nothing of before is left
        kept.fill(first, raw.flip(0)[first : first + 7])
    assert torch.equal(kept.rows(torch.arange(n)), values.flip(0))
    witness("quantised-in-memory", type=name, bits_a_weight=round(8 * kept.num_bytes / (48 * k), 2))


def test_joined_parts_of_several_types_are_one_product(native: Library) -> None:
    k = 512
    stored = [blocks("Q4_K", 40, k), blocks("Q6_K", 24, k)]
    parts = []
    for name, (raw, _) in zip(("Q4_K", "Q6_K"), stored):
        part = PackedWeight(native, name, raw.shape[0], k)
        part.fill(0, raw)
        parts.append(part)
    x, bias = drawn(5, k), drawn(64, seed=2)
    whole = packed_floats(native, torch.cat([values for _, values in stored]))
    assert torch.equal(JoinedWeight(tuple(parts)).multiply(x, bias), whole.multiply(x, bias))


@pytest.mark.parametrize("width", [8, 64, 100, 1536])
def test_functions_of_rows_equal_torchs(native: Library, width: int) -> None:
    kernels = native_kernels(native)
    x, weight = 3 * drawn(70, width), drawn(width, seed=1)
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), rms_norm(x, weight, 1e-5), rtol=1e-5, atol=1e-6)
    both = 20 * drawn(70, 2 * width)
    torch.testing.assert_close(kernels.silu_mul(both), silu_mul(both), rtol=2e-6, atol=1e-30)
    torch.testing.assert_close(kernels.gelu_tanh_mul(both), gelu_tanh_mul(both), rtol=2e-5, atol=1e-6)
    for function in (kernels.silu_mul, kernels.gelu_tanh_mul):
        assert_rows_independent(function, both)
    assert_rows_independent(lambda rows: kernels.rms_norm(rows, weight, 1e-5), x)


def test_activations_hold_at_the_ends(native: Library) -> None:
    gate = torch.tensor([[0.0, -0.0, 88.7, -88.7, 1e30, -1e30, float("inf"), float("nan")]])
    ours = native_kernels(native).silu_mul(torch.cat((gate, torch.ones(1, 8)), dim=1))
    expected = gate / (1 + torch.exp(-gate))
    torch.testing.assert_close(ours, expected, rtol=2e-6, atol=1e-36, equal_nan=True)


def test_norms_and_rotations_of_heads_equal_torchs(native: Library) -> None:
    kernels = native_kernels(native)
    qkv = drawn(30, 7, 40)  # a view of some heads, as a model's split gives it
    heads, weight = qkv[:, 1:6], drawn(5, 40, seed=1)
    torch.testing.assert_close(
        kernels.rms_norm(heads, weight, 1e-5), rms_norm(heads, weight, 1e-5), rtol=1e-5, atol=1e-6
    )
    for turning in (40, 24):
        cos, sin = drawn(30, 1, turning, seed=2), drawn(30, 1, turning, seed=3)
        torch.testing.assert_close(kernels.rotate(heads, cos, sin), rotate(heads, cos, sin), rtol=1e-5, atol=1e-6)
        whole = kernels.rotate(heads, cos, sin)
        assert torch.equal(kernels.rotate(heads[7:9], cos[7:9], sin[7:9]), whole[7:9])


def test_callers_at_once_get_their_own_results(native: Library) -> None:
    weight = packed_floats(native, drawn(960, 576, seed=1))
    x = [drawn(5 + i, 576, seed=i) for i in range(4)]
    expected = [weight.multiply(rows, None) for rows in x]
    wrong: list[int] = []

    def work(i: int) -> None:
        wrong.extend(i for _ in range(200) if not torch.equal(weight.multiply(x[i], None), expected[i]))

    callers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def _in_child(result: object) -> None:
    found = library()
    assert found is not None
    weight = packed_floats(found, drawn(960, 576, seed=1))
    result.send_bytes(weight.multiply(drawn(20, 576), None).numpy().tobytes())  # type: ignore[attr-defined]


def test_a_forked_child_has_threads_of_its_own(native: Library) -> None:
    """The parent's helpers do not exist in it."""
    expected = packed_floats(native, drawn(960, 576, seed=1)).multiply(drawn(20, 576), None)
    ours, theirs = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_in_child, args=(theirs,))
    child.start()
    assert ours.poll(60), "the child hangs"
    assert ours.recv_bytes() == expected.numpy().tobytes()
    child.join(60)
    assert child.exitcode == 0


@pytest.mark.parametrize("threads", [1], indirect=True)
@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"PERDURE_NATIVE": "0"}, "PERDURE_NATIVE=0"),
        ({"PATH": "/nowhere", "CC": "none"}, "no C compiler"),
        ({"CC": "false"}, "false:"),
    ],
    ids=["switched off", "no compiler", "a compiler that fails"],
)
def test_without_kernels_torch_serves_and_says_why(tmp_path, environment: dict[str, str], said: str) -> None:
    code = (
        "from perdure.ops.native import library, why_not; assert library() is None; print(why_not())\n"
        "from perdure.ops.kernels import choose_kernels; import torch\n"
        "print(choose_kernels('auto', torch.device('cpu'), torch.float32).name)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PERDURE_CACHE": str(tmp_path), **environment},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    reason, form = done.stdout.splitlines()
    assert reason.startswith(said) and form == "packed"


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_the_library_is_made_once(tmp_path) -> None:
    """Two processes that start together, then one more: one file, and nothing left beside it."""
    code = "from perdure.ops.native import library; print(library().version)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PERDURE_CACHE": str(tmp_path)}
    run = [sys.executable, "-c", code]
    both = [subprocess.Popen(run, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    versions = {process.communicate()[0] for process in both}
    (made,) = (tmp_path / "native").iterdir()
    before = made.stat().st_mtime_ns
    versions.add(subprocess.run(run, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert len(versions) == 1 and made.stat().st_mtime_ns == before
