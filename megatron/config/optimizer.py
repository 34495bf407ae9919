"""The optimizer: rule, learning-rate and weight-decay schedules, clipping."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag


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
        pass
