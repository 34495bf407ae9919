"""The word embedding split over tp by vocabulary rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from megatron.distributed.context import ParallelContext
from megatron.tensor_parallel.regions import leave_split
from megatron.topology.param_spec import ParamSpec


def _summed_rows(g: torch.Tensor, ids: torch.Tensor, num_rows: int) -> torch.Tensor:
    """[num_rows, h]: in row i the sum of the rows of g [n, h] whose id is i, added in fp32 and rounded once."""
    ids, order = ids.sort(stable=True)
    run = torch.cat([ids.new_zeros(1), (ids[1:] != ids[:-1]).cumsum(0)])  # the number of the id among those that occur
    sums = torch.zeros(g.shape, dtype=torch.promote_types(g.dtype, torch.float32), device=g.device)
    sums.index_add_(0, run, g[order].to(sums.dtype))
    total = g.new_zeros((num_rows, g.shape[1]))
    total[ids] = sums[run].to(g.dtype)  # equal ids write equal rows
    return total


class _LookUp(torch.autograd.Function):
    """Rows of `weight` for ids in [first, first + rows), zero for others; saves the ids.

    The gradient sums a token's occurrences in fp32 on a CPU, whose kernel would sum bf16 in bf16 (a GPU's does not).
    """

    @staticmethod
    def forward(ctx: Any, ids: torch.Tensor, weight: torch.Tensor, first: int, sum_wide: bool) -> torch.Tensor:
        local = ids - first
        elsewhere = (local < 0) | (local >= weight.shape[0])
        local = local.masked_fill_(elsewhere, 0)
        ctx.save_for_backward(local, elsewhere)
        ctx.num_rows, ctx.sum_wide = weight.shape[0], sum_wide
        return F.embedding(local, weight).masked_fill_(elsewhere[..., None], 0.0)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        local, elsewhere = ctx.saved_tensors
        g = g.masked_fill(elsewhere[..., None], 0.0)
        if ctx.sum_wide:
            return None, _summed_rows(g.flatten(0, -2), local.flatten(), ctx.num_rows), None, None
        return None, torch.ops.aten.embedding_dense_backward(g, local, ctx.num_rows, -1, False), None, None


def look_up(ids: torch.Tensor, weight: torch.Tensor, *, first: int = 0, sum_wide: bool) -> torch.Tensor:
    """Rows of `weight` [n, h] for ids from `first` on, zero for ids outside; `sum_wide`: sum gradients in fp32."""
    return _LookUp.apply(ids, weight, first, sum_wide)


class VocabParallelEmbedding(nn.Module):
    """tokens int64 [b, s], the same on all tp ranks -> the residual stream ([s/t, b, h] or [s, b, h])."""

    def __init__(self, ctx: ParallelContext, weight: ParamSpec):
        super().__init__()
        self.weight = ctx.parameter(weight)
        self.first_row = weight.local_slice(ctx.mesh, ctx.coords)[0].offset
        self.group, self.sequence_parallel = ctx.tp, ctx.sequence_parallel
        self.sum_wide = ctx.device.type == "cpu"

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """See the class."""
        partial = look_up(tokens.t().contiguous(), self.weight, first=self.first_row, sum_wide=self.sum_wide)
        return leave_split(partial, self.group, self.sequence_parallel)
