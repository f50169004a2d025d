"""Forms of the linear layer against the oracle, and the invariant one against itself in other company."""

import pytest
import torch

from perdure.ops.linear import linear_invariant, linear_plain, linear_reference
from tests.ops.rows import assert_rows_independent

SIZES = [(64, 96), (576, 960), (1536, 576), (192, 64), (64, 515)]  # inputs, outputs


def _case(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    w = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    return x, w, torch.randn(num_outputs, generator=generator)


@pytest.mark.parametrize("form", [linear_plain, linear_invariant])
@pytest.mark.parametrize("num_rows", [1, 8, 13])
@pytest.mark.parametrize("with_bias", [False, True])
def test_forms_equal_the_reference(form, num_rows, with_bias):
    x, w, b = _case(num_rows, 576, 960)
    bias = b if with_bias else None
    assert form(x, w, bias).shape == (num_rows, 960)
    torch.testing.assert_close(form(x, w, bias), linear_reference(x, w, bias), rtol=0, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_rows_bits_depend_on_that_row_alone(size, with_bias):
    x, w, b = _case(130, *size)
    assert_rows_independent(lambda rows: linear_invariant(rows, w, b if with_bias else None), x)


def test_whole_tiles_are_not_copied(monkeypatch):
    seen = []
    monkeypatch.setattr("perdure.ops.linear.functional.linear", lambda x, w, b: seen.append(x) or x)
    x = torch.ones(16, 4)
    linear_invariant(x, torch.ones(4, 4))
    assert seen[0] is x
    linear_invariant(x[:11], torch.ones(4, 4))
    assert seen[1].shape == (16, 4)
    assert not seen[1][11:].any()


def test_no_rows_give_no_rows():
    x, w, b = _case(0, 64, 96)
    assert linear_invariant(x, w, b).shape == (0, 96)
