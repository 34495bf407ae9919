"""The borders between replicated (or sequence-split) and tensor-split activations: four dual pairs of collectives.

| function | forward | backward |
|---|---|---|
| `copy_to_split` | nothing | all-reduce |
| `reduce_from_split` | all-reduce | nothing |
| `gather_sequence` | all-gather dim 0 | reduce-scatter dim 0 |
| `scatter_to_sequence` | reduce-scatter dim 0 | all-gather dim 0 |

The sequence is dim 0. All functions need the tensor-parallel group; `leave_split` picks the pair of the residual
stream's layout.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.distributed.collectives import Group, all_gather, all_reduce, reduce_scatter


class _CopyToSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_reduce(g, ctx.group), None


class _ReduceFromSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        reduced = all_reduce(x, group)
        return x.view_as(x) if reduced is x else reduced

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        gathered = all_gather(x, group)
        return x.view_as(x) if gathered is x else gathered

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return reduce_scatter(g, ctx.group), None


class _ScatterToSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Group) -> torch.Tensor:
        ctx.group = group
        scattered = reduce_scatter(x, group)
        return x.view_as(x) if scattered is x else scattered

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_gather(g, ctx.group), None


def copy_to_split(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Replicated x -> x, the same, about to meet split weights; its gradient is the sum of all ranks' parts."""
    return _CopyToSplit.apply(x, group)


def reduce_from_split(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Each rank's partial sum x -> the whole sum, replicated."""
    return _ReduceFromSplit.apply(x, group)


def gather_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """x [s/t, ...] -> [s, ...], about to meet split weights."""
    return _GatherSequence.apply(x, group)


def scatter_to_sequence(x: torch.Tensor, group: Group) -> torch.Tensor:
    """Each rank's partial sum x [s, ...] -> this rank's part of the whole sum, [s/t, ...]."""
    return _ScatterToSequence.apply(x, group)


def leave_split(x: torch.Tensor, group: Group, sequence_parallel: bool) -> torch.Tensor:
    """Each rank's partial sum x [s, ...] -> the residual stream: [s/t, ...] if sequence-parallel, else [s, ...]."""
    return scatter_to_sequence(x, group) if sequence_parallel else reduce_from_split(x, group)
