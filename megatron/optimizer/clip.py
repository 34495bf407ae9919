"""The true global gradient norm, and what gradients are divided by to respect a limit on it.

Every element of every parameter is counted by exactly one rank (`Bucket.owned`), so one sum over all ranks counts each
once: copies along tensor parallelism, replicas and the two copies of a tied embedding included. A value that is not
finite on one rank makes the norm not finite on all, so all ranks decide alike whether to make the step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron.data_parallel.buckets import Buckets
from megatron.data_parallel.layout import ALIGNMENT
from megatron.distributed.collectives import all_reduce
from megatron.topology.param_spec import ParamSpec


class Clip(NamedTuple):
    """The result of one reduction, as 0-d fp32 tensors on the device: nothing here waits for the host."""

    norm: torch.Tensor
    """L2 norm of the gradients, loss scale removed."""
    divisor: torch.Tensor
    """What the optimizer divides gradients by: the loss scale, times norm / limit where the norm exceeds the limit."""

    @property
    def is_finite(self) -> torch.Tensor:
        """0/1 fp32 tensor, the same on all ranks: whether the step may be made."""
        return torch.isfinite(self.norm).float()


def clip_by_global_norm(buckets: Buckets, max_norm: float, loss_scale: torch.Tensor | float = 1.0) -> Clip:
    """Measure the norm of reduced gradients over all ranks; gradients are left as they are.

    Args:
        buckets: with reduced gradients.
        max_norm: limit (--clip-grad); 0: none. As in Megatron the factor is max_norm / (norm + 1e-6) where below 1.
        loss_scale: what the loss was multiplied by.

    Communication: one all-reduce of one number over all ranks.
    """
    scale = torch.as_tensor(loss_scale, dtype=torch.float32, device=buckets.ctx.device)
    norm = _global_norm(buckets, (bucket.owned_grads for bucket in buckets)) / scale
    excess = ((norm + 1e-6) / max_norm).clamp(min=1.0) if max_norm > 0 else torch.ones_like(norm)
    return Clip(norm, scale * excess)


def params_norm(buckets: Buckets) -> torch.Tensor:
    """0-d fp32: the L2 norm of the weights in full precision, each counted once. One all-reduce."""
    buckets.finish_publish()
    return _global_norm(buckets, (bucket.owned_master for bucket in buckets))


def count_zeros(buckets: Buckets) -> torch.Tensor:
    """0-d fp32: how many gradients are exactly zero, padding of buckets and vocabulary left out. One all-reduce."""
    zeros = torch.zeros(1, dtype=torch.float64, device=buckets.ctx.device)
    for bucket in buckets:
        for cut in bucket.layout.cuts(bucket.owned):
            stop = min(cut.inside.stop, _num_real(cut.slot.spec, buckets))
            real = bucket.grads[cut.at.start :][: max(stop - cut.inside.start, 0)]
            zeros += (real == 0).sum()
    return all_reduce(zeros, buckets.ctx.world)[0].float()


def _num_real(spec: ParamSpec, buckets: Buckets) -> int:
    """Elements of the local stored parameter before its padding, which is at the end of logical dim 0."""
    mesh, place = buckets.ctx.mesh, buckets.ctx.coords
    assert spec.valid_shape[1:] == spec.shape[1:], f"{spec.name}: padding {spec.valid} of {spec.shape} beyond dim 0"
    first, *rest = spec.local_slice(mesh, place)
    num_rows = min(max(spec.valid_shape[0] - first.offset, 0), first.size)
    for part in rest:
        num_rows *= part.size
    return num_rows


def _global_norm(buckets: Buckets, owned: Iterable[torch.Tensor]) -> torch.Tensor:
    parts = [squared_sum(values) for values in owned]
    device = buckets.ctx.device
    total = torch.stack(parts).sum(0) if parts else torch.zeros((), dtype=torch.float64, device=device)
    return all_reduce(total.reshape(1), buckets.ctx.world)[0].sqrt().float()


def squared_sum(values: torch.Tensor) -> torch.Tensor:
    """0-d fp64: sum of squares of a part of a bucket (a multiple of ALIGNMENT elements, any float dtype).

    One fp32 sum over 40 million squares is wrong in the third digit. Sums over ALIGNMENT elements are exact to fp32
    and cover the same elements whatever the bucket sizes and shards; adding them in fp64 makes the norm the same too.
    """
    return torch.linalg.vector_norm(values.view(-1, ALIGNMENT), dim=1, dtype=torch.float32).double().square().sum()
