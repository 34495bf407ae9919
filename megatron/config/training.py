"""How much is trained on: batches, iterations, evaluation, the seed."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    micro_batch_size: int | None = flag(None)
    """Sequences that one process handles in one forward pass. Required."""
    global_batch_size: int | None = flag(None)
    """Sequences of one optimizer step, over all replicas. None: micro batch x data-parallel size."""
    rampup_batch_size: tuple[int, ...] | None = flag(None, nargs=3, metavar=("START", "INCREMENT", "SAMPLES"))
    """Start with a batch of START, grow by INCREMENT up to the global batch, evenly over the first SAMPLES samples."""
    train_iters: int | None = flag(None)
    """Optimizer steps of the whole run. Exactly one of --train-iters and --train-samples."""
    train_samples: int | None = flag(None)
    """Sequences of the whole run. Exactly one of --train-iters and --train-samples."""
    calculate_per_token_loss: bool = flag(True, names=("--no-calculate-per-token-loss",), own=True)
    """Average the loss within each microbatch, then over microbatches and replicas, as Megatron does by default. Without
    this flag every unmasked token of the global batch weighs the same."""
    eval_interval: int | None = flag(None)
    """Steps between evaluations on the validation set. None: no evaluation while training."""
    eval_iters: int = flag(100)
    """Global batches of one evaluation. 0: no evaluation at all."""
    skip_train: bool = flag(False)
    """Do not train; only evaluate the loaded checkpoint."""
    seed: int = flag(1234)
    """Seed of initial weights, dropout and data order. Above 0."""
    deterministic_mode: bool = flag(False)
    """Only kernels that give the same bits every time."""
    check_config: bool = flag(False, own=True)
    """Stop after all checks and print what would run. Nothing is built and no process group is made."""

    def __post_init__(self) -> None:
        pass
