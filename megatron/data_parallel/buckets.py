"""All buckets of one rank: the whole of data parallelism that a training step sees.

A step is: zero_grads, start_step, forward and backward passes, finish_reduce, the optimizer's update of each bucket's
master weights from its gradients, publish. Gradients are sums over microbatches and ranks; nothing here divides them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import torch

from megatron.data_parallel.bucket import Bucket
from megatron.data_parallel.hooks import ReductionQueue, register_forward_waits, register_gradient_hook
from megatron.data_parallel.layout import plan_buckets
from megatron.data_parallel.pieces import StatePiece
from megatron.data_parallel.residency import residency_of
from megatron.distributed.context import ParallelContext


class Buckets:
    """Lays the parameters out in buckets and moves gradients and weights between ranks.

    Args:
        params: this rank's parameters (each with its `.spec`) in model order, one that two stages use listed for
            each: it receives two gradients per microbatch. They become views of the buckets.
        ctx: groups and place of this rank.
        sharding: "no_shard" (DDP) or "optim" (ZeRO-1).
        grad_dtype: of gradient sums and of their reduction.
        overlap_grad_reduce: reduce a bucket while backward goes on.
        overlap_param_gather: gather updated weights while the next forward goes on; needs `attach_forward_waits`.
        bucket_numel: close a bucket once it has that many elements; None: one bucket for each kind.
    """

    def __init__(
        self,
        params: Iterable[torch.nn.Parameter],
        ctx: ParallelContext,
        *,
        sharding: str = "no_shard",
        grad_dtype: torch.dtype = torch.float32,
        overlap_grad_reduce: bool = False,
        overlap_param_gather: bool = False,
        bucket_numel: int | None = None,
    ):
        uses = Counter(params)
        self.params: list[torch.nn.Parameter] = list(uses)
        self.ctx = ctx
        self.overlap_param_gather = overlap_param_gather
        residency = residency_of(sharding)
        if overlap_param_gather and residency.optim:
            raise ValueError(
                "--overlap-param-gather has nothing to gather when every rank updates all parameters; add "
                "--use-distributed-optimizer or leave it out"
            )
        self.plan = plan_buckets(
            [param.spec for param in self.params],
            [str(param.dtype).removeprefix("torch.") for param in self.params],
            ctx.mesh,
            bucket_numel=bucket_numel,
        )
        self.buckets = [
            Bucket(layout, [self.params[slot.index] for slot in layout.slots], ctx, residency, grad_dtype)
            for layout in self.plan.buckets
        ]
        uses_by_slot = [[uses[self.params[slot.index]] for slot in layout.slots] for layout in self.plan.buckets]
        self._queue = ReductionQueue(self.buckets, overlap_grad_reduce, uses_by_slot)
        self._bucket_of: dict[torch.nn.Parameter, Bucket] = {}
        for number, bucket in enumerate(self.buckets):
            for place, slot in enumerate(bucket.layout.slots):
                param = self.params[slot.index]
                self._bucket_of[param] = bucket
                if overlap_grad_reduce or not bucket.accumulates_in_place:
                    register_gradient_hook(param, bucket, number, place, self._queue)
        self.zero_grads()

    def __iter__(self) -> Iterator[Bucket]:
        return iter(self.buckets)

    def zero_grads(self) -> None:
        """Begin a step: gradients that arrive from here on make new sums."""
        for bucket in self.buckets:
            bucket.zero_grads()
            if bucket.accumulates_in_place:
                for slot, view in zip(bucket.layout.slots, bucket.grad_views, strict=True):
                    self.params[slot.index].grad = view

    def start_step(self, num_microbatches: int) -> None:
        """Say how many backward passes each parameter sees before its gradient is complete."""
        self._queue.arm(num_microbatches)

    def finish_reduce(self) -> None:
        """Return when all gradients that this rank keeps are sums over the group (on a GPU: on the current stream)."""
        self._queue.finish()

    def attach_forward_waits(self, stages: Iterable[torch.nn.Module]) -> None:
        """Let every module of `stages` wait, before it runs, for the weights it holds."""
        register_forward_waits(stages, self._bucket_of)

    def publish(self) -> None:
        """Bring master weights into the parameters of all ranks, those that forward reads first first.

        With overlap_param_gather the gathers are left under way, except of buckets that cross stages: a tied embedding
        is read by other modules than the one that holds it.
        """
        for bucket in reversed(self.buckets):
            bucket.start_publish()
        for bucket in self.buckets:
            if bucket.layout.crosses_stages or not self.overlap_param_gather:
                bucket.finish_publish()

    def finish_publish(self) -> None:
        """Wait for every gather under way: before weights are saved, measured, or read outside a module's forward."""
        for bucket in self.buckets:
            bucket.finish_publish()

    def sync_master_from_params(self) -> None:
        """Take the parameters, after they were written from outside (a checkpoint), as the master weights."""
        self.finish_publish()
        for bucket in self.buckets:
            bucket.sync_master()

    def parameter_pieces(self) -> Iterator[StatePiece]:
        """The parameters in their own dtype, each whole, as views; waits for gathers first."""
        self.finish_publish()
        for bucket in self.buckets:
            yield from bucket.pieces("param", bucket.params, bucket.layout.whole)


def parameters_in_model_order(stages: Sequence[torch.nn.Module]) -> list[torch.nn.Parameter]:
    """All parameters of this rank's stages, in order; one that several stages use is there once for each."""
    return [param for stage in stages for param in stage.parameters()]
