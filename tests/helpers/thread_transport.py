"""A `Transport` whose members are threads of one process: exact, repeatable, strict where real ones are undefined.

- Reductions add the members' tensors in rank order, in the tensors' own dtype: the same bits every time.
- A buffer that is to be written holds NaN (integers: the lowest value) until `wait()`, so reading too early shows.
- A buffer that is read is compared with a copy in `wait()`, so writing too early is an error.
- Sends are buffered: they never block, unlike gloo's. The gloo pool shows what buffering hides.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.helpers.meeting import CommunicationError, Meeting, Slot

_REDUCE = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}


class ThreadWork:
    """A posted operation of one member: `wait()` fills the output buffer and checks that the input was left alone."""

    def __init__(
        self,
        meeting: Meeting,
        slot: Slot,
        rank: int,
        out: torch.Tensor | None = None,
        source: tuple[torch.Tensor, torch.Tensor] | None = None,
        is_buffered: bool = False,
    ):
        self.meeting, self.slot, self.rank = meeting, slot, rank
        self.out, self.source, self.is_buffered = out, source, is_buffered
        self.is_done = False

    def wait(self) -> None:
        """Blocks until all members have posted; raises CommunicationError if they never do."""
        if self.is_done:
            return
        self.is_done = True
        if not self.is_buffered:
            result = self.meeting.wait(self.rank, self.slot)
            if self.out is not None:
                with torch.no_grad():
                    self.out.copy_(result.reshape(self.out.shape))
        if self.source is not None:
            tensor, copy = self.source
            if not _same_bits(tensor, copy):
                raise CommunicationError(f"rank {self.rank} changed the input of {self.slot.title} before wait()")


class ThreadTransport:
    """One member's end of a group of threads.

    Args:
        meeting: shared by all ranks of the run.
        label: name of the group in messages and, with `ranks`, what tells it from other groups.
        ranks: global ranks of the members, ascending.
        rank: this member's index in `ranks`.
    """

    def __init__(self, meeting: Meeting, label: str, ranks: tuple[int, ...], rank: int):
        self.meeting, self.label, self.ranks, self.rank = meeting, label, ranks, rank
        self.size = len(ranks)
        self.global_rank = ranks[rank]

    def all_reduce_(self, tensor: torch.Tensor, op: str) -> ThreadWork:
        """See `Transport.all_reduce_`."""
        if op not in _REDUCE:
            raise ValueError(f"reduction {op!r} is not one of {sorted(_REDUCE)}")

        def combine(given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            total = _reduced([given[member] for member in self.ranks], op)
            return dict.fromkeys(self.ranks, total)

        slot = self._post("all_reduce", f"all_reduce({op}) of {_shown(tensor)}", _copy(tensor), combine)
        return self._work(slot, out=tensor)

    def all_gather_into_(self, out: torch.Tensor, shard: torch.Tensor) -> ThreadWork:
        """See `Transport.all_gather_into_`."""
        if out.numel() != self.size * shard.numel() or out.dtype != shard.dtype:
            raise CommunicationError(f"all_gather of {_shown(shard)} by {self.size} members into {_shown(out)}")

        def combine(given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            whole = torch.cat([given[member].view(-1) for member in self.ranks])
            return dict.fromkeys(self.ranks, whole)

        copy = _copy(shard)
        slot = self._post("all_gather", f"all_gather of {shard.numel()} x {_type(shard)}", copy, combine)
        return self._work(slot, out=out, read=shard, copy=copy)

    def reduce_scatter_into_(self, out: torch.Tensor, full: torch.Tensor) -> ThreadWork:
        """See `Transport.reduce_scatter_into_`."""
        if full.numel() != self.size * out.numel() or out.dtype != full.dtype:
            raise CommunicationError(f"reduce_scatter of {_shown(full)} by {self.size} members into {_shown(out)}")

        def combine(given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            total = _reduced([given[member] for member in self.ranks], "sum").view(-1)
            return dict(zip(self.ranks, total.chunk(self.size)))

        copy = _copy(full)
        slot = self._post("reduce_scatter", f"reduce_scatter of {full.numel()} x {_type(full)}", copy, combine)
        return self._work(slot, out=out, read=full, copy=copy)

    def broadcast_(self, tensor: torch.Tensor, src: int) -> ThreadWork:
        """See `Transport.broadcast_`."""
        source = self.ranks[src]

        def combine(given: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
            return dict.fromkeys(self.ranks, given[source])

        slot = self._post("broadcast", f"broadcast from rank {source} of {_shown(tensor)}", _copy(tensor), combine)
        return self._work(slot, out=tensor)

    def all_to_all_(
        self, out: torch.Tensor, source: torch.Tensor, out_splits: Sequence[int], source_splits: Sequence[int]
    ) -> ThreadWork:
        """See `Transport.all_to_all_`."""
        if sum(source_splits) != source.shape[0] or sum(out_splits) != out.shape[0]:
            raise CommunicationError(
                f"all_to_all: splits {list(source_splits)} of {_shown(source)}, {list(out_splits)} of {_shown(out)}"
            )

        def combine(given: dict[int, tuple]) -> dict[int, torch.Tensor]:
            results = {}
            for column, receiver in enumerate(self.ranks):
                parts = [given[sender][0].split(given[sender][1])[column] for sender in self.ranks]
                wanted = given[receiver][2]
                if [len(part) for part in parts] != wanted:
                    raise CommunicationError(
                        f"all_to_all: rank {receiver} expects rows {wanted}, is sent {[len(part) for part in parts]}"
                    )
                results[receiver] = torch.cat(parts)
            return results

        copy = _copy(source)
        given = (copy, list(source_splits), list(out_splits))
        row = f"rows of {list(source.shape[1:])} {_type(source)}"
        slot = self._post("all_to_all", f"all_to_all of {row}", given, combine)
        return self._work(slot, out=out, read=source, copy=copy)

    def exchange(
        self, sends: Sequence[tuple[int, torch.Tensor]], receives: Sequence[tuple[int, torch.Tensor]]
    ) -> list[ThreadWork]:
        """See `Transport.exchange`."""
        works = [self._message(self.rank, peer, tensor) for peer, tensor in sends]
        return works + [self._message(peer, self.rank, tensor) for peer, tensor in receives]

    def barrier(self) -> None:
        """See `Transport.barrier`."""
        slot = self._post("barrier", "barrier", None, lambda given: dict.fromkeys(given))
        self.meeting.wait(self.global_rank, slot)

    def all_gather_object(self, value: Any) -> list[Any]:
        """See `Transport.all_gather_object`; the values travel pickled, so that no member can change another's."""
        slot = self._post(
            "all_gather_object", "all_gather_object", pickle.dumps(value), lambda given: dict.fromkeys(given, given)
        )
        given = self.meeting.wait(self.global_rank, slot)
        return [pickle.loads(given[member]) for member in self.ranks]

    def _post(self, name: str, signature: str, contribution: Any, combine: Callable) -> Slot:
        title = f"{name} of group {self.label}{self.ranks}"
        key = ("group", self.label, self.ranks)
        return self.meeting.post(self.global_rank, key, self.ranks, title, signature, contribution, combine)

    def _work(
        self, slot: Slot, out: torch.Tensor, read: torch.Tensor | None = None, copy: torch.Tensor | None = None
    ) -> ThreadWork:
        shares_memory = read is None or read.untyped_storage().data_ptr() == out.untyped_storage().data_ptr()
        _poison_(out)
        return ThreadWork(self.meeting, slot, self.global_rank, out, None if shares_memory else (read, copy))

    def _message(self, sender: int, receiver: int, tensor: torch.Tensor) -> ThreadWork:
        pair = (self.ranks[sender], self.ranks[receiver])
        is_sender = sender == self.rank
        copy = _copy(tensor) if is_sender else None
        slot = self.meeting.post(
            self.global_rank,
            ("message", self.label, self.ranks, *pair),
            pair,
            f"message from rank {pair[0]} to rank {pair[1]} of group {self.label}{self.ranks}",
            f"message of {_shown(tensor)}",
            copy,
            lambda given: dict.fromkeys(pair, given[pair[0]]),
        )
        if is_sender:
            return ThreadWork(self.meeting, slot, self.global_rank, source=(tensor, copy), is_buffered=True)
        _poison_(tensor)
        return ThreadWork(self.meeting, slot, self.global_rank, out=tensor)


def _reduced(tensors: list[torch.Tensor], op: str) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total = _REDUCE[op](total, tensor)
    return total


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _poison_(tensor: torch.Tensor) -> None:
    with torch.no_grad():
        if tensor.is_floating_point():
            tensor.detach().fill_(float("nan"))
        elif tensor.dtype != torch.bool:
            tensor.detach().fill_(torch.iinfo(tensor.dtype).min)


def _same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def _type(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shown(tensor: torch.Tensor) -> str:
    return f"{_type(tensor)} {list(tensor.shape)}"
