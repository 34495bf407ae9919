"""The optimizer: rule, learning-rate and weight-decay schedules, clipping."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.rules import above_zero, at_least, changed, raise_if, shown


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    optimizer: str = flag("adam", choices=("adam", "sgd"))
    """Update rule; adam decouples weight decay (AdamW)."""
    adam_backend: str = flag("torch", choices=("torch", "apex", "transformer_engine"), own=True)
    """Whose fused Adam updates the flat shards. apex and transformer_engine must be installed."""
    adam_beta1: float = flag(0.9)
    """Decay of Adam's mean of gradients."""
    adam_beta2: float = flag(0.999)
    """Decay of Adam's mean of squared gradients."""
    adam_eps: float = flag(1e-8)
    """Added to Adam's denominator."""
    sgd_momentum: float = flag(0.9)
    """Momentum of SGD."""
    clip_grad: float = flag(1.0)
    """Largest global gradient norm; larger gradients are scaled down. 0: no clipping."""
    lr: float | None = flag(None)
    """Highest learning rate. Required for training."""
    min_lr: float = flag(0.0)
    """Lowest learning rate of the decay."""
    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"))
    """How the learning rate falls after the warm-up."""
    lr_decay_iters: int | None = flag(None)
    """Steps (warm-up included) over which the learning rate falls. None: --train-iters."""
    lr_decay_samples: int | None = flag(None)
    """Samples (warm-up included) over which the learning rate falls. None: --train-samples."""
    lr_warmup_fraction: float | None = flag(None)
    """Share of the decay period spent on linear warm-up. None: see --lr-warmup-iters and --lr-warmup-samples."""
    lr_warmup_iters: int = flag(0)
    """Steps of linear warm-up."""
    lr_warmup_samples: int = flag(0)
    """Samples of linear warm-up."""
    lr_warmup_init: float = flag(0.0)
    """Learning rate at the start of the warm-up."""
    lr_wsd_decay_style: str = flag("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """Shape of the final decay of WSD (warm-up, stable, decay)."""
    lr_wsd_decay_iters: int | None = flag(None)
    """Steps of the final decay of WSD."""
    lr_wsd_decay_samples: int | None = flag(None)
    """Samples of the final decay of WSD."""
    decoupled_lr: float | None = flag(None)
    """Highest learning rate of the embedding and the output layer. None: --lr."""
    decoupled_min_lr: float | None = flag(None)
    """Lowest learning rate of the embedding and the output layer. None: --min-lr."""
    weight_decay: float = flag(0.01)
    """Weight decay of matrices; biases and norms are not decayed."""
    start_weight_decay: float | None = flag(None)
    """Weight decay at the first step. None: --weight-decay."""
    end_weight_decay: float | None = flag(None)
    """Weight decay at the last step. None: --weight-decay."""
    apply_wd_to_qk_layernorm: bool = flag(False)
    """Decay the weights of the norms of queries and keys (--qk-layernorm) as matrices are."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """How weight decay moves from start to end."""
    override_opt_param_scheduler: bool = flag(
        False, names=("--override-opt_param-scheduler", "--override-opt-param-scheduler")
    )
    """On resume, take learning-rate and weight-decay schedules from the flags, not from the checkpoint."""
    use_checkpoint_opt_param_scheduler: bool = flag(
        False, names=("--use-checkpoint-opt_param-scheduler", "--use-checkpoint-opt-param-scheduler")
    )
    """On resume, take learning-rate and weight-decay schedules from the checkpoint, not from the flags."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = at_least(
            self,
            0,
            "clip_grad",
            "min_lr",
            "decoupled_min_lr",
            "lr_warmup_iters",
            "lr_warmup_samples",
            "lr_warmup_init",
            "weight_decay",
            "start_weight_decay",
            "end_weight_decay",
        )
        lines += at_least(self, 1, "lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples")
        lines += above_zero(self, "lr", "decoupled_lr", "adam_eps")
        lines += [
            f"{shown(self, name)} is not in [0, 1): it is the share of the former mean that is kept"
            for name in ("adam_beta1", "adam_beta2", "sgd_momentum")
            if not 0 <= getattr(self, name) < 1
        ]
        if self.optimizer != "adam" and self.adam_backend != "torch":
            lines.append(
                f"--adam-backend {self.adam_backend} would be ignored with --optimizer {self.optimizer}; drop it"
            )
        if self.override_opt_param_scheduler and self.use_checkpoint_opt_param_scheduler:
            lines.append(
                "--override-opt_param-scheduler and --use-checkpoint-opt_param-scheduler contradict each other; keep "
                "one"
            )
        return lines + self._rate_problems() + self._decay_problems()

    def _rate_problems(self) -> list[str]:
        lines = []
        if self.lr is not None and self.min_lr > self.lr:
            lines.append(f"--min-lr {self.min_lr} is above --lr {self.lr}; lower --min-lr or raise --lr")
        if self.lr is not None and self.lr_warmup_init > self.lr:
            lines.append(f"--lr-warmup-init {self.lr_warmup_init} is above --lr {self.lr}; lower it")
        if self.decoupled_min_lr is not None and self.decoupled_lr is None:
            lines.append(
                f"{shown(self, 'decoupled_min_lr')} would be ignored without --decoupled-lr; add that flag or drop it"
            )
        if self.decoupled_lr is not None:
            least = self.min_lr if self.decoupled_min_lr is None else self.decoupled_min_lr
            name = "--min-lr" if self.decoupled_min_lr is None else "--decoupled-min-lr"
            if least > self.decoupled_lr:
                lines.append(f"{name} {least} is above --decoupled-lr {self.decoupled_lr}; lower {name} or raise it")
        if self.lr_warmup_fraction is not None:
            if not 0 <= self.lr_warmup_fraction < 1:
                lines.append(
                    f"--lr-warmup-fraction {self.lr_warmup_fraction} is not in [0, 1): it is a share of the decay "
                    "period"
                )
            for name in changed(self, "lr_warmup_iters", "lr_warmup_samples"):
                lines.append(
                    f"--lr-warmup-fraction {self.lr_warmup_fraction} and {shown(self, name)} both set the warm-up; "
                    "keep one"
                )
        return lines

    def _decay_problems(self) -> list[str]:
        lines = []
        wsd = ("lr_wsd_decay_iters", "lr_wsd_decay_samples")
        if self.lr_decay_style == "WSD" and not changed(self, *wsd):
            lines.append(
                "--lr-decay-style WSD needs the length of its final decay; give --lr-wsd-decay-iters (or "
                "--lr-wsd-decay-samples with --train-samples)"
            )
        if self.lr_decay_style != "WSD":
            lines += [
                f"{shown(self, name)} would be ignored with --lr-decay-style {self.lr_decay_style}; use WSD or drop it"
                for name in changed(self, *wsd, "lr_wsd_decay_style")
            ]
        start, end = self.start_weight_decay, self.end_weight_decay
        if self.weight_decay_incr_style == "constant":
            lines += [
                f"{shown(self, name)} needs --weight-decay-incr-style linear or cosine; with constant give "
                "--weight-decay alone"
                for name in changed(self, "start_weight_decay", "end_weight_decay")
            ]
        elif start is None or end is None:
            lines.append(
                f"--weight-decay-incr-style {self.weight_decay_incr_style} needs both --start-weight-decay and "
                "--end-weight-decay; give them or use constant"
            )
        elif start > end:
            lines.append(
                f"--start-weight-decay {start} is above --end-weight-decay {end}; weight decay can only grow, so swap "
                "or equal them"
            )
        return lines
