"""Runs of `train` on threads or gloo ranks, and what a test asks of them afterwards."""

from __future__ import annotations

import io
import tempfile
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch

from megatron.config.run import RunConfig
from megatron.datasets.indexed import IndexedDatasetWriter
from megatron.ledger.writer import Ledger
from megatron.topology.mesh import Mesh
from megatron.training.loop import Outcome
from megatron.training.metrics import StepRecord
from megatron.training.signals import StopRequest
from megatron.training.supervise import PARAMS_DTYPES, mesh_of, train
from tests.helpers.ranks import run_ranks
from tests.training.bigram import build_bigram

TINY = (
    "--num-layers 4 --hidden-size 16 --num-attention-heads 2 --global-batch-size 8 --log-interval 1 --eval-iters 0 "
    "--peak-tflops 1 --num-workers 0 --progress-bar off --hidden-dropout 0 --attention-dropout 0 --split 8,1,1"
)


@cache
def corpus() -> str:
    """Prefix of 200 documents over 127 tokens (127 ends a document) in which the next token can be guessed."""
    prefix = f"{tempfile.mkdtemp(prefix='corpus')}/text"
    draw = np.random.default_rng(0)
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for length in draw.integers(20, 120, 200):
            tokens = (draw.integers(127) + 3 * np.arange(length) + draw.integers(0, 2, length)) % 127
            writer.add_document(np.append(tokens, 127), [length + 1])
        writer.finalize()
    return prefix


class Result(NamedTuple):
    """One rank's view of a finished run."""

    records: list[StepRecord]
    outcome: Outcome
    text: str

    @property
    def losses(self) -> list[float]:
        return [record.loss for record in self.records]

    @property
    def norms(self) -> list[float]:
        return [record.grad_norm for record in self.records]

    @property
    def rates(self) -> list[float]:
        return [record.learning_rate for record in self.records]


def body(ctx, config: RunConfig, build, signal_at: dict[int, int], clock) -> Result:
    """Train on one rank; `signal_at` maps a rank to the iteration after which it is asked to stop (0: at once)."""
    records: list[StepRecord] = []
    stop, stream = StopRequest(), io.StringIO()
    if signal_at.get(ctx.rank) == 0:
        stop.signal_name = "SIGTERM"

    def keep(record: StepRecord) -> None:
        records.append(record)
        if signal_at.get(ctx.rank) == record.iteration:
            stop.signal_name = "SIGTERM"

    ledger = Ledger(None) if clock is None else Ledger(None, clock=clock)
    outcome = train(config, ctx, build, ledger=ledger, stop=stop, on_record=keep, stream=stream)
    return Result(records, outcome, stream.getvalue())


def run_all(
    flags: str,
    *,
    world: int = 1,
    build: Any = build_bigram,
    backend: str = "threads",
    signal_at: dict[int, int] | None = None,
    clock=None,
    base: str = TINY,
) -> list[Result]:
    """Every rank's result of training with `base` and `flags` on `world` ranks, the layout as the flags say.

    The data is `corpus()` unless the flags name another.
    """
    if "-data" not in flags:
        flags += f" --data-path {corpus()}"
    config = RunConfig.from_flags(f"{base} {flags}", world_size=world)
    mesh: Mesh = mesh_of(config)
    return run_ranks(
        world,
        body,
        config,
        build,
        signal_at or {},
        clock,
        mesh=mesh,
        backend=backend,
        params_dtype=PARAMS_DTYPES[config.params_dtype_name],
        sequence_parallel=config.sequence_parallel,
        seed=config.training.seed,
    )


def run_one(flags: str, **options: Any) -> Result:
    """The first rank's result."""
    return run_all(flags, **options)[0]


def same_numbers(left: Result, right: Result) -> bool:
    """Whether two runs agree bit for bit, step by step."""
    return torch.equal(torch.tensor([left.losses, left.norms]), torch.tensor([right.losses, right.norms])) and (
        left.rates == right.rates
    )
