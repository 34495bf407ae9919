"""Every collective of the codebase, each given its `Group`; a group of one is handled here and nowhere else.

Functions without a trailing underscore leave their input alone and return a new tensor (at size one: the input itself).
Those with one write into a buffer they are given and return a `Work`: what they write is valid after `wait()`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.distributed.transport import Done, Transport, Work


@dataclass(frozen=True, eq=False)
class Group:
    """Ranks that talk to each other: who they are, which of them this one is, and what carries the bytes."""

    axes: tuple[str, ...]
    """Mesh axes the group varies over."""
    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    rank: int
    """This rank's index in `ranks`."""
    transport: Transport | None
    """None exactly when the group has one member."""

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def __repr__(self) -> str:
        return f"Group({'.'.join(self.axes)}, member {self.rank} of {self.ranks})"


def all_reduce(x: torch.Tensor, group: Group, op: str = "sum") -> torch.Tensor:
    """The `op` ("sum", "max", "min") of all members' `x`, on every member."""
    if group.size == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    group.transport.all_reduce_(out, op).wait()
    return out


def all_gather(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """All members' `x` (equal shapes) concatenated along `dim` in rank order."""
    if group.size == 1:
        return x
    moved = x.detach().movedim(dim, 0).contiguous()
    out = moved.new_empty((group.size * moved.shape[0], *moved.shape[1:]))
    group.transport.all_gather_into_(out, moved).wait()
    return out.movedim(0, dim)


def reduce_scatter(x: torch.Tensor, group: Group, dim: int = 0) -> torch.Tensor:
    """This member's even slice along `dim` of the sum of all members' `x`."""
    if group.size == 1:
        return x
    moved = x.detach().movedim(dim, 0).contiguous()
    assert moved.shape[0] % group.size == 0, f"{tuple(x.shape)} dim {dim} over {group.size} members"
    out = moved.new_empty((moved.shape[0] // group.size, *moved.shape[1:]))
    group.transport.reduce_scatter_into_(out, moved).wait()
    return out.movedim(0, dim)


def broadcast(x: torch.Tensor, group: Group, src: int = 0) -> torch.Tensor:
    """Member `src`'s `x`, on every member; the others' `x` gives shape and dtype only."""
    if group.size == 1:
        return x
    out = x.detach().clone(memory_format=torch.contiguous_format)
    group.transport.broadcast_(out, src).wait()
    return out


def all_to_all(
    x: torch.Tensor, group: Group, out_splits: Sequence[int] | None = None, in_splits: Sequence[int] | None = None
) -> torch.Tensor:
    """Rows of `x` cut by `in_splits`, sent to the members in order; what they sent, concatenated. Even by default."""
    if group.size == 1:
        return x
    even = [x.shape[0] // group.size] * group.size
    out_splits, in_splits = list(out_splits or even), list(in_splits or even)
    assert sum(in_splits) == x.shape[0], f"splits {in_splits} of {x.shape[0]} rows"
    out = x.new_empty((sum(out_splits), *x.shape[1:]))
    group.transport.all_to_all_(out, x.detach().contiguous(), out_splits, in_splits).wait()
    return out


def all_reduce_(x: torch.Tensor, group: Group, op: str = "sum", async_op: bool = False) -> Work:
    """Replace `x` (contiguous) by the `op` of all members' `x`."""
    if group.size == 1:
        return Done()
    assert x.is_contiguous()
    return _started(group.transport.all_reduce_(x, op), async_op)


def all_gather_into_(out: torch.Tensor, shard: torch.Tensor, group: Group, async_op: bool = False) -> Work:
    """Fill contiguous `out` with all members' `shard` in rank order; `shard` may be this member's slice of `out`."""
    assert out.is_contiguous() and shard.is_contiguous() and out.numel() == group.size * shard.numel()
    if group.size == 1:
        if out.data_ptr() != shard.data_ptr():
            out.view(-1).copy_(shard.view(-1))
        return Done()
    return _started(group.transport.all_gather_into_(out, shard), async_op)


def reduce_scatter_into_(out: torch.Tensor, full: torch.Tensor, group: Group, async_op: bool = False) -> Work:
    """Fill contiguous `out` with this member's slice of the sum of `full`; `out` may be that slice of `full`."""
    assert out.is_contiguous() and full.is_contiguous() and full.numel() == group.size * out.numel()
    if group.size == 1:
        if out.data_ptr() != full.data_ptr():
            out.view(-1).copy_(full.view(-1))
        return Done()
    return _started(group.transport.reduce_scatter_into_(out, full), async_op)


def barrier(group: Group) -> None:
    """Return when every member has called it."""
    if group.size > 1:
        group.transport.barrier()


def all_gather_object(value: Any, group: Group) -> list[Any]:
    """Every member's picklable `value`, in rank order."""
    return [value] if group.size == 1 else group.transport.all_gather_object(value)


def broadcast_object(value: Any, group: Group, src: int = 0) -> Any:
    """Member `src`'s picklable `value`, on every member; only small values (it is gathered, the rest dropped)."""
    return all_gather_object(value if group.rank == src else None, group)[src]


def _started(work: Work, async_op: bool) -> Work:
    if async_op:
        return work
    work.wait()
    return Done()
