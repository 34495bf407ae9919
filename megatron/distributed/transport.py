"""What a process group must be able to do: the seam between our collectives and whatever carries the bytes.

`TorchTransport` carries them over NCCL or gloo. A test may put another carrier behind the same seam (threads of one
process); nothing above this file can tell. Every verb starts the operation and returns a `Work`; a buffer that a verb
writes must not be read, and one that it reads must not be written, before `wait()` has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist


class Work(Protocol):
    """A started operation."""

    def wait(self) -> None:
        """Return when the result may be used (on NCCL: when the current stream waits for it)."""


class Done:
    """The `Work` of an operation that was complete when it was started."""

    def wait(self) -> None:
        """Return at once."""
        return


class Transport(Protocol):
    """Collectives and messages among `size` members; every member calls the same verbs in the same order.

    `src` and `peer` are indices in the group, never global ranks.
    """

    size: int
    rank: int

    def all_reduce_(self, tensor: torch.Tensor, op: str) -> Work:
        """Replace `tensor` on every member by the `op` ("sum", "max", "min") of all members' tensors."""

    def all_gather_into_(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """Write the members' shards in rank order into `out`; out.numel() == size * shard.numel(), both contiguous."""

    def reduce_scatter_into_(self, out: torch.Tensor, full: torch.Tensor) -> Work:
        """Write slice `rank` of the sum of all members' `full` into `out`; full.numel() == size * out.numel()."""

    def broadcast_(self, tensor: torch.Tensor, src: int) -> Work:
        """Replace `tensor` on every member by member `src`'s."""

    def all_to_all_(
        self, out: torch.Tensor, source: torch.Tensor, out_splits: Sequence[int], source_splits: Sequence[int]
    ) -> Work:
        """Send rows of `source` (dim 0, cut by `source_splits`) to the members in order; likewise receive `out`."""

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Work]:
        """Post all messages at once, receives first; one `Work` per message, sends before receives in the list."""

    def barrier(self) -> None:
        """Return when every member has called it."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Every member's picklable `value`, in rank order."""


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class _ScatteredAllReduce:
    """reduce-scatter on a backend without one: all-reduce a copy, keep a slice."""

    def __init__(self, work: Work, out: torch.Tensor, part: torch.Tensor):
        self.work, self.out, self.part = work, out, part

    def wait(self) -> None:
        """Finish the all-reduce and copy this member's slice."""
        self.work.wait()
        self.out.copy_(self.part)


class TorchTransport:
    """`Transport` over a torch process group (NCCL on GPUs, gloo on CPUs)."""

    def __init__(self, process_group: dist.ProcessGroup):
        self.process_group = process_group
        self.size = dist.get_world_size(process_group)
        self.rank = dist.get_rank(process_group)

    def all_reduce_(self, tensor: torch.Tensor, op: str) -> Work:
        """See `Transport.all_reduce_`."""
        return dist.all_reduce(tensor, _OPS[op], group=self.process_group, async_op=True)

    def all_gather_into_(self, out: torch.Tensor, shard: torch.Tensor) -> Work:
        """See `Transport.all_gather_into_`."""
        return _all_gather(out.view(-1), shard.view(-1), group=self.process_group, async_op=True)

    def reduce_scatter_into_(self, out: torch.Tensor, full: torch.Tensor) -> Work:
        """See `Transport.reduce_scatter_into_`; gloo sums a whole copy: its own version is a list of reduces."""
        if full.device.type == "cpu":
            summed = full.detach().clone().view(self.size, -1)
            work = dist.all_reduce(summed, group=self.process_group, async_op=True)
            return _ScatteredAllReduce(work, out, summed[self.rank].view(out.shape))
        return _reduce_scatter(out.view(-1), full.view(-1), group=self.process_group, async_op=True)

    def broadcast_(self, tensor: torch.Tensor, src: int) -> Work:
        """See `Transport.broadcast_`."""
        return dist.broadcast(tensor, group_src=src, group=self.process_group, async_op=True)

    def all_to_all_(
        self, out: torch.Tensor, source: torch.Tensor, out_splits: Sequence[int], source_splits: Sequence[int]
    ) -> Work:
        """See `Transport.all_to_all_`."""
        return dist.all_to_all_single(
            out, source, list(out_splits), list(source_splits), group=self.process_group, async_op=True
        )

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[Work]:
        """See `Transport.exchange`. On NCCL a batch is one launch, so a pair that sends to each other cannot block."""
        group = self.process_group
        if any(tensor.device.type != "cpu" for _, tensor in (*sends, *receives)):
            ops = [dist.P2POp(dist.isend, tensor, group=group, group_peer=peer) for peer, tensor in sends]
            ops += [dist.P2POp(dist.irecv, tensor, group=group, group_peer=peer) for peer, tensor in receives]
            works = dist.batch_isend_irecv(ops)
            return works if len(works) == len(ops) else [works[0]] * len(ops)
        received = [dist.irecv(tensor, group=group, group_src=peer) for peer, tensor in receives]
        return [dist.isend(tensor, group=group, group_dst=peer) for peer, tensor in sends] + received

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        dist.barrier(group=self.process_group)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `Transport.all_gather_object`."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.process_group)
        return values


# torch 2.13 renamed the flat forms; older releases know only the former names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
