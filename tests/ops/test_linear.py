"""The linear seam: products equal torch's, gradients check, low precision on a CPU is rounded once."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

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


def test_low_precision_is_rounded_once():
    torch.manual_seed(0)
    x, weight = torch.randn(64, 256).bfloat16(), torch.randn(32, 256).bfloat16()
    backend = LocalLinear(CPU, torch.bfloat16)
    exact = F.linear(x.double(), weight.double())
    # Half a unit in the last place of bf16's 8 bits, plus the fp32 sum's own error.
    assert ((backend.forward(x, weight).double() - exact).abs() <= exact.abs() * 2.0**-8 + 1e-4).all()
    assert backend.wgrad(x, x).dtype == backend.dgrad(backend.forward(x, weight), weight).dtype == torch.bfloat16


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
