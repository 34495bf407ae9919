"""When buckets talk: reductions as backward completes them, gathers that the first user in forward waits for.

Reductions start strictly in plan order. A bucket whose gradients are complete early is held back until those before it
have started, so the order of collectives never depends on timing or on which parameters a rank happened to use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from megatron.data_parallel.bucket import Bucket
from megatron.distributed.transport import Work


class ReductionQueue:
    """Starts each bucket's reduction once per step, in plan order.

    Args:
        buckets: in plan order.
        overlap: start a reduction when the last gradient of the last microbatch is in; else all at the end.
        uses: for each slot of each bucket, how many stages use the parameter; each sends it a gradient of its own.
    """

    def __init__(self, buckets: Sequence[Bucket], overlap: bool, uses: Sequence[Sequence[int]]):
        self.buckets = buckets
        self.uses = uses
        self.overlap = overlap
        self._due: list[list[int]] = [[0] * len(bucket.grad_views) for bucket in buckets]
        self._open: list[int] = [0] * len(buckets)
        self._works: list[Work] = []
        self._is_armed = False

    def arm(self, num_microbatches: int) -> None:
        """Expect `num_microbatches` gradients of each parameter from each stage that uses it."""
        self._due = [[num_microbatches * count for count in of_bucket] for of_bucket in self.uses]
        self._open = [len(bucket.grad_views) for bucket in self.buckets]
        self._works = []
        self._is_armed = True

    def arrived(self, bucket: int, slot: int) -> None:
        """Count one gradient; start what is complete and next in order."""
        if not (self.overlap and self._is_armed):
            return
        due = self._due[bucket]
        if due[slot] == 0:
            name = self.buckets[bucket].layout.slots[slot].spec.name
            raise RuntimeError(
                f"{name} received more gradients than there are microbatches in this step, perhaps after their sum was "
                "reduced; give start_step the number of backward passes"
            )
        due[slot] -= 1
        if due[slot] == 0:
            self._open[bucket] -= 1
            self._start_complete()

    def finish(self) -> None:
        """Start what has not started and wait for all of it."""
        while len(self._works) < len(self.buckets):
            self._start_next()
        for work in self._works:
            work.wait()
        self._works = []
        self._is_armed = False

    def _start_complete(self) -> None:
        while len(self._works) < len(self.buckets):
            number = len(self._works)
            if self._open[number] or self.buckets[number].layout.crosses_stages:
                return
            self._start_next()

    def _start_next(self) -> None:
        self._works.append(self.buckets[len(self._works)].start_reduce())


def register_gradient_hook(
    param: torch.nn.Parameter, bucket: Bucket, number: int, slot: int, queue: ReductionQueue
) -> None:
    """After each backward pass through `param`: add its gradient to the bucket (unless it is there), count it."""

    def hook(param: torch.nn.Parameter) -> None:
        if not bucket.accumulates_in_place:
            bucket.accumulate(slot, param.grad)
            param.grad = None
        queue.arrived(number, slot)

    param.register_post_accumulate_grad_hook(hook)


def register_forward_waits(stages: Iterable[torch.nn.Module], bucket_of: Mapping[torch.nn.Parameter, Bucket]) -> None:
    """Before a module that holds parameters runs, wait for the gathers of their buckets.

    Works for modules that read their own parameters. A tied embedding may be read by another module than its holder:
    its bucket is never left gathering (see `Buckets.publish`).
    """
    for stage in stages:
        for module in stage.modules():
            held = {id(bucket_of[p]): bucket_of[p] for p in module.parameters(recurse=False) if p in bucket_of}
            if held:
                module.register_forward_pre_hook(_wait_for(tuple(held.values())))


def _wait_for(buckets: tuple[Bucket, ...]):
    def hook(module: torch.nn.Module, args: tuple) -> None:
        for bucket in buckets:
            bucket.finish_publish()

    return hook
