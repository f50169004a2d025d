"""Rotary embedding: its definition as a turn in the plane, its scalings, and rows in other company."""

import math

import pytest
import torch

from perdure.ops.rope import inverse_frequencies, rotary_table, rotate, rotations
from tests.ops.rows import assert_rows_independent

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _rotated(x: torch.Tensor, positions: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    table = rotary_table(inverse_frequencies(x.shape[-1], theta), 4096)
    return rotate(x, *rotations(table, positions, x.dtype))


def test_a_pair_turns_by_position_times_frequency():
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 1, 77, 3000])
    frequencies = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    angles = positions[:, None, None] * frequencies
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double()) * torch.polar(torch.ones_like(angles), angles)
    expected = torch.cat((turned.real, turned.imag), dim=-1).float()
    torch.testing.assert_close(_rotated(x, positions), expected, rtol=0, atol=2e-3)  # fp32 angles at position 3000
    torch.testing.assert_close(_rotated(x, positions)[:2], expected[:2], rtol=0, atol=1e-6)


def test_a_part_of_a_head_may_turn():
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(0))
    table = rotary_table(inverse_frequencies(12, 10000.0), 64)
    angles = rotations(table, torch.tensor([0, 1, 7, 30]), x.dtype)
    turned = rotate(x, *angles)
    assert torch.equal(turned[..., :12], rotate(x[..., :12].contiguous(), *angles))
    assert torch.equal(turned[..., 12:], x[..., 12:])


def test_products_depend_on_distance_only():
    q, k = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))
    near = (_rotated(q, torch.tensor([10])) * _rotated(k, torch.tensor([3]))).sum()
    far = (_rotated(q, torch.tensor([510])) * _rotated(k, torch.tensor([503]))).sum()
    torch.testing.assert_close(near, far, rtol=0, atol=1e-3)


def test_default_and_linear_scaling():
    plain = inverse_frequencies(64, 10000.0)
    assert torch.equal(inverse_frequencies(64, 10000.0, {"rope_type": "default"}), plain)
    assert torch.equal(inverse_frequencies(64, 10000.0, {"rope_type": "linear", "factor": 4.0}), plain / 4)


def test_llama3_scaling_keeps_fast_and_slows_slow_frequencies():
    plain, scaled = inverse_frequencies(128, 500000.0), inverse_frequencies(128, 500000.0, LLAMA3)
    wavelength = 2 * math.pi / plain
    fast, slow = wavelength < 8192 / 4, wavelength > 8192
    assert fast.any() and slow.any() and not (fast | slow).all()
    assert torch.equal(scaled[fast], plain[fast])
    assert torch.equal(scaled[slow], plain[slow] / 8)
    between = ~(fast | slow)
    assert ((scaled[between] < plain[between]) & (scaled[between] > plain[between] / 8)).all()


def test_factors_are_llama3_as_gguf_stores_it():
    plain, scaled = inverse_frequencies(128, 500000.0), inverse_frequencies(128, 500000.0, LLAMA3)
    factors = {"rope_type": "factors", "factors": tuple((plain / scaled).tolist())}
    torch.testing.assert_close(inverse_frequencies(128, 500000.0, factors), scaled, rtol=1e-6, atol=0)


def test_an_unknown_scaling_is_refused():
    with pytest.raises(ValueError, match="rope_type='yarn' is none of default, linear, llama3"):
        inverse_frequencies(64, 10000.0, {"rope_type": "yarn"})


def test_a_rows_bits_depend_on_that_row_and_its_position_alone():
    x = torch.randn(70, 5, 64, generator=torch.Generator().manual_seed(0))
    table = rotary_table(inverse_frequencies(64, 10000.0), 512)
    # The position travels in the row itself, so that a run of rows takes its positions along.
    rows = torch.cat((x.flatten(1), torch.randint(0, 512, (70, 1)).float()), dim=1)

    def function(rows: torch.Tensor) -> torch.Tensor:
        heads, positions = rows[:, :-1].view(-1, 5, 64), rows[:, -1].long()
        return rotate(heads, *rotations(table, positions, torch.float32))

    assert_rows_independent(function, rows)
