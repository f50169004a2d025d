"""The compiled kernels against the slow form of each operation, and against themselves: in other company, on other
threads, from other storage."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import threading
import time
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
from tests.models.helpers import run_python
from tests.ops.rows import assert_rows_independent
from tests.witness import witness

SIZES = [(64, 96), (576, 960), (1536, 100), (8, 1), (300, 33), (1, 17), (1, 1), (65, 16), (257, 79)]
"""Inputs, outputs: whole runs, chunks, panels and groups of panels, and one more or less of each."""


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


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_bits_do_not_depend_on_the_threads(native: Library) -> None:
    """Nor on their changing between calls, up and down, to more than there are cores, or to a number that is none."""
    x, both, heads = drawn(67, 576), drawn(67, 2 * 576), drawn(67, 9, 64)
    weight, norm = packed_floats(native, drawn(960, 576, seed=1)), drawn(576, seed=2)
    cos, sin = drawn(67, 1, 64, seed=3), drawn(67, 1, 64, seed=4)
    kernels = native_kernels(native)

    def all_of_it() -> list[torch.Tensor]:
        functions = (kernels.rms_norm(x, norm, 1e-5), kernels.silu_mul(both), kernels.rotate(heads, cos, sin))
        return [weight.multiply(x, None), weight.multiply(x[:1], None), weight.rows(torch.arange(67)), *functions]

    expected = all_of_it()
    for count in (2, 5, 1, 9, 2, 0, -3):
        native.c.set_threads(count)
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(all_of_it(), expected)), f"{count} threads"


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_more_threads_than_there_can_be_are_as_many_as_can_be() -> None:
    """In a process of its own, which then has them."""
    done = run_python("""if True:
        import threading, torch
        from perdure.ops.native import library
        from perdure.ops.native.weights import packed_floats
        native = library()
        native.c.set_threads(100_000)
        weight = packed_floats(native, torch.ones(64, 8))
        assert torch.equal(weight.multiply(torch.ones(3, 8), None), torch.full((3, 64), 8.0))
        print("done")
    """)
    assert done == "done\n"


@pytest.mark.parametrize("num_rows", [1, 2, 3, 7, 200])
def test_what_is_no_number_stays_in_its_row_and_its_column(native: Library, num_rows: int) -> None:
    x, w = drawn(num_rows, 300), drawn(33, 300, seed=1)
    product = native_kernels(native).linear(w, None)
    clean = product(x)
    bad_row, bad_column, bad = num_rows // 2, 17, float("nan")
    poisoned = x.clone()
    poisoned[bad_row, 299] = bad
    row = torch.arange(num_rows) == bad_row
    ours = product(poisoned)
    assert ours[row].isnan().all() and torch.equal(ours[~row], clean[~row])
    w[bad_column, 0] = float("inf")
    column = torch.arange(33) == bad_column
    ours = native_kernels(native).linear(w, None)(x)
    assert ours[:, column].isinf().all() and torch.equal(ours[:, ~column], clean[:, ~column])


@pytest.mark.parametrize("stored", ["f32", "bf16", "f16", "Q8_0", "Q4_K"])
def test_what_lies_past_the_last_row_is_never_used(native: Library, stored: str) -> None:
    """A weight of 17 rows has a panel of one: the other 15 columns hold whatever was in memory."""
    n, k = 17, 256
    if stored in FLOAT_TYPES.values():
        raw = drawn(n, k, seed=1).bfloat16().float() if stored == "bf16" else drawn(n, k, seed=1).half().float()
    else:
        raw, _ = blocks(stored, n, k)
    results = []
    for garbage in (0x00, 0xFF):
        weight = PackedWeight(native, stored, n, k)
        weight.data.fill_(garbage)
        weight.fill(0, raw)
        out = torch.full((5, n + 3), 7.0)
        weight.multiply(drawn(5, k), None, out, 1)
        assert out[:, [0, 18, 19]].eq(7.0).all(), "it wrote past its columns"
        results.append((out, weight.rows(torch.arange(n))))
    assert all(torch.equal(*pair) for pair in zip(*results))


def test_nothing_in_is_nothing_out(native: Library) -> None:
    kernels = native_kernels(native)
    weight = packed_floats(native, drawn(20, 32))
    assert weight.multiply(drawn(0, 32), drawn(20)).shape == (0, 20)
    assert weight.rows(torch.empty(0, dtype=torch.int64)).shape == (0, 32)
    assert kernels.rms_norm(drawn(0, 32), drawn(32), 1e-5).shape == (0, 32)
    assert kernels.silu_mul(drawn(0, 64)).shape == (0, 32)
    assert kernels.rotate(drawn(0, 3, 32), drawn(0, 1, 32), drawn(0, 1, 32)).shape == (0, 3, 32)
    weight.parts[0].fill(20, drawn(0, 32))
    assert torch.equal(weight.rows(torch.arange(20)), drawn(20, 32))


def test_a_row_that_is_none_is_not_read_or_written(native: Library) -> None:
    weight = PackedWeight(native, "f32", 20, 32)
    with pytest.raises(AssertionError):
        weight.fill(15, drawn(6, 32))
    for ids in ([20], [-1], [0, 1 << 40]):
        with pytest.raises(AssertionError):
            weight.rows(torch.tensor(ids))
    with pytest.raises(AssertionError):
        packed_floats(native, drawn(20, 32)).multiply(drawn(1, 31), None)


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


def test_functions_of_rows_read_them_where_they_lie(native: Library) -> None:
    """Rows apart, heads apart, every other element: the bits of a dense copy."""
    kernels, wide, weight = native_kernels(native), drawn(12, 9, 80), drawn(40, seed=1)
    cos, sin = drawn(12, 1, 40, seed=2), drawn(12, 1, 40, seed=3)
    for x in (wide[:, 2:5, :40], wide[:, :, ::2], wide[::2, 1:2, 40:], wide.transpose(0, 1)[:, :, :40]):
        dense, cosines, sines = x.contiguous(), cos[: len(x)].contiguous(), sin[: len(x)].contiguous()
        assert torch.equal(kernels.rms_norm(x, weight, 1e-5), kernels.rms_norm(dense, weight, 1e-5))
        assert torch.equal(kernels.rotate(x, cosines, sines), kernels.rotate(dense, cosines, sines))
    flat = wide.view(12, 720)
    for x in (flat[:, 100:300], flat[::3, :200], flat[:, ::4]):
        assert torch.equal(kernels.silu_mul(x), kernels.silu_mul(x.contiguous()))


def test_a_row_that_is_no_number_stays_alone(native: Library) -> None:
    kernels, x = native_kernels(native), drawn(9, 200)
    functions = (kernels.silu_mul, kernels.gelu_tanh_mul, lambda rows: kernels.rms_norm(rows, torch.ones(200), 1e-5))
    clean = [function(x) for function in functions]
    x[4] = float("nan")
    others = torch.arange(9) != 4
    for function, before in zip(functions, clean):
        assert function(x)[4].isnan().all() and torch.equal(function(x)[others], before[others])


def test_norms_hold_at_the_ends(native: Library) -> None:
    """A row of zeros, one whose squares are small, one whose squares nearly overflow."""
    x, weight = drawn(1, 576).expand(3, 576) * torch.tensor([[0.0], [1e-15], [1e17]]), drawn(576, seed=1)
    ours = native_kernels(native).rms_norm(x, weight, 1e-6)
    exact = x.double() * (x.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt() * weight.double()
    torch.testing.assert_close(ours, exact.float(), rtol=1e-6, atol=0)
    assert not ours[0].any()


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
    while any(caller.is_alive() for caller in callers):  # another engine's numbers of threads, meanwhile
        for count in (1, 3, 2):
            native.c.set_threads(count)
            time.sleep(0.001)
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
        ({"PATH": "/nowhere", "CC": ""}, "no C compiler"),
        ({"CC": "false"}, "false:"),
        ({"CC": "no-such-compiler"}, "CC='no-such-compiler': no such compiler"),
        ({"CC": "cc '"}, "CC="),
    ],
    ids=["switched off", "no compiler", "a compiler that fails", "another that is not there", "half a command"],
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
    """Two processes that start together, then one more: one library and its digest. One cut short is made again."""
    code = "from perdure.ops.native import library; print(library().version)"
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PERDURE_CACHE": str(tmp_path)}
    run = [sys.executable, "-c", code]
    both = [subprocess.Popen(run, env=env, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    versions = {process.communicate()[0] for process in both}
    digest, made = sorted((tmp_path / "native").iterdir())
    assert (digest.suffix, made.suffix) == (".sha256", ".so")
    before, content = made.stat().st_mtime_ns, made.read_bytes()
    versions.add(subprocess.run(run, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert len(versions) == 1 and made.stat().st_mtime_ns == before
    made.write_bytes(content[: len(content) // 2])
    versions.add(subprocess.run(run, env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)
    assert len(versions) == 1 and made.read_bytes() == content


@pytest.mark.parametrize("threads", [1], indirect=True)
def test_where_nothing_can_be_kept_nothing_is_left(tmp_path) -> None:
    code = "from perdure.ops.native import library; print(library().folder)"
    (tmp_path / "file").touch()
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PERDURE_CACHE": str(tmp_path / "file")}
    env["TMPDIR"] = str(tmp_path)
    subprocess.run([sys.executable, "-c", code], env=env, check=True)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
