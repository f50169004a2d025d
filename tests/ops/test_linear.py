"""Forms of the linear layer against the oracle, and the invariant one against itself in other company."""

import pytest
import torch

from perdure.ops.linear import LINEAR_FORMS, invariant, packed, plain, reference
from tests.ops.rows import assert_rows_independent

SIZES = [(64, 96), (576, 960), (1536, 576), (4100, 40), (192, 64), (64, 515)]  # inputs, outputs


def _case(num_rows: int, num_inputs: int, num_outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_inputs)
    x = torch.randn(num_rows, num_inputs, generator=generator)
    w = torch.randn(num_outputs, num_inputs, generator=generator) / num_inputs**0.5
    return x, w, torch.randn(num_outputs, generator=generator)


@pytest.mark.parametrize("form", [plain, invariant, packed])
@pytest.mark.parametrize("num_rows", [1, 8, 13])
@pytest.mark.parametrize("with_bias", [False, True])
def test_forms_equal_the_reference(form, num_rows, with_bias):
    x, w, b = _case(num_rows, 576, 960)
    bias = b if with_bias else None
    assert form(w, bias)(x).shape == (num_rows, 960)
    torch.testing.assert_close(form(w, bias)(x), reference(w, bias)(x), rtol=0, atol=1e-5)


@pytest.mark.parametrize("form", [invariant, packed])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_rows_bits_depend_on_that_row_alone(form, size, with_bias):
    x, w, b = _case(130, *size)
    assert_rows_independent(form(w, b if with_bias else None), x)


@pytest.mark.parametrize("num_rows", [512, 1000, 2049])
def test_many_rows_give_the_bits_of_few(num_rows):
    x, w, b = _case(num_rows, 576, 960)
    product = packed(w, b)
    whole = product(x)
    for rows in (slice(0, 1), slice(num_rows - 3, num_rows), slice(100, 164)):
        assert torch.equal(product(x[rows]), whole[rows])


def test_what_cannot_be_packed_is_refused():
    with pytest.raises(ValueError, match="float32 on a CPU"):
        packed(torch.ones(8, 8, dtype=torch.bfloat16))


def test_whole_tiles_are_not_copied(monkeypatch):
    seen = []
    monkeypatch.setattr("perdure.ops.linear.functional.linear", lambda x, w, b: seen.append(x) or x)
    x = torch.ones(16, 4)
    product = invariant(torch.ones(4, 4))
    product(x)
    assert seen[0] is x
    product(x[:11])
    assert seen[1].shape == (16, 4)
    assert not seen[1][11:].any()


@pytest.mark.parametrize("form", LINEAR_FORMS.values())
def test_no_rows_give_no_rows(form):
    x, w, b = _case(0, 64, 96)
    assert form(w, b)(x).shape == (0, 96)
