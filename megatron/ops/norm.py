"""LayerNorm and RMSNorm over the last dimension: fp32 statistics, only they and the input saved for backward.

The input may be wider than the weight (an fp32 residual stream); the result has the weight's dtype. With `plus_one`
the weight is stored minus one (--apply-layernorm-1p).
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.ops.library import define


def _layer_norm_gpu(x, weight, bias, eps):
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    return torch.native_layer_norm(x, weight.shape, weight, bias, eps)


def _layer_norm_cpu(x, weight, bias, eps):
    # Given low-precision tensors the CPU kernel rounds statistics and partial sums; widened ones it does not.
    y, mean, rstd = _layer_norm_gpu(_at_least_fp32(x), weight, bias, eps)
    return y.to(x.dtype), mean, rstd


def _layer_norm_backward_gpu(g, x, mean, rstd, weight, bias):
    g, weight, bias = g.to(x.dtype), weight.to(x.dtype), bias.to(x.dtype)
    return torch.ops.aten.native_layer_norm_backward(g, x, weight.shape, mean, rstd, weight, bias, [True, True, True])


def _layer_norm_backward_cpu(g, x, mean, rstd, weight, bias):
    dx, dw, db = _layer_norm_backward_gpu(g, _at_least_fp32(x), mean, rstd, weight, bias)
    return dx.to(x.dtype), dw, db


def _at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _rms_norm_gpu(x, weight, eps):
    return torch.ops.aten._fused_rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def _rms_norm_backward_gpu(g, x, rstd, weight):
    return torch.ops.aten._fused_rms_norm_backward(
        g.to(x.dtype), x, weight.shape, rstd, weight.to(x.dtype), [True, True]
    )


def _rms_norm_cpu(x, weight, eps):
    wide = _at_least_fp32(x)
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return (wide * rstd).mul_(weight).to(x.dtype), rstd


def _rms_norm_backward_cpu(g, x, rstd, weight):
    """y = x r w, r = (mean x^2 + eps)^-1/2: dx = r g w - x r^3 mean(g w x), dw = sum over tokens of g x r."""
    hidden = x.shape[-1]
    g, x_wide, weight_wide = (_at_least_fp32(t) for t in (g, x, weight))
    product = (g * x_wide).view(-1, hidden)
    r = rstd.view(-1, 1)
    dw = (r.t() @ product).view(hidden)
    pull = (product @ weight_wide).view(-1, 1).mul_(r).mul_(r).mul_(r).div_(-hidden)
    dx = torch.mul(g, weight_wide, out=product.view(x.shape)).mul_(rstd)
    dx.addcmul_(x_wide, pull.view(rstd.shape))
    return dx.to(x.dtype), dw


def _rms_norm_meta(x, weight, eps):
    statistics = torch.promote_types(x.dtype, torch.float32)
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=statistics)


def _rms_norm_backward_meta(g, x, rstd, weight):
    return torch.empty_like(x), weight.new_empty(weight.shape, dtype=x.dtype)


define(
    "layer_norm(Tensor x, Tensor weight, Tensor bias, float eps) -> (Tensor, Tensor, Tensor)",
    _layer_norm_gpu,
    CPU=_layer_norm_cpu,
)
define(
    "layer_norm_backward(Tensor g, Tensor x, Tensor mean, Tensor rstd, Tensor weight, Tensor bias)"
    " -> (Tensor, Tensor, Tensor)",
    _layer_norm_backward_gpu,
    CPU=_layer_norm_backward_cpu,
)
define(
    "rms_norm(Tensor x, Tensor weight, float eps) -> (Tensor, Tensor)",
    _rms_norm_gpu,
    CPU=_rms_norm_cpu,
    Meta=_rms_norm_meta,
)
define(
    "rms_norm_backward(Tensor g, Tensor x, Tensor rstd, Tensor weight) -> (Tensor, Tensor)",
    _rms_norm_backward_gpu,
    CPU=_rms_norm_backward_cpu,
    Meta=_rms_norm_backward_meta,
)


class _LayerNorm(torch.autograd.Function):
    """Saves x, the weight, and per row the mean and the reciprocal deviation in fp32."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, plus_one: bool
    ) -> torch.Tensor:
        ctx.plus_one = plus_one
        scale = weight + 1 if plus_one else weight
        y, mean, rstd = torch.ops.megatron.layer_norm(x, scale, bias, eps)
        ctx.save_for_backward(x, weight, bias, mean, rstd)
        return y.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias, mean, rstd = ctx.saved_tensors
        scale = weight + 1 if ctx.plus_one else weight
        dx, dw, db = torch.ops.megatron.layer_norm_backward(g.contiguous(), x, mean, rstd, scale, bias)
        return dx, dw.to(weight.dtype), db.to(bias.dtype), None, None


class _RMSNorm(torch.autograd.Function):
    """Saves x, the weight, and per row the reciprocal root mean square in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool) -> torch.Tensor:
        ctx.plus_one = plus_one
        y, rstd = torch.ops.megatron.rms_norm(x, weight + 1 if plus_one else weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y.to(weight.dtype)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        scale = weight + 1 if ctx.plus_one else weight
        dx, dw = torch.ops.megatron.rms_norm_backward(g.contiguous(), x, rstd, scale)
        return dx, dw.to(weight.dtype), None, None


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float, plus_one: bool = False
) -> torch.Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension; result in the weight's dtype."""
    return _LayerNorm.apply(x.contiguous(), weight, bias, eps, plus_one)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, plus_one: bool = False) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang, Sennrich 2019); in the weight's dtype."""
    return _RMSNorm.apply(x.contiguous(), weight, eps, plus_one)
