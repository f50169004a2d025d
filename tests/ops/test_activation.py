"""silu(gate) * up: its definition, and rows in other company, at widths that are not whole vectors too."""

import pytest
import torch
from torch.nn import functional

from perdure.ops.activation import silu_mul
from tests.ops.rows import assert_rows_independent


def test_definition():
    gate_up = torch.randn(7, 2 * 50, generator=torch.Generator().manual_seed(0)) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    torch.testing.assert_close(silu_mul(gate_up), (functional.silu(gate) * up).float(), rtol=1e-6, atol=1e-6)


def test_extremes_stay_finite():
    gate_up = torch.tensor([[-1e4, -100.0, 0.0, 100.0, 1.0, 1.0, 1.0, 1.0]])
    assert torch.equal(silu_mul(gate_up), torch.tensor([[-0.0, -100.0 / (1 + torch.tensor(100.0).exp()), 0.0, 100.0]]))


def test_input_is_left_alone():
    gate_up = torch.randn(3, 16)
    before = gate_up.clone()
    silu_mul(gate_up)
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [13, 172, 1001, 1536])
def test_a_rows_bits_depend_on_that_row_alone(width, dtype):
    gate_up = (torch.randn(70, 2 * width, generator=torch.Generator().manual_seed(width)) * 3).to(dtype)
    assert_rows_independent(silu_mul, gate_up)
