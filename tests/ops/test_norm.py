"""Root-mean-square norm: its definition, and rows in other company."""

import pytest
import torch

from perdure.ops.norm import rms_norm
from tests.ops.rows import assert_rows_independent


def test_definition():
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * 3
    weight = torch.linspace(0.5, 1.5, 96)
    wide = x.double()
    expected = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected.float(), rtol=1e-6, atol=1e-6)


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
