"""Activations: their definitions, and rows in other company, at widths that are not whole vectors too."""

import pytest
import torch
from torch.nn import functional

from perdure.ops.activation import gelu_tanh_mul, silu_mul, soft_cap_
from tests.ops.rows import assert_rows_independent

GATED = {silu_mul: functional.silu, gelu_tanh_mul: lambda gate: functional.gelu(gate, approximate="tanh")}


@pytest.mark.parametrize("gated", GATED)
def test_definition(gated):
    gate_up = torch.randn(7, 2 * 50, generator=torch.Generator().manual_seed(0)) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(gated(gate_up), (GATED[gated](gate) * up).float(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("cap", [0.5, 30.0, 50.0])
def test_soft_cap(cap):
    x = torch.randn(7, 50, generator=torch.Generator().manual_seed(0)) * 40
    expected = cap * torch.tanh(x.double() / cap)
    assert soft_cap_(x, cap) is x
    torch.testing.assert_close(x, expected.float(), rtol=0, atol=4e-7 * cap)
    assert torch.equal(soft_cap_(torch.tensor([-1e6, 0.0, 1e6]), cap), torch.tensor([-cap, 0.0, cap]))


def test_extremes_stay_finite():
    assert torch.equal(gelu_tanh_mul(torch.tensor([[-1e4, 0.0, 1e4, 1.0, 1.0, 1.0]])), torch.tensor([[-0.0, 0.0, 1e4]]))
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(silu_mul(gate_up), torch.tensor([[-0.0, -100.0 / (1 + torch.tensor(100.0).exp()), 0.0, 100.0]]))


@pytest.mark.parametrize("gated", GATED)
def test_input_is_left_alone(gated):
    gate_up = torch.randn(3, 16)
    before = gate_up.clone()
    gated(gate_up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [13, 172, 1001, 1536])
@pytest.mark.parametrize("gated", GATED)
def test_a_rows_bits_depend_on_that_row_alone(gated, width, dtype):
    gate_up = (torch.randn(70, 2 * width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)
    assert_rows_independent(gated, gate_up)


@pytest.mark.parametrize("width", [13, 1001, 1536])
def test_a_capped_rows_bits_depend_on_that_row_alone(width):
    x = torch.randn(70, width, generator=torch.Generator().manual_seed(width)) * 20
    assert_rows_independent(lambda rows: soft_cap_(rows.clone(), 5.0), x)
