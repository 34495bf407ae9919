"""Rotary position embedding by position ids, so that packed documents and split sequences need nothing else.

Letters: S sequence, B batch, N heads, D head width, R rotated part of D (the first R entries; the rest passes through).
Source: Su et al. 2021, section 3.2.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch


class RotaryAngles(NamedTuple):
    """cos and sin of position x frequency, fp32 [S, B, 1, R/2]; `interleaved` pairs (0,1), (2,3), not halves."""

    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool


def rotary_frequencies(
    head_dim: int, *, base: float, percent: float = 1.0, llama3_factor: float | None = None
) -> torch.Tensor:
    """fp32 [R/2]: base^(-2i/R) with R = head_dim x percent; `llama3_factor` applies Llama 3's scaling for long
    contexts.

    That scaling divides frequencies whose wavelength exceeds the old context of 8192 by the factor, keeps those below
    a quarter of it, and blends between (low factor 1, high factor 4: the constants of Meta's reference code, which
    Megatron uses too).
    """
    rotated = int(head_dim * percent)
    frequencies = base ** (-torch.arange(0, rotated, 2, dtype=torch.float32) / rotated)
    if llama3_factor is None:
        return frequencies
    low, high, old_context = 1.0, 4.0, 8192.0
    turns = old_context * frequencies / (2.0 * math.pi)  # rotations within the old context
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / llama3_factor * (1.0 - blend) + frequencies * blend


def rotary_angles(
    positions_SB: torch.Tensor, frequencies: torch.Tensor, *, interleaved: bool = False, interpolation: float = 1.0
) -> RotaryAngles:
    """Angles for int64 position ids; `interpolation` divides the positions (linear position interpolation)."""
    angles = positions_SB.to(torch.float32)[..., None, None] / interpolation * frequencies
    return RotaryAngles(angles.cos(), angles.sin(), interleaved)


def _halves(x: torch.Tensor, rotated: int, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    if interleaved:
        return x[..., 0:rotated:2], x[..., 1:rotated:2]
    return x[..., : rotated // 2], x[..., rotated // 2 : rotated]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, backwards: bool) -> torch.Tensor:
    """A new contiguous tensor: each pair (a, b) turned to (a cos - b sin, b cos + a sin), in fp32 (or wider)."""
    rotated = 2 * cos.shape[-1]
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    a, b = _halves(x.to(torch.promote_types(x.dtype, torch.float32)), rotated, interleaved)
    out_a, out_b = _halves(out, rotated, interleaved)
    sign = -1.0 if backwards else 1.0
    out_a.copy_((a * cos).addcmul_(b, sin, value=-sign))
    out_b.copy_((b * cos).addcmul_(a, sin, value=sign))
    if rotated < x.shape[-1]:
        out[..., rotated:] = x[..., rotated:]
    return out


class _Rope(torch.autograd.Function):
    """Saves the angles only, which all layers share; backward turns the other way."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotate(x, cos, sin, interleaved, backwards=False)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _rotate(g, cos, sin, ctx.interleaved, backwards=True), None, None, None


def apply_rotary(x: torch.Tensor, angles: RotaryAngles) -> torch.Tensor:
    """Rotate the first R entries of every head by its token's angles: x [S, B, heads, D] or [S, B, groups, heads, D].

    Returns a new contiguous tensor in x's dtype.
    """
    cos, sin = (t.unsqueeze(2) if x.dim() == 5 else t for t in (angles.cos, angles.sin))
    return _Rope.apply(x, cos, sin, angles.interleaved)
