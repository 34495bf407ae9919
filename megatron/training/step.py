"""One training step.

Gradients are sums everywhere. The one division is in the weight that each microbatch's loss is given before its
backward pass: 1 / (unmasked target tokens of the whole global batch), so a token weighs the same in whichever
microbatch or replica it lands. With --no-calculate-per-token-loss it is Megatron's mean of microbatch means:
1 / (tokens of the microbatch x microbatches x replicas). A count of zero is taken as one: such a step has loss 0 and
zero gradients, not NaN. The loss that is reported is sum / tokens of the global batch in both modes.

An update from numbers that are not finite is never made: `ok` is a 0/1 tensor, the same on all ranks, and no line here
waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from megatron.distributed.collectives import all_reduce
from megatron.distributed.context import ParallelContext
from megatron.optimizer.clip import clip_by_global_norm, count_zeros, params_norm
from megatron.pipeline_parallel.executor import run_schedule
from megatron.training.metrics import ROW
from megatron.training.setup import Run

Batch = dict[str, torch.Tensor]


class Wishes(NamedTuple):
    """Whether this rank wants the run to stop after the step."""

    signal: bool = False
    deadline: bool = False


class StepResult(NamedTuple):
    """What a step leaves on the device."""

    row: torch.Tensor
    """Numbers for the log, named by metrics.ROW."""
    votes: torch.Tensor
    """[signal, deadline, bad losses, bad step]: how many ranks want or have it, the same on all ranks."""
    ok: torch.Tensor
    """0-d, 1 where the update was made."""
    is_local_loss_bad: torch.Tensor
    """0-d bool: whether this rank's own microbatches have a loss that is not finite."""


def train_step(run: Run, batches: Sequence[Batch], wishes: Wishes) -> StepResult:
    """Forward and backward of this rank's microbatches and one update of the weights, all ranks together."""
    ctx, logging = run.ctx, run.config.logging
    targets = count_targets(batches)
    tokens = all_reduce(targets.sum(), ctx.dp_cp)
    weights = loss_weights(targets, tokens, ctx, is_per_token=run.config.training.calculate_per_token_loss)
    weights = weights * run.loss_scale.scale

    run.buckets.zero_grads()
    run.buckets.start_step(len(batches))
    with run.timers.span("forward-backward", 1):
        outputs = run_schedule(
            run.schedule(len(batches)),
            run.stages,
            batches,
            ctx.pp,
            grad_scale=weights.__getitem__,
            record=run.timers.record_op if run.timers.level > 1 else None,
        )
        run.buckets.finish_reduce()
    with run.timers.span("optimizer", 1):
        loss, is_local_loss_bad, votes = _sum_over_world(outputs, tokens, ctx, wishes)
        clip = clip_by_global_norm(run.buckets, run.config.optimizer.clip_grad, run.loss_scale.scale)
        ok = clip.is_finite * torch.isfinite(loss).float()
        zeros = count_zeros(run.buckets) if logging.log_num_zeros_in_grad else None
        run.optimizer.step(ok, run.scheduler.rates(), clip.divisor)
        run.loss_scale.update(ok)
    values = {
        "loss": loss,
        "tokens": tokens,
        "grad_norm": clip.norm,
        "is_committed": ok,
        "loss_scale": run.loss_scale.scale,
        "num_zeros": zeros,
        "params_norm": params_norm(run.buckets) if logging.log_params_norm else None,
    }
    votes = torch.cat([votes, (1 - ok).double().reshape(1)])
    return StepResult(_row(values, ctx.device), votes, ok, is_local_loss_bad)


def count_targets(batches: Sequence[Batch]) -> torch.Tensor:
    """Unmasked target tokens of each microbatch, fp64 [microbatches]: every pipeline stage counts the same batch."""
    return torch.stack([batch["loss_mask"].sum(dtype=torch.float64) for batch in batches])


def loss_weights(
    targets: torch.Tensor, tokens: torch.Tensor, ctx: ParallelContext, *, is_per_token: bool
) -> torch.Tensor:
    """What each microbatch's summed loss is multiplied by before its backward pass, fp32 [microbatches]."""
    if is_per_token:
        return (1 / tokens.clamp(min=1)).expand(len(targets)).float()
    of_microbatch = all_reduce(targets, ctx.group("cp")).clamp(min=1)
    return (1 / (of_microbatch * (len(targets) * ctx.mesh.dp))).float()


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on the device of the stages."""
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}


def loss_share(outputs: Sequence, ctx: ParallelContext) -> tuple[torch.Tensor, torch.Tensor]:
    """(this rank's part of the global loss sum, whether its loss is bad): fp64, bool.

    Tensor-parallel ranks hold the same loss, so the first of them speaks; stages before the last have no outputs.
    """
    zero = torch.zeros((), dtype=torch.float64, device=ctx.device)
    local = torch.stack([output.loss_sum.detach().double() for output in outputs]).sum() if outputs else zero
    return (local if ctx.coords.tp == 0 else zero), ~torch.isfinite(local)


def _sum_over_world(outputs: Sequence, tokens: torch.Tensor, ctx: ParallelContext, wishes: Wishes):
    """(loss of the global batch, whether this rank's loss is bad, [signal, deadline, bad losses]) in one reduction."""
    share, is_bad = loss_share(outputs, ctx)
    wish = torch.tensor([wishes.signal, wishes.deadline], dtype=torch.float64, device=ctx.device)
    summed = all_reduce(torch.cat([share.reshape(1), wish, is_bad.double().reshape(1)]), ctx.world)
    return summed[0] / tokens.clamp(min=1), is_bad, summed[1:]


def _row(values: dict[str, torch.Tensor | None], device: torch.device) -> torch.Tensor:
    missing = torch.full((), float("nan"), dtype=torch.float64, device=device)
    return torch.stack([missing if values[name] is None else values[name].double().reshape(()) for name in ROW])
