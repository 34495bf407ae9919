"""MLP activations that save nothing but their input for the backward pass.

Gated ones take gate and up halves side by side in the last dimension: [..., 2 f] -> [..., f].
"""

from __future__ import annotations

from collections.abc import Callable
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


_CURVES = {"silu": _Curve(F.silu, _silu_backward), "gelu": _gelu("none"), "gelu-tanh": _gelu("tanh")}


class _Gated(torch.autograd.Function):
    """curve(gate) * up; saves [gate | up] as it came, recomputes the rest."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, curve: str) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.curve = curve
        gate, up = x.chunk(2, dim=-1)
        return _CURVES[curve].forward(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        curve = _CURVES[ctx.curve]
        gate, up = x.chunk(2, dim=-1)
        dx = torch.empty_like(x)
        dgate, dup = dx.chunk(2, dim=-1)
        torch.mul(g, curve.forward(gate), out=dup)
        curve.backward_into(g * up, gate, dgate)
        return dx, None


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


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up (Shazeer 2020)."""
    return _Gated.apply(x, "silu")


def geglu(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with the exact (erf) GELU."""
    return _Gated.apply(x, "gelu")


def geglu_tanh(x: torch.Tensor) -> torch.Tensor:
    """gelu(gate) * up with GELU's tanh approximation."""
    return _Gated.apply(x, "gelu-tanh")


def squared_relu(x: torch.Tensor) -> torch.Tensor:
    """relu(x)^2 (So et al. 2021)."""
    return _SquaredRelu.apply(x)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """The exact (erf) GELU."""
    return F.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU's tanh approximation."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": gelu,
    "gelu-tanh": gelu_tanh,
    "squared-relu": squared_relu,
    "swiglu": swiglu,
    "geglu": geglu,
    "geglu-tanh": geglu_tanh,
}
GATED = ("swiglu", "geglu", "geglu-tanh")
