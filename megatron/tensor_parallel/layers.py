"""Column- and row-split linear layers: each states its parameters' sharding as a spec and multiplies between two
borders.

Without sequence parallelism the residual stream is replicated over tp; with it, split along the sequence (dim 0).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.distributed.context import ParallelContext
from megatron.ops.linear import linear, linear_backend
from megatron.tensor_parallel.column_linear import SplitInput, column_linear
from megatron.tensor_parallel.regions import leave_split
from megatron.topology.param_spec import ParamSpec


def residual_partial_over(ctx: ParallelContext) -> tuple[str, ...]:
    """`partial_over` of a replicated parameter that acts on the residual stream: under sequence parallelism each tp
    rank
    sees other tokens."""
    return ("tp",) if ctx.sequence_parallel else ()


def split_input(ctx: ParallelContext, backend: str = "local") -> SplitInput:
    """How column-split products of this run get their input."""
    return SplitInput(ctx.tp, ctx.sequence_parallel, linear_backend(backend, ctx.device, ctx.params_dtype))


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, W split by output entries.

    x: the residual stream ([s/t, b, h] or [s, b, h]); y: [s, b, out/t].
    """

    def __init__(
        self,
        ctx: ParallelContext,
        weight: ParamSpec,
        bias: ParamSpec | None = None,
        rows: Sequence[slice] | None = None,
    ):
        """`rows`: use only these stored rows of a weight that every rank holds whole."""
        super().__init__()
        self.weight = ctx.parameter(weight)
        self.bias = None if bias is None else ctx.parameter(bias)
        self.rows = rows
        self.how = split_input(ctx)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        return column_linear(x, self.weight, self.bias, self.how, self.rows)


class RowParallelLinear(nn.Module):
    """y = x W^T + b, W split by input entries; b, whole on every rank, is added once, after the sum over ranks.

    x: [s, b, in/t]; y: the residual stream ([s/t, b, h] or [s, b, h]).
    """

    def __init__(self, ctx: ParallelContext, weight: ParamSpec, bias: ParamSpec | None = None):
        super().__init__()
        self.weight = ctx.parameter(weight)
        self.bias = None if bias is None else ctx.parameter(bias)
        self.group, self.sequence_parallel = ctx.tp, ctx.sequence_parallel
        self.backend = linear_backend("local", ctx.device, ctx.params_dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """See the class."""
        y = leave_split(linear(x, self.weight, None, self.backend), self.group, self.sequence_parallel)
        return y if self.bias is None else y + self.bias
