"""Builds everything a run needs from its configuration and its place in the mesh: one value, `Run`, handed to the loop.

Order: tokenizer, model, buckets and optimizer, schedules, checkpoint, data. Data comes last because the position in it
is in the checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from megatron.config.data import DataConfig
from megatron.config.run import RunConfig
from megatron.data_parallel.buckets import Buckets, parameters_in_model_order
from megatron.datasets.build import build_datasets
from megatron.datasets.loader import SampleLoader, order_of
from megatron.datasets.tokenizer import TokenizerOptions, build_tokenizer, token_rows
from megatron.distributed.collectives import all_reduce
from megatron.distributed.context import ParallelContext
from megatron.distributed.device import device_name
from megatron.ledger.writer import Ledger
from megatron.optimizer.loss_scale import LossScale, build_loss_scale
from megatron.optimizer.opt_param_scheduler import OptParamScheduler, build_scheduler
from megatron.optimizer.sharded import Optimizer, build_optimizer
from megatron.schedules.generators import build_schedule
from megatron.schedules.ops import Schedule
from megatron.training.metrics import StepRows
from megatron.training.peak import Peak, device_peak
from megatron.training.profile import StepProfiler
from megatron.training.report import Reporter
from megatron.training.timers import Timers

SPLITS = ("train", "valid", "test")

BuildStages = Callable[[RunConfig, ParallelContext, int], list]
"""(configuration, context, vocabulary size) -> this rank's stages: the model of a run, `models.gpt.build_stages` or a
fork's own."""


@dataclass
class Position:
    """How far a run has come; all of it is in the checkpoint."""

    iteration: int = 0
    """Steps done, skipped ones included."""
    consumed_samples: int = 0
    """Samples seen, those of skipped steps included: the position in the data."""
    num_skipped: int = 0
    """Steps whose update was not made."""
    dataset_samples: int = 0
    """Samples the training set was built for; its order depends on this number, so a resumed run keeps it."""

    def advance(self, batch_size: int) -> None:
        """Count one step of `batch_size` samples."""
        self.iteration += 1
        self.consumed_samples += batch_size


@dataclass(kw_only=True, eq=False)
class Run:
    """One process's part of a run."""

    config: RunConfig
    ctx: ParallelContext
    ledger: Ledger
    reporter: Reporter
    vocab_size: int
    stages: list
    buckets: Buckets
    optimizer: Optimizer
    loss_scale: LossScale
    scheduler: OptParamScheduler
    peak: Peak
    timers: Timers
    profiler: StepProfiler
    position: Position = field(default_factory=Position)
    loaders: dict[str, SampleLoader | None] = field(default_factory=lambda: dict.fromkeys(SPLITS))
    rows: StepRows = field(default_factory=StepRows)
    saved_iteration: int | None = None
    """Iteration of the last checkpoint written or read."""

    @property
    def padded_vocab(self) -> int:
        """Rows of the embedding."""
        return self.config.padded_vocab(self.vocab_size)

    def schedule(self, num_microbatches: int, is_forward_only: bool = False) -> Schedule:
        """The pipeline schedule of a step or an evaluation."""
        parallel = self.config.parallel
        return build_schedule(
            "forward-only" if is_forward_only else self.config.pipeline_schedule,
            self.ctx.pp.size,
            num_microbatches,
            self.config.pipeline_layout.num_chunks,
            parallel.microbatch_group_size_per_virtual_pipeline_stage,
        )

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; the same answer on all. Waits for the device."""
        vote = torch.tensor(float(flag), device=self.ctx.device).reshape(1)
        return bool(all_reduce(vote, self.ctx.world)[0] > 0)

    def close(self) -> None:
        """End the threads and close the files that the run opened."""
        self.profiler.close(self.position.iteration)
        for loader in self.loaders.values():
            if loader is not None:
                loader.close()
        self.reporter.close()


def build_run(
    config: RunConfig, ctx: ParallelContext, build_stages: BuildStages, ledger: Ledger, reporter: Reporter
) -> Run:
    """Model, optimizer and schedules, freshly initialised, without data and without a checkpoint."""
    profiler = StepProfiler(config.logging, ctx, say=print)
    tokenizer = build_tokenizer(TokenizerOptions.of(config.data))
    vocab_size = token_rows(tokenizer, config.vocab_room(tokenizer.vocab_size))
    stages = build_stages(config, ctx, vocab_size)
    parallel = config.parallel
    params = parameters_in_model_order(stages)
    buckets = Buckets(
        params,
        ctx,
        sharding=config.data_parallel_sharding,
        grad_dtype=torch.bfloat16 if config.precision.grad_reduce_in_bf16 else torch.float32,
        overlap_grad_reduce=parallel.overlap_grad_reduce,
        overlap_param_gather=parallel.overlap_param_gather,
        bucket_numel=config.ddp_bucket_elements(sum(param.numel() for param in set(params))),
    )
    if parallel.overlap_param_gather:
        buckets.attach_forward_waits(stages)
    optimizer = build_optimizer(config.optimizer, buckets)
    loss_scale = build_loss_scale(config.precision, ctx.device)
    loss_scale.max_stuck_steps = config.resilience.max_consecutive_skipped_iterations
    run = Run(
        config=config,
        ctx=ctx,
        ledger=ledger,
        reporter=reporter,
        vocab_size=vocab_size,
        stages=stages,
        buckets=buckets,
        optimizer=optimizer,
        loss_scale=loss_scale,
        scheduler=build_scheduler(
            config.optimizer,
            global_batch_size=config.batch_schedule.global_batch_size,
            train_iters=config.training.train_iters,
            train_samples=config.training.train_samples,
        ),
        peak=_agreed_peak(config, ctx),
        timers=Timers(config.logging.timing_log_level),
        profiler=profiler,
    )
    reporter.say(_describe(run))
    return run


def attach_data(run: Run) -> None:
    """Build the data sets and put a loader at the run's position in each."""
    config, ctx = run.config, run.ctx
    tokenizer = build_tokenizer(TokenizerOptions.of(config.data))
    wanted = samples_wanted(config)
    if run.position.dataset_samples and wanted["train"]:
        wanted["train"] = _samples_as_before(run, wanted["train"])
    run.position.dataset_samples = wanted["train"] or run.position.dataset_samples
    is_cyclic = config.data.dataloader_type == "cyclic"
    sizes = [None if is_cyclic and name == "train" and not _is_weighted(config) else wanted[name] for name in SPLITS]
    datasets = dict(zip(SPLITS, build_datasets(config, tokenizer, sizes)))
    for name, dataset in datasets.items():
        if dataset is None or not wanted[name]:
            if name == "train" and config.train_iterations and not config.training.skip_train:
                raise ValueError(f"there is no training data: {_why_untrained(config.data)}")
            run.loaders[name] = None
            continue
        kind = (config.data.dataloader_type or "single") if name == "train" else "single"
        run.loaders[name] = SampleLoader(
            dataset,
            order_of(dataset, kind, name, wraps=name != "train"),
            micro_batch_size=config.training.micro_batch_size if name == "train" else config.eval_micro_batch_size,
            dp_rank=ctx.coords.dp,
            dp_size=ctx.mesh.dp,
            consumed_samples=run.position.consumed_samples if name == "train" else 0,
            num_workers=config.data.num_workers,
        )
    counts = ", ".join(f"{name} {wanted[name]}" for name in SPLITS)
    run.reporter.say(f"samples wanted: {counts}; data position: {run.position.consumed_samples} samples consumed")


