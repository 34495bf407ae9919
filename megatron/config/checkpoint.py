"""Where state is saved and loaded, and what of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    save: str | None = flag(None)
    """Directory to save checkpoints in. None: nothing is saved."""
    save_interval: int | None = flag(None, names=("--save-interval", "--persistent-save-interval"))
    """Steps between checkpoints. Needed with --save."""
    save_retain_interval: int | None = flag(None)
    """Keep only checkpoints whose step is a multiple of this, and the newest. None: keep all."""
    no_save_optim: bool = flag(False, names=("--no-save-optim",))
    """Save weights without optimizer state."""
    no_save_rng: bool = flag(False, names=("--no-save-rng",))
    """Save no random state."""
    load: str | None = flag(None)
    """Directory to load from. A directory without a checkpoint starts from scratch."""
    ckpt_step: int | None = flag(None)
    """Step to load. None: the newest."""
    exit_on_missing_checkpoint: bool = flag(False)
    """Stop when --load holds no checkpoint, instead of starting from scratch."""
    finetune: bool = flag(False)
    """Load weights only and count from step 0."""
    pretrained_checkpoint: str | None = flag(None)
    """Directory whose weights to start from (as by --finetune) when --load holds no checkpoint."""
    no_load_optim: bool = flag(False, names=("--no-load-optim",))
    """Load no optimizer state."""
    no_load_rng: bool = flag(False, names=("--no-load-rng",))
    """Load no random state."""
    use_checkpoint_args: bool = flag(False)
    """Take everything that defines the model's function from the checkpoint. Typed flags must agree with it."""
    use_tokenizer_model_from_checkpoint_args: bool = flag(
        True,
        names=(
            "--no-use-tokenizer-model-from-checkpoint-args",
            "--disable-use-tokenizer-model-from-checkpoint-args",
        ),
    )
    """With --use-checkpoint-args, do not take the tokenizer's path from the checkpoint."""

    def __post_init__(self) -> None:
        pass
