"""Where state is saved and loaded, and what of it."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.rules import at_least, changed, raise_if, shown, whole_at_least_one


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
        raise_if(self.problems())

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = at_least(self, 1, "save_interval", "save_retain_interval")
        lines += at_least(self, 0, "ckpt_step")
        if self.save is not None and self.save_interval is None:
            lines.append(f"--save {self.save} needs --save-interval, the steps between checkpoints; give it")
        interval, retain = self.save_interval, self.save_retain_interval
        if (
            retain is not None
            and whole_at_least_one(retain)
            and (not whole_at_least_one(interval) or retain % interval)
        ):
            lines.append(
                f"--save-retain-interval {retain} is not a multiple of --save-interval {interval}: no such checkpoint "
                "would be "
                "written; change one of them"
            )
        if self.load is None:
            lines += [
                f"{shown(self, name)} needs --load, the directory to load from; give it or drop this flag"
                for name in changed(self, "ckpt_step", "exit_on_missing_checkpoint", "use_checkpoint_args")
            ]
        if self.finetune and self.load is None and self.pretrained_checkpoint is None:
            lines.append("--finetune needs --load or --pretrained-checkpoint, the weights to start from; give one")
        return lines
