"""Evaluation: the mean loss of the unmasked tokens of `eval_iters` global batches, every token of equal weight.

Which samples an evaluation sees follows from the iteration alone, so a resumed run evaluates on what the unbroken run
does. As in Megatron, evaluation k of a run (at iteration k x --eval-interval) takes the k-th block of
eval_iters x global batch samples of the validation set, and the final one the block after the last.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.config.training import TrainingConfig
from megatron.distributed.collectives import all_reduce
from megatron.pipeline_parallel.executor import run_schedule
from megatron.training.progress import Progress
from megatron.training.setup import Run
from megatron.training.signals import StopRequest
from megatron.training.step import Batch, count_targets, loss_share, to_device


class Evaluation(NamedTuple):
    """Mean loss over `tokens` unmasked tokens of the set `split` ("valid" or "test"), after `iteration`."""

    split: str
    iteration: int
    loss: float
    tokens: int
    is_final: bool


def evaluation_block(training: TrainingConfig, iteration: int, is_final: bool) -> int:
    """Which block of the validation set the evaluation after `iteration` takes, from 0."""
    if not training.eval_interval:
        return 0
    return max(0, iteration // training.eval_interval - training.num_evaluations_left_out - (0 if is_final else 1))


def evaluate(run: Run, split: str, *, is_final: bool, stop: StopRequest) -> Evaluation | None:
    """Evaluate on `split`, all ranks together; None when all ranks agreed to stop for a signal meanwhile."""
    config, ctx, iteration = run.config, run.ctx, run.position.iteration
    loader, batch_size = run.loaders[split], config.eval_batch_size
    block = evaluation_block(config.training, iteration, is_final) if split == "valid" else 0
    loader.consumed_samples = block * config.training.eval_iters * batch_size
    label = "evaluating" if split == "valid" else "testing"
    progress = Progress(label, config.training.eval_iters, is_shown=run.reporter.has_bar)
    total = torch.zeros(2, dtype=torch.float64, device=ctx.device)
    run.buckets.finish_publish()
    for stage in run.stages:
        stage.eval()
    with torch.no_grad(), run.ledger.phase("eval", step=iteration):
        for count in range(config.training.eval_iters):
            batches = [to_device(batch, ctx.device) for batch in loader.next_step(batch_size)]
            sums, is_stopping = _forward(run, batches, stop)
            if is_stopping:
                progress.clear()
                return None
            total += sums
            progress.update(count + 1)
    progress.clear()
    for stage in run.stages:
        stage.train()
    loss_sum, tokens = total.tolist()
    return Evaluation(split, iteration, loss_sum / max(tokens, 1.0), int(tokens), is_final)


def _forward(run: Run, batches: list[Batch], stop: StopRequest) -> tuple[torch.Tensor, bool]:
    """([loss sum, tokens] of one global batch, whether any rank was asked to stop)."""
    ctx = run.ctx
    schedule = run.schedule(len(batches), is_forward_only=True)
    outputs = run_schedule(schedule, run.stages, batches, ctx.pp, forward_only=True)
    share, _ = loss_share(outputs, ctx)
    tokens = count_targets(batches).sum() * (ctx.coords.tp == 0 and ctx.coords.pp == 0)
    wish = torch.full_like(share, float(stop.is_set))
    summed = all_reduce(torch.stack([share, tokens, wish]), ctx.world)
    return summed[:2], bool(summed[2] > 0)
