"""Activations against their formulas; gradients; the gated ones keep their input only."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from megatron.ops.activation import ACTIVATIONS, GATED

FORMULAS = {
    "gelu": lambda x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))),
    "gelu-tanh": lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "squared-relu": lambda x: F.relu(x) ** 2,
    "swiglu": lambda x: F.silu(x[..., :6]) * x[..., 6:],
    "geglu": lambda x: F.gelu(x[..., :6]) * x[..., 6:],
    "geglu-tanh": lambda x: F.gelu(x[..., :6], approximate="tanh") * x[..., 6:],
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activation(name):
    torch.manual_seed(0)
    x = torch.randn(5, 12, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(ACTIVATIONS[name](x), FORMULAS[name](x))
    assert torch.autograd.gradcheck(ACTIVATIONS[name], (x,))


@pytest.mark.parametrize("name", [*GATED, "squared-relu"])
def test_saves_its_input_only(name):
    saved = []
    x = torch.randn(5, 12, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        ACTIVATIONS[name](x)
    assert [t.data_ptr() for t in saved] == [x.data_ptr()]
