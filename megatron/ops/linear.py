"""The matrix products of linear layers behind one seam, so that another implementation replaces them all at once.

A backend works on local 2-D tensors and knows no communication: x [n, in], weight [out, in], y [n, out], g = dL/dy
[n, out]. `LINEAR_BACKENDS` maps the value of --transformer-impl to a factory (device, params dtype) -> backend; a
variant adds an entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn import functional as F

from megatron.ops.compute_dtype import matmul_dtype, row_blocks


class LinearBackend(Protocol):
    """The three products of a linear layer."""

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x @ weight^T + bias."""

    def dgrad(self, g: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """g @ weight: the gradient of x."""

    def wgrad(self, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """g^T @ x: the gradient of the weight."""


class LocalLinear:
    """torch's own matrix products, operands widened to `compute_dtype` and results rounded back where it differs."""

    def __init__(self, device: torch.device, dtype: torch.dtype):
        self.dtype = dtype
        self.compute_dtype = matmul_dtype(dtype, device)

    def forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """See `LinearBackend.forward`."""
        if self.compute_dtype == self.dtype:
            return F.linear(x, weight, bias)
        # The result before the wide operands: what lives long does not end up between what is freed at once.
        out = x.new_empty((len(x), len(weight)))
        wide_weight, wide_bias = weight.to(self.compute_dtype), bias if bias is None else bias.to(self.compute_dtype)
        for rows in row_blocks(len(x), max(weight.shape)):
            out[rows] = F.linear(x[rows].to(self.compute_dtype), wide_weight, wide_bias)
        return out

    def dgrad(self, g: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """See `LinearBackend.dgrad`."""
        if self.compute_dtype == self.dtype:
            return g @ weight
        out = g.new_empty((len(g), weight.shape[1]))
        wide_weight = weight.to(self.compute_dtype)
        for rows in row_blocks(len(g), max(weight.shape)):
            out[rows] = g[rows].to(self.compute_dtype) @ wide_weight
        return out

    def wgrad(self, g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """See `LinearBackend.wgrad`."""
        if self.compute_dtype == self.dtype:
            return g.t() @ x
        out = g.new_empty((g.shape[1], x.shape[1]))
        total = torch.zeros_like(out, dtype=self.compute_dtype)
        for rows in row_blocks(len(g), max(out.shape)):
            total.addmm_(g[rows].to(self.compute_dtype).t(), x[rows].to(self.compute_dtype))
        return out.copy_(total)


def product_into_(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, accumulate: bool = False) -> None:
    """Write a @ b into `out`, or add it; a and b have one dtype, the sum is made in it and rounded to that of `out`."""
    if out.dtype == a.dtype:
        torch.addmm(out, a, b, beta=float(accumulate), out=out)
    elif accumulate:
        out.add_(a @ b)
    else:
        out.copy_(a @ b)


LINEAR_BACKENDS: dict[str, Callable[[torch.device, torch.dtype], LinearBackend]] = {"local": LocalLinear}


def linear_backend(name: str, device: torch.device, dtype: torch.dtype) -> LinearBackend:
    """The backend registered under `name`; ValueError naming --transformer-impl if there is none."""
    if name not in LINEAR_BACKENDS:
        raise ValueError(f"--transformer-impl {name} is not available here; available: {', '.join(LINEAR_BACKENDS)}")
    return LINEAR_BACKENDS[name](device, dtype)


class _Linear(torch.autograd.Function):
    """y = x W^T + b on local tensors of any leading shape; saves x and W."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, backend: LinearBackend
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.backend = backend
        ctx.has_bias = bias is not None
        return backend.forward(x.flatten(0, -2), weight, bias).view(*x.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = g.flatten(0, -2)
        dx = ctx.backend.dgrad(rows, weight).view(x.shape) if ctx.needs_input_grad[0] else None
        dw = ctx.backend.wgrad(rows, x.flatten(0, -2)) if ctx.needs_input_grad[1] else None
        db = rows.sum(0) if ctx.has_bias and ctx.needs_input_grad[2] else None
        return dx, dw, db, None


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, backend: LinearBackend) -> torch.Tensor:
    """x [..., in], weight [out, in], bias [out] -> [..., out], differentiable, through `backend`."""
    return _Linear.apply(x, weight, bias, backend)
