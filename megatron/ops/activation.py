"""MLP activations that save nothing but their input for the backward pass.

Gated ones take gate and up halves side by side in the last dimension: [..., 2 f] -> [..., f]. They compute
curve(gate) * (up + offset), with gate first limited to at most the clamp value and up to [-clamp value, clamp value].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

aten = torch.ops.aten


class _Curve(NamedTuple):
    """A pointwise function and its backward (g, x, out) writing g f'(x) into out."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    backward_into: Callable[..., torch.Tensor]


def _silu_backward(g: torch.Tensor, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    return aten.silu_backward(g, x, grad_input=out)


def _gelu(approximate: str) -> _Curve:
    return _Curve(
        lambda x: F.gelu(x, approximate=approximate),
        lambda g, x, out: aten.gelu_backward(g, x, approximate=approximate, grad_input=out),
    )


QUICK_GELU_SLOPE = 1.702

# x sigmoid(a x) = silu(a x) / a, so its slope is that of silu at a x.
_QUICK_GELU = _Curve(
    lambda x: torch.sigmoid(x * QUICK_GELU_SLOPE).mul_(x),
    lambda g, x, out: _silu_backward(g, x * QUICK_GELU_SLOPE, out),
)

_CURVES = {
    "silu": _Curve(F.silu, _silu_backward),
    "gelu": _gelu("none"),
    "gelu-tanh": _gelu("tanh"),
    "quick-gelu": _QUICK_GELU,
}


class _Gated(torch.autograd.Function):
    """curve(gate) * (up + offset) of clamped halves; saves [gate | up] as it came, recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, curve: str, offset: float, clamp: float | None) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.curve, ctx.offset, ctx.clamp = curve, offset, clamp
        gate, up = _clamped_halves(x, offset, clamp)
        return _CURVES[curve].forward(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        curve = _CURVES[ctx.curve]
        gate, up = _clamped_halves(x, ctx.offset, ctx.clamp)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(g, curve.forward(gate), out=dup)
        curve.backward_into(g * up, gate, dgate)
        if ctx.clamp is not None:  # as torch.clamp: no gradient beyond the limit, all of it at the limit
            raw_gate, raw_up = x.chunk(2, dim=-1)
            dgate.masked_fill_(raw_gate > ctx.clamp, 0.0)
            dup.masked_fill_(raw_up.abs() > ctx.clamp, 0.0)
        return dx, None, None, None


def _clamped_halves(x: torch.Tensor, offset: float, clamp: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    """gate and up + offset of x [..., 2 f], clamped; views of x where there is nothing to do."""
    gate, up = x.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return gate, up + offset if offset else up


class _SquaredRelu(torch.autograd.Function):
    """relu(x)^2."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return F.relu(x).square_()

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return F.relu(x).mul_(2.0).mul_(g)


def gated(x: torch.Tensor, curve: str, linear_offset: float = 0.0, clamp: float | None = None) -> torch.Tensor:
    """curve(gate) * (up + linear_offset) of clamped halves (Shazeer 2020, arXiv:2002.05202)."""
    return _Gated.apply(x, curve, linear_offset, clamp)


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (So et al. 2021)."""
    return _SquaredRelu.apply(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The exact (erf) GELU."""
    return F.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh approximation."""
    return F.gelu(x, approximate="tanh")


PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "squared-relu": squared_relu,
}
# Name -> curve of the gate.
GATED = {"swiglu": "silu", "geglu": "gelu", "geglu-tanh": "gelu-tanh", "quick-geglu": "quick-gelu"}


def activation(
    name: str, linear_offset: float = 0.0, clamp: float | None = None
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function called `name`; the numbers are for the gated ones."""
    if name in GATED:
        return partial(gated, curve=GATED[name], linear_offset=linear_offset, clamp=clamp)
    return PLAIN[name]
