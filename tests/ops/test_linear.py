"""The linear seam: products equal torch's, gradients check, low precision on a CPU is rounded once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron.ops import compute_dtype
from megatron.ops.linear import LocalLinear, linear, linear_backend, product_into_

CPU = torch.device("cpu")


def test_gradients():
    torch.manual_seed(0)
    x = torch.randn(3, 2, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(5, dtype=torch.float64, requires_grad=True)
    backend = linear_backend("local", CPU, torch.float64)
    assert torch.autograd.gradcheck(lambda *a: linear(*a, backend), (x, weight, bias))
    assert torch.equal(linear(x, weight, bias, backend), F.linear(x, weight, bias))


@pytest.mark.parametrize("rows_of_a_block", [1, 7, 64])
def test_low_precision_is_rounded_once(rows_of_a_block, monkeypatch):
    monkeypatch.setattr(compute_dtype, "WIDENED_BYTES", 4 * 256 * rows_of_a_block)
    torch.manual_seed(0)
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(32, 256).bfloat16()
    backend = LocalLinear(CPU, torch.bfloat16)
    exact = F.linear(x.double(), weight.double())
    # Half a unit in the last place of bf16's 8 bits, plus the fp32 sum's own error.
    assert ((backend.forward(x, weight).double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()
    g = backend.forward(x, weight)
    for got, factors in ((backend.wgrad(g, x), (g.t(), x)), (backend.dgrad(g, weight), (g, weight))):
        exact = factors[0].double() @ factors[1].double()
        assert got.dtype == torch.bfloat16 and got.shape == exact.shape
        assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-3).all()


def test_unknown_backend_names_the_flag():
    with pytest.raises(ValueError, match="--transformer-impl nonsense .* local"):
        linear_backend("nonsense", CPU, torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_into_a_part(dtype):
    torch.manual_seed(0)
    a, b = torch.randn(4, 5), torch.randn(5, 3)
    whole = torch.full((6, 9), 7.0, dtype=dtype)
    product_into_(whole[1:5, 2:5], a, b)
    product_into_(whole[1:5, 2:5], a, b, accumulate=True)
    torch.testing.assert_close(whole[1:5, 2:5].float(), 2 * (a @ b), rtol=2**-7, atol=2**-7)
    whole[1:5, 2:5] = 7.0
    assert (whole == 7.0).all()
