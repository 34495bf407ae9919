"""Activations against their formulas; gradients; the gated ones keep their input only."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from megatron.ops.activation import GATED, PLAIN, activation

CURVES = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu-tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "squared-relu": lambda x: F.relu(x) ** 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "quick-gelu": lambda x: x * torch.sigmoid(1.702 * x),
}
# (offset, clamp value); some of the inputs below are beyond 0.7 on either side.
NUMBERS = [(0.0, None), (1.0, None), (0.0, 0.7), (1.0, 0.7), (-0.5, 7.0)]


def _input(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.randn(5, 12, dtype=dtype, requires_grad=True)


def _glu(x, curve, offset, clamp):
    gate, up = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(min=-clamp, max=clamp)
    return CURVES[curve](gate) * (up + offset)


def _assert_same(function, formula):
    x = _input()
    out, expected = function(x), formula(x)
    torch.testing.assert_close(out, expected)
    g = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, x, g), torch.autograd.grad(expected, x, g))
    assert torch.autograd.gradcheck(function, (x,))


@pytest.mark.parametrize("name", PLAIN)
def test_plain(name):
    _assert_same(activation(name), CURVES[name])


@pytest.mark.parametrize(("offset", "clamp"), NUMBERS)
@pytest.mark.parametrize("name", GATED)
def test_gated(name, offset, clamp):
    _assert_same(activation(name, offset, clamp), lambda x: _glu(x, GATED[name], offset, clamp))


def test_the_gradient_at_the_clamp_value_is_that_of_clamp():
    x = torch.tensor([[2.0, -2.0, 3.0, 2.0, -2.0, -3.0]], dtype=torch.float64, requires_grad=True)
    function = activation("quick-geglu", 1.0, 2.0)
    (got,) = torch.autograd.grad(function(x).sum(), x)
    (expected,) = torch.autograd.grad(_glu(x, "quick-gelu", 1.0, 2.0).sum(), x)
    torch.testing.assert_close(got, expected)
    assert (got == 0).tolist() == [[False, False, True, False, False, True]]


@pytest.mark.parametrize("clamp", [None, 0.7])
@pytest.mark.parametrize("name", GATED)
def test_low_precision_is_near_the_formula(name, clamp):
    x = _input(torch.bfloat16)
    out = activation(name, 1.0, clamp)(x)
    assert out.dtype == torch.bfloat16
    (gradient,) = torch.autograd.grad(out.sum(), x)
    wide = x.detach().double().requires_grad_()
    expected = _glu(wide, GATED[name], 1.0, clamp)
    (expected_gradient,) = torch.autograd.grad(expected.sum(), wide)
    # A few roundings of 2^-9 each, of values up to about 10.
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(gradient.double(), expected_gradient, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("offset", "clamp"), NUMBERS)
@pytest.mark.parametrize("name", [*GATED, "squared-relu"])
def test_saves_its_input_only(name, offset, clamp):
    saved = []
    x = _input()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        activation(name, offset, clamp)(x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
