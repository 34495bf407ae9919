"""One bucket: flat parameters, flat gradients, and the fp32 weights its optimizer updates.

The parameters become views of `params`. `kept` is the range this rank's optimizer updates (its shard, or all of it) and
`master` those weights in fp32: the parameters' own memory where they are fp32, else a copy.

Local shapes: params, grads [numel]; master [kept.numel]. Reduction sums `grads` over the group: all-reduce where every
rank updates all of it, else reduce-scatter, after which only grads[kept] holds sums. Publishing casts master into
params[kept] and, where sharded, all-gathers the shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.data_parallel.layout import BucketLayout, Span
from megatron.data_parallel.pieces import StatePiece
from megatron.data_parallel.residency import Residency
from megatron.distributed.collectives import Group, all_gather_into_, all_reduce_, reduce_scatter_into_
from megatron.distributed.context import ParallelContext
from megatron.distributed.transport import Work


class Bucket:
    """Buffers of one bucket on one rank.

    Args:
        layout: what lies where.
        params: the parameters, by slot.
        ctx: gives the reducing group and this rank's place.
        residency: what is sharded.
        grad_dtype: of `grads`, the sum over microbatches and the message over the network.
    """

    def __init__(
        self,
        layout: BucketLayout,
        params: Sequence[torch.nn.Parameter],
        ctx: ParallelContext,
        residency: Residency,
        grad_dtype: torch.dtype,
    ):
        self.layout = layout
        self.residency = residency
        self.group: Group = ctx.group(*layout.key.gradient_axes)
        assert self.group.size == layout.group_size, f"{self.group} reduces a layout for {layout.group_size} ranks"
        self.kept = layout.whole if residency.optim else layout.shard(self.group.rank)
        self.owned = layout.owned(self.group.rank, ctx.coords)
        dtype, device = params[0].dtype, params[0].device
        self.params = torch.zeros(layout.numel, dtype=dtype, device=device)
        self.grads = torch.zeros(layout.numel, dtype=grad_dtype, device=device)
        self.grad_views: list[torch.Tensor] = []
        for slot, param in zip(layout.slots, params, strict=True):
            home = self.params[slot.start : slot.stop].view(param.shape)
            with torch.no_grad():
                home.copy_(param)
            param.data = home
            self.grad_views.append(self.grads[slot.start : slot.stop].view(param.shape))
        self.accumulates_in_place = grad_dtype == dtype
        """Whether autograd itself adds to the flat gradients: `param.grad` is a view of them."""
        self._is_written = [True] * len(layout.slots)
        self.has_master = dtype != torch.float32
        kept = self.params[self.kept.start : self.kept.stop]
        self.master = kept.float() if self.has_master else kept
        self._gathering: Work | None = None

    @property
    def is_sharded(self) -> bool:
        """Whether ranks of the group update different parts."""
        return not self.residency.optim

    @property
    def kept_grads(self) -> torch.Tensor:
        """[kept.numel] gradients of what this rank updates; sums over the group once the reduction is waited for."""
        return self.grads[self.kept.start : self.kept.stop]

    @property
    def owned_grads(self) -> torch.Tensor:
        """[owned.numel] gradients that this rank counts in norms."""
        return self.grads[self.owned.start : self.owned.stop]

    @property
    def owned_master(self) -> torch.Tensor:
        """[owned.numel] weights that this rank counts in norms."""
        return self.master[self.owned.start - self.kept.start :][: self.owned.numel]

    def zero_grads(self) -> None:
        """Begin new sums. What `accumulate` is going to write needs no zeros first."""
        if self.accumulates_in_place:
            self.grads.zero_()
        else:
            self._is_written = [False] * len(self._is_written)

    @torch.no_grad()
    def accumulate(self, slot: int, grad: torch.Tensor) -> None:
        """Add `grad` (parameter's shape and dtype) to the flat gradients."""
        if self._is_written[slot]:
            self.grad_views[slot].add_(grad)
        else:
            self.grad_views[slot].copy_(grad)
            self._is_written[slot] = True

    def start_reduce(self) -> Work:
        """Start summing gradients over the group; the buffer may be touched again after the work is waited for."""
        for slot, is_written in enumerate(self._is_written):
            if not is_written:
                self.grad_views[slot].zero_()
        self._is_written = [True] * len(self._is_written)
        if self.is_sharded:
            return reduce_scatter_into_(self.kept_grads, self.grads, self.group, async_op=True)
        return all_reduce_(self.grads, self.group, async_op=True)

    @torch.no_grad()
    def start_publish(self) -> None:
        """Start bringing updated weights into the parameters, which may be read after `finish_publish`."""
        kept = self.params[self.kept.start : self.kept.stop]
        if self.has_master:
            kept.copy_(self.master)
        if self.is_sharded:
            self._gathering = all_gather_into_(self.params, kept, self.group, async_op=True)

    def finish_publish(self) -> None:
        """Wait for `start_publish`; returns at once when nothing is under way."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    @torch.no_grad()
    def sync_master(self) -> None:
        """Take the parameters as the master weights: the way back, after they were written from outside."""
        if self.has_master:
            self.master.copy_(self.params[self.kept.start : self.kept.stop])

    def pieces(self, kind: str, values: torch.Tensor, span: Span) -> Iterator[StatePiece]:
        """Cut `values` [span.numel], which covers `span` of the bucket, at its parameters' borders."""
        sharded_over = () if span == self.layout.whole else self.layout.key.gradient_axes
        for cut in self.layout.cuts(span):
            view = values[cut.at.start - span.start : cut.at.stop - span.start]
            yield StatePiece(kind, cut.slot.spec, cut.inside.start, cut.inside.stop, view, sharded_over)
