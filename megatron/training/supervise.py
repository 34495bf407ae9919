"""A run from its configuration to its exit code: join the mesh, build, restore, train, take everything down.

`train` is one generation and needs only a context, so tests run it on threads; `pretrain` is the program around it.
How errors reach the user: what a user can mend (flags, paths, checkpoints, a diverged loss) is one line without a
traceback, on the first rank. Another rank waits a moment before it speaks: if all failed alike, the launcher has ended
it by then; if it failed alone, nobody else would say why. An error path issues no collective.
"""

from __future__ import annotations

import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import torch

from megatron.checkpoint.format import CheckpointError
from megatron.checkpoint.retention import prepare_save_directory
from megatron.config.run import RunConfig
from megatron.datasets.indexed import DataError
from megatron.distributed.collectives import barrier
from megatron.distributed.context import ParallelContext
from megatron.distributed.device import has_gpu, resolve_backend
from megatron.distributed.launch import launch, set_environment
from megatron.ledger.writer import Ledger
from megatron.optimizer.loss_scale import LossScaleExhausted
from megatron.topology.mesh import Mesh
from megatron.training import exit_codes
from megatron.training.loop import Loop, Outcome, TrainingError
from megatron.training.metrics import StepRecord
from megatron.training.process import Process
from megatron.training.report import Reporter
from megatron.training.setup import BuildStages, attach_data, build_run
from megatron.training.signals import StopRequest, catch_signals
from megatron.training.sinks import open_sinks, writing_to
from megatron.training.state import load

PARAMS_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
LONE_ERROR_DELAY_S = 2.0
"""How long a rank other than the first waits before it prints an error that all ranks probably have."""


class UserError(Exception):
    """What the person who started the run can mend, as one line."""


def mesh_of(config: RunConfig) -> Mesh:
    """The mesh the flags ask for."""
    return Mesh(
        tp=config.parallel.tensor_model_parallel_size,
        cp=config.parallel.context_parallel_size,
        pp=config.parallel.pipeline_model_parallel_size,
        dp=config.data_parallel_size,
        order=config.mesh_order,
    )


def train(
    config: RunConfig,
    ctx: ParallelContext,
    build_stages: BuildStages,
    *,
    ledger: Ledger | None = None,
    stop: StopRequest | None = None,
    on_record: Callable[[StepRecord], None] | None = None,
    stream: TextIO | None = None,
) -> Outcome:
    """Train (or, with --skip-train, evaluate) in one generation of the run; every rank calls it.

    Raises UserError for what does not fit the flags before the first step, TrainingError when the run cannot go on.
    """
    ledger = Ledger(None) if ledger is None else ledger
    stop = StopRequest() if stop is None else stop
    reporter = Reporter(
        is_first=ctx.rank == 0,
        logging=config.logging,
        total_iterations=config.train_iterations,
        world_size=ctx.mesh.world_size,
        save_directory=config.checkpoint.save,
        stream=stream,
    )
    with _user_errors(), ledger.phase("init"):
        if config.checkpoint.save and ctx.rank == 0:
            with writing_to(f"--save {config.checkpoint.save}"):
                prepare_save_directory(config.checkpoint.save, reporter.say)
        barrier(ctx.world)
        with reporter.stage("building the model and its optimizer"):
            run = build_run(config, ctx, build_stages, ledger, reporter)
    try:
        with _user_errors(), ledger.phase("init"):
            load(run)
            with reporter.stage("building the data sets"):
                attach_data(run)
            reporter.begin(run.position.iteration, open_sinks(config, run.position.iteration) if ctx.rank == 0 else ())
        reporter.note(f"Starting job\tIteration: {run.position.iteration}")
        return Loop(run, stop, on_record).train()
    finally:
        run.close()


def pretrain(config: RunConfig, process: Process, build_stages: BuildStages) -> int:
    """The program: one process's part of a run. Returns its exit code (`exit_codes`)."""
    is_first = process.rank == 0
    logging.basicConfig(level=logging.INFO if config.logging.logging_level is None else config.logging.logging_level)
    exit_signal = config.resilience.exit_signal if config.resilience.exit_signal_handler else None
    try:
        with _user_errors(), writing_to(f"--save {config.checkpoint.save}"):
            if config.checkpoint.save:  # on every rank: where one fails alone, the others wait for it to join them
                Path(config.checkpoint.save).mkdir(parents=True, exist_ok=True)
            ledger = Ledger(
                Path(config.checkpoint.save) / "ledger.jsonl" if config.checkpoint.save and is_first else None
            )
        with catch_signals(exit_signal) as stop:
            outcome = _launch_and_train(config, process, build_stages, ledger, stop)
    except (UserError, CheckpointError, DataError, TrainingError, LossScaleExhausted) as error:
        _say_error(process, f"error: {error}")
        return exit_codes.FAILED
    except Exception:
        sys.stderr.write(f"rank {process.rank} failed:\n{traceback.format_exc()}")
        return exit_codes.FAILED
    ledger.close(outcome.reason, outcome.iteration)
    if is_first:
        print(f"finished ({outcome.reason}) at iteration {outcome.iteration}", flush=True)
    return exit_codes.STOPPED_BY_SIGNAL if outcome.reason == "signal" else exit_codes.COMPLETE


def _launch_and_train(
    config: RunConfig, process: Process, build_stages: BuildStages, ledger: Ledger, stop: StopRequest
) -> Outcome:
    with _user_errors():
        backend, note = resolve_backend(config.parallel.distributed_backend or ("nccl" if has_gpu() else "gloo"))
    settings = set_environment(backend)
    if config.training.deterministic_mode:
        torch.use_deterministic_algorithms(True)
    if process.rank == 0:
        for line in (*settings, *filter(None, [note])):
            print(line, flush=True)
    with launch(
        mesh=mesh_of(config),
        rank=process.rank,
        local_rank=process.local_rank,
        backend=backend,
        params_dtype=PARAMS_DTYPES[config.params_dtype_name],
        init_seed=config.training.seed,
        sequence_parallel=config.sequence_parallel,
        timeout_s=60.0 * config.parallel.distributed_timeout_minutes,
    ) as ctx:
        outcome = train(config, ctx, build_stages, ledger=ledger, stop=stop)
        barrier(ctx.world)  # nobody takes the groups down while another rank still speaks
        return outcome


@contextmanager
def _user_errors() -> Iterator[None]:
    """Before the first step a ValueError or a missing file is about the flags."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UserError(" ".join(str(error).split())) from error


def _say_error(process: Process, text: str) -> None:
    if process.rank != 0:
        time.sleep(LONE_ERROR_DELAY_S)
        text = f"[rank {process.rank}] {text}"
    print(text, file=sys.stderr, flush=True)
