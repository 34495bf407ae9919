"""How much is trained on: batches, iterations, evaluation, the seed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.rules import at_least, at_most_one, raise_if, required, shown

MAX_SEED = 2**32 - 1
"""NumPy's generator, which draws Megatron's data order, takes no larger one."""
MAX_LENGTH = 2**40
"""Steps or samples of a run; the order of that many samples would fill eight terabytes."""


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    micro_batch_size: int | None = flag(None)
    """Sequences that one process handles in one forward pass. Required."""
    global_batch_size: int | None = flag(None)
    """Sequences of one optimizer step, over all replicas. None: micro batch x data-parallel size."""
    rampup_batch_size: tuple[int, ...] | None = flag(None, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"))
    """Start with a batch of START, grow by INCREMENT up to the global batch, evenly over the first SAMPLES samples."""
    step_batch_size_schedule: str | None = flag(None)
    """Batches by tokens trained on, "0:768 250B:1536": from so many tokens on (K, M, B, T) this global batch."""
    train_iters: int | None = flag(None)
    """Optimizer steps of the whole run. Exactly one of --train-iters and --train-samples."""
    train_samples: int | None = flag(None)
    """Sequences of the whole run. Exactly one of --train-iters and --train-samples."""
    calculate_per_token_loss: bool = flag(True, names=("--no-calculate-per-token-loss",), own=True)
    """Average the loss within each microbatch, then over microbatches and replicas, as Megatron does by default.
    Without this flag every unmasked token of the global batch weighs the same."""
    eval_interval: int | None = flag(None)
    """Steps between evaluations on the validation set. None: no evaluation while training."""
    eval_iters: int = flag(100)
    """Global batches of one evaluation. 0: no evaluation at all."""
    eval_global_batch_size: int | None = flag(None)
    """Sequences of one global batch of an evaluation. None: the global batch of training (its last, if it grows)."""
    eval_micro_batch_size: int | None = flag(None)
    """Sequences that one process handles in one forward pass of an evaluation. None: --micro-batch-size."""
    start_eval_at_iter: int | None = flag(None)
    """First step after which an evaluation may come. None: from the start."""
    skip_train: bool = flag(False)
    """Do not train; only evaluate the loaded checkpoint."""
    seed: int = flag(1234)
    """Seed of initial weights, dropout and data order. Above 0."""
    deterministic_mode: bool = flag(False)
    """Only kernels that give the same bits every time."""
    config: str | None = flag(None, own=True, metavar="FILE")
    """YAML or JSON file of flags; typed flags win. Keys are flag names with - or _, nested in sections as you like."""
    check_config: bool = flag(False, own=True)
    """Stop after all checks and print what would run. Nothing is built and no process group is made."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    @property
    def num_evaluations_left_out(self) -> int:
        """How many evaluations of the interval come before --start-eval-at-iter."""
        return max(0, (self.start_eval_at_iter or 0) - 1) // self.eval_interval if self.eval_interval else 0

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = required(self, "micro_batch_size")
        lines += at_least(self, 1, "micro_batch_size", "global_batch_size", "train_samples", "eval_interval", "seed")
        lines += at_least(self, 1, "eval_global_batch_size", "eval_micro_batch_size")
        lines += at_least(self, 0, "train_iters", "eval_iters", "start_eval_at_iter")
        if self.start_eval_at_iter is not None and self.eval_interval is None:
            lines.append(
                f"{shown(self, 'start_eval_at_iter')} would be ignored without --eval-interval; add it or drop this one"
            )
        lines += at_most_one(
            self,
            "each sets the global batch of every step",
            "step_batch_size_schedule",
            "rampup_batch_size",
        )
        lines += at_most_one(
            self, "each sets the global batch of every step", "step_batch_size_schedule", "global_batch_size"
        )
        if self.seed > MAX_SEED:
            lines.append(
                f"{shown(self, 'seed')} is above {MAX_SEED}, the largest seed of the data order; use a smaller one"
            )
        for name in ("train_iters", "train_samples"):
            if (getattr(self, name) or 0) > MAX_LENGTH:
                lines.append(f"{shown(self, name)} is above {MAX_LENGTH}, the longest a run can be; use a smaller one")
        if self.train_iters is not None and self.train_samples is not None:
            lines.append(
                f"--train-iters {self.train_iters} and --train-samples {self.train_samples} both set the length of "
                "the run; keep "
                "one (--train-samples None takes it back)"
            )
        if self.train_iters is None and self.train_samples is None and not self.skip_train:
            lines.append("--train-iters or --train-samples is required: the length of the run")
        if self.rampup_batch_size is not None:
            start, increment, samples = self.rampup_batch_size
            if start < 1 or increment < 1 or samples < 1:
                lines.append(
                    f"{shown(self, 'rampup_batch_size')}: start, increment and samples must each be at least 1; "
                    "change them or "
                    "drop the flag"
                )
        return lines
