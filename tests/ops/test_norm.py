"""Root-mean-square norm: its definition, and rows in other company."""

import pytest
import torch

from perdure.ops.norm import rms_norm, rms_norm_once
from tests.ops.rows import assert_rows_independent


def test_definition():
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * 3
    weight = torch.linspace(0.5, 1.5, 96)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    for norm in (rms_norm, rms_norm_once):
        torch.testing.assert_close(norm(x, weight, 1e-5), expected.float(), rtol=1e-6, atol=1e-6)


def test_input_is_left_alone():
    x = torch.randn(3, 8)
    before = x.clone()
    rms_norm(x, torch.ones(8), 1e-5)
    assert torch.equal(x, before)


def test_narrow_types_are_normalised_in_fp32():
    x = torch.full((2, 64), 300.0, dtype=torch.float16)  # the square overflows fp16
    assert torch.equal(rms_norm(x, torch.ones(64, dtype=torch.float16), 1e-5), torch.ones(2, 64, dtype=torch.float16))


@pytest.mark.parametrize("width", [64, 172, 576, 4096])
def test_a_rows_bits_depend_on_that_row_alone(width):
    x = torch.randn(70, width, generator=torch.Generator().manual_seed(width))
    weight = torch.linspace(0.5, 1.5, width)
    assert_rows_independent(lambda rows: rms_norm(rows, weight, 1e-5), x)


@pytest.mark.parametrize("head_dim", [16, 80, 128, 256])
def test_heads_of_a_row_are_normalised_apart(head_dim):
    """As queries and keys are, in a view of a wider product."""
    x = torch.randn(70, 9 * head_dim, generator=torch.Generator().manual_seed(head_dim))
    weight = torch.linspace(0.5, 1.5, 5 * head_dim).view(5, head_dim)

    def function(rows: torch.Tensor) -> torch.Tensor:
        return rms_norm(rows.view(-1, 9, head_dim)[:, :5], weight, 1e-5)

    assert_rows_independent(function, x)
    for head in range(5):
        alone = rms_norm(x[:, head * head_dim : (head + 1) * head_dim], weight[head], 1e-5)
        torch.testing.assert_close(function(x)[:, head], alone, rtol=1e-6, atol=1e-6)


def test_one_rounding_at_the_end():
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).bfloat16()
    weight = torch.linspace(0.5, 1.5, 32)
    assert torch.equal(rms_norm_once(x, weight, 1e-5), rms_norm(x.float(), weight, 1e-5).bfloat16())
