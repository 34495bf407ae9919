"""Norms against torch's own, in fp64 gradients and in what they keep."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from megatron.ops.norm import layer_norm, rms_norm


def _inputs(dtype=torch.float64, hidden=8):
    torch.manual_seed(0)
    x = torch.randn(3, 2, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(hidden, dtype=dtype, requires_grad=True)
    bias = torch.randn(hidden, dtype=dtype, requires_grad=True)
    return x, weight, bias


@pytest.mark.parametrize("plus_one", [False, True])
def test_gradients(plus_one):
    x, weight, bias = _inputs()
    assert torch.autograd.gradcheck(lambda *a: rms_norm(*a, 1e-5, plus_one), (x, weight))
    assert torch.autograd.gradcheck(lambda *a: layer_norm(*a, 1e-5, plus_one), (x, weight, bias))


@pytest.mark.parametrize("plus_one", [False, True])
def test_values(plus_one):
    x, weight, bias = _inputs()
    scale = weight + 1 if plus_one else weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-3, plus_one), F.rms_norm(x, (8,), scale, 1e-3))
    torch.testing.assert_close(layer_norm(x, weight, bias, 1e-3, plus_one), F.layer_norm(x, (8,), scale, bias, 1e-3))


def test_rms_norm_saves_only_input_and_statistics():
    saved = []
    x, weight, _ = _inputs(torch.bfloat16, 64)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        rms_norm(x, weight, 1e-5)
    assert {t.untyped_storage().data_ptr() for t in saved if t.numel() > 6} == {
        t.untyped_storage().data_ptr() for t in (x, weight)
    }
    assert [(t.shape, t.dtype) for t in saved if t.numel() == 6] == [((3, 2, 1), torch.float32)]


@pytest.mark.parametrize("kind", ["layer", "rms"])
def test_low_precision_keeps_fp32_statistics(kind):
    x, weight, bias = _inputs(torch.bfloat16, 256)
    call = (lambda *a: layer_norm(*a, 1e-5)) if kind == "layer" else (lambda x, w, b: rms_norm(x, w, 1e-5))
    g = torch.randn_like(x)
    call(x, weight, bias).backward(g)
    wide = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
    expected = call(*wide)
    expected.backward(g.float())
    # One rounding to bf16 (relative 2^-9); statistics in bf16 would cost as much again in every entry.
    torch.testing.assert_close(x.grad.float(), wide[0].grad, rtol=2**-8, atol=1e-3)
    torch.testing.assert_close(weight.grad.float(), wide[1].grad, rtol=2**-8, atol=1e-3)


def test_wide_input_gives_the_weights_dtype():
    x, weight, bias = _inputs(torch.float32)
    low_weight, low_bias = weight.detach().bfloat16().requires_grad_(), bias.detach().bfloat16().requires_grad_()
    for y in (rms_norm(x, low_weight, 1e-5), layer_norm(x, low_weight, low_bias, 1e-5)):
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        assert x.grad.dtype == torch.float32 and low_weight.grad.dtype == torch.bfloat16


def test_meta_kernels_have_the_shapes_of_the_real_ones():
    x, weight, bias = (t.detach().to("meta").requires_grad_() for t in _inputs(torch.bfloat16))
    for y in (rms_norm(x, weight, 1e-5), layer_norm(x, weight, bias, 1e-5)):
        y.sum().backward()
        assert y.shape == x.shape == x.grad.shape and y.dtype == torch.bfloat16