def _why_untrained(data: DataConfig) -> str:
    if data.per_split_data_args_path is not None:
        return f'--per-split-data-args-path {data.per_split_data_args_path} names none under "train"'
    return f"--split {data.split} gives none of it to training; let its first number be above 0"


def samples_wanted(config: RunConfig) -> dict[str, int]:
    """Samples of each split, as Megatron asks for them."""
    training = config.training
    block = training.eval_iters * config.eval_batch_size
    evaluations = 1
    if training.eval_interval:
        evaluations += max(0, config.train_iterations // training.eval_interval - training.num_evaluations_left_out)
    train = training.train_samples if training.train_samples is not None else config.train_samples_total
    return {"train": 0 if training.skip_train else train, "valid": evaluations * block, "test": block}


def count_parameters(run: Run) -> int:
    """Parameters of the whole model, each counted once and without padding. All ranks call it."""
    place, mine = run.ctx.coords, 0
    if place.tp == place.dp == place.cp == 0:
        for spec in (param.spec for param in run.buckets.params):
            is_copy = "embd" in spec.partial_over and place.pp > 0
            mine += 0 if is_copy else math.prod(spec.valid_shape)
    total = torch.tensor([mine], dtype=torch.float64, device=run.ctx.device)
    return int(all_reduce(total, run.ctx.world)[0])


def _samples_as_before(run: Run, wanted: int) -> int:
    before = run.position.dataset_samples
    if wanted > before:
        run.reporter.say(
            f"WARNING: the run is now {wanted} samples long and its data were ordered for {before}: the order of "
            "samples changes from here on, some may come twice and some never"
        )
        return wanted
    return before


def _is_weighted(config: RunConfig) -> bool:
    """Whether the training data is a blend, which has no epoch of its own."""
    paths = config.data.train_data_path or config.data.data_path or ()
    return len(paths) > 1 or config.data.data_args_path is not None or config.data.per_split_data_args_path is not None


def _agreed_peak(config: RunConfig, ctx: ParallelContext) -> Peak:
    """The mean of the ranks' peaks, so that all compute one MFU."""
    peak = device_peak(ctx.device, device_name(ctx.device), ctx.params_dtype, config.logging.peak_tflops)
    total = all_reduce(torch.tensor([peak.tflops], dtype=torch.float64, device=ctx.device), ctx.world)
    return Peak(float(total[0]) / ctx.mesh.world_size, peak.source)


def _describe(run: Run) -> str:
    mesh, total = run.ctx.mesh, count_parameters(run)
    return (
        f"number of parameters: {total} in all, {sum(param.numel() for param in run.buckets.params)} on rank 0; "
        f"layout TP {mesh.tp}, PP {mesh.pp}, DP {mesh.dp} on {device_name(run.ctx.device)}, "
        f"{run.config.params_dtype_name}; peak {run.peak.tflops:.4g} TFLOP/s per rank ({run.peak.source})"
    )
