"""The matrix product of a column-split linear layer, with its communication hidden behind its own products.

Forward gathers the sequence (under sequence parallelism) and multiplies. Backward under sequence parallelism, in this
order: start the gather of x again | dgrad | wait, start the reduce-scatter of dx | wgrad | wait. Without: dgrad |
start the all-reduce of dx | wgrad | wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron.distributed.collectives import (
    Group,
    all_gather,
    all_gather_into_,
    all_reduce_,
    reduce_scatter_into_,
)
from megatron.distributed.transport import Done, Work
from megatron.ops.linear import LinearBackend


class SplitInput(NamedTuple):
    """How the input of a column-split product lies on the ranks, and who multiplies."""

    group: Group
    sequence_parallel: bool
    backend: LinearBackend


class Gathering:
    """The whole input of a column-split product for its backward pass: at once, or from a gather that was started."""

    def __init__(self, x: torch.Tensor, how: SplitInput):
        self.whole, self.work = x, Done()
        if how.sequence_parallel:
            self.whole = x.new_empty((x.shape[0] * how.group.size, *x.shape[1:]))
            self.work = all_gather_into_(self.whole, x.contiguous(), how.group, async_op=True)

    def wait(self) -> torch.Tensor:
        """The whole input as rows, [s b, h]."""
        self.work.wait()
        return self.whole.flatten(0, -2)


def start_input_gradient(dx: torch.Tensor, how: SplitInput) -> tuple[torch.Tensor, Work]:
    """This rank's part dx [s, b, h] of a sum -> what is the gradient of the layer's input once waited for."""
    if how.sequence_parallel:
        out = dx.new_empty((dx.shape[0] // how.group.size, *dx.shape[1:]))
        return out, reduce_scatter_into_(out, dx, how.group, async_op=True)
    return dx, all_reduce_(dx, how.group, async_op=True)


def _chosen(weight: torch.Tensor, rows: Sequence[slice] | None) -> torch.Tensor:
    return weight if rows is None else torch.cat([weight[part] for part in rows])


def _spread(gradient: torch.Tensor, whole: torch.Tensor, rows: Sequence[slice] | None) -> torch.Tensor:
    """The gradient of the chosen rows as one of the whole weight, zero elsewhere."""
    if rows is None:
        return gradient
    out = torch.zeros_like(whole)
    done = 0
    for part in rows:
        count = part.stop - part.start
        out[part] = gradient[done : done + count]
        done += count
    return out


class _ColumnLinear(torch.autograd.Function):
    """Saves the input as it came (a sequence shard under sequence parallelism) and the weight."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        how: SplitInput,
        rows: Sequence[slice] | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight, bias)
        ctx.how, ctx.rows = how, rows
        whole = all_gather(x, how.group) if how.sequence_parallel else x
        bias = bias if bias is None else _chosen(bias, rows)
        return how.backend.forward(whole.flatten(0, -2), _chosen(weight, rows), bias).view(*whole.shape[:-1], -1)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, bias = ctx.saved_tensors
        how, rows = ctx.how, ctx.rows
        gathering = Gathering(x, how)
        g_rows = g.flatten(0, -2)
        dx, sending = None, Done()
        if ctx.needs_input_grad[0]:
            dx = how.backend.dgrad(g_rows, _chosen(weight, rows)).view(*g.shape[:-1], -1)
        x_rows = gathering.wait()
        if dx is not None:
            dx, sending = start_input_gradient(dx, how)
        dw = _spread(how.backend.wgrad(g_rows, x_rows), weight, rows) if ctx.needs_input_grad[1] else None
        db = _spread(g_rows.sum(0), bias, rows) if ctx.needs_input_grad[2] else None
        sending.wait()
        return dx, dw, db, None, None


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    how: SplitInput,
    rows: Sequence[slice] | None = None,
) -> torch.Tensor:
    """x W^T + b with W's rows split over the group.

    Shapes: x [s/t, b, h] under sequence parallelism, else [s, b, h] replicated; weight [out/t, h]; result [s, b,
    out/t]. Group: all-gather forward, all-gather and reduce-scatter backward under sequence parallelism; else all-
    reduce backward. `rows`: multiply only these rows of `weight` (which is whole on every rank); gradients of the
    others are zero.
    """
    return _ColumnLinear.apply(x, weight, bias, how, rows)
