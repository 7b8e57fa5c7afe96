import pytest
import torch

from gnnplan.runtime.models import functions as dense


@pytest.mark.parametrize("num_rows", [0, 1, 700, 1024, 5000])
@pytest.mark.parametrize("relu", [False, True])
def test_linear_equals_torch_for_any_number_of_rows(num_rows, relu):
    x, weight, bias = torch.randn(num_rows, 96), torch.randn(200, 96), torch.randn(200)
    expected = torch.nn.functional.linear(x.double(), weight.double(), bias.double())
    expected = expected.relu() if relu else expected
    found = dense.linear_dense(x, weight, bias, relu=relu)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [0, 700, 1024, 5120, 9216])
def test_weight_gradient_equals_the_product(num_rows):
    x, grad = torch.randn(num_rows, 96), torch.randn(num_rows, 200)
    found = dense.weight_gradient(grad, x)
    expected = grad.double().t() @ x.double()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("num_rows", [513, 5000])
@pytest.mark.parametrize("out_width", [64, 700])
def test_rows_that_are_no_multiple_need_no_padded_copy_of_all(num_rows, out_width):
    x, weight = torch.randn(num_rows, 600), torch.randn(out_width, 600)
    expected = x.double() @ weight.double().t()
    torch.testing.assert_close(
        dense.linear_dense(x, weight, None).double(), expected, rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("spare", [0, 100, 512])
def test_weight_gradient_takes_zero_rows_beyond_the_inputs(spare):
    x, grad = torch.randn(4700, 96), torch.randn(4700, 200)
    longer = torch.cat([grad, torch.zeros(spare, 200)])
    expected = grad.double().t() @ x.double()
    found = dense.weight_gradient(longer, x).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-3)


def test_padding_adds_zero_rows_up_to_the_multiple():
    x = torch.ones(513, 3)
    padded = dense.with_padding(x)
    assert padded.shape == (1024, 3)
    assert torch.equal(padded[:513], x)
    assert padded[513:].count_nonzero() == 0
    assert dense.with_padding(padded) is padded
