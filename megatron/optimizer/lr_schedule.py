"""Learning rate and weight decay as functions of the samples consumed; pure Python, no torch.

The count starts at 0 and moves after each update, so the first update of a run with warm-up is made at `init_lr`,
and the rate that a log line shows after iteration k is the one iteration k + 1 uses. Rates are handed to the
optimizer at each step and stored nowhere else: no parameter group can keep an old bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

LR_STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
WSD_STYLES = ("exponential", "linear", "cosine", "minus_sqrt")
WD_STYLES = ("constant", "linear", "cosine")


class LrRange(NamedTuple):
    """Highest and lowest learning rate of a group of parameters."""

    max_lr: float
    min_lr: float


class Rates(NamedTuple):
    """What one optimizer step uses."""

    lr: Mapping[str, float]
    """Learning rate by `ParamSpec.lr_group`; "" is the rate that is logged."""
    weight_decay: float

    def lr_of(self, lr_group: str) -> float:
        """The rate of `lr_group`; a group without one of its own has the common rate."""
        return self.lr.get(lr_group, self.lr[""])


@dataclass(frozen=True, kw_only=True)
class LrSchedule:
    """Linear warm-up, then a decay style, then the lowest rate. All steps are samples."""

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    """Rate before the first update of a warm-up."""
    warmup_steps: float = 0
    """Samples of warm-up; 0: none. Not always whole (a fraction of the decay)."""
    decay_steps: int
    """Samples at which the decay ends, warm-up included."""
    style: str = "linear"
    wsd_decay_steps: int | None = None
    """Samples of WSD's final decay."""
    wsd_style: str = "exponential"

    def __post_init__(self):
        if self.style not in LR_STYLES:
            raise ValueError(f"--lr-decay-style {self.style} is not one of {', '.join(LR_STYLES)}")
        if self.wsd_style not in WSD_STYLES:
            raise ValueError(f"--lr-wsd-decay-style {self.wsd_style} is not one of {', '.join(WSD_STYLES)}")
        if not 0 <= self.min_lr <= self.max_lr:
            raise ValueError(
                f"--min-lr {self.min_lr} and --lr {self.max_lr}: needs 0 <= min-lr <= lr; change one of them"
            )
        if self.init_lr > self.max_lr:
            raise ValueError(f"--lr-warmup-init {self.init_lr} is above --lr {self.max_lr}; lower it")
        if not 0 <= self.warmup_steps < self.decay_steps:
            raise ValueError(
                f"learning-rate warm-up of {self.warmup_steps:g} samples is not shorter than the decay of "
                f"{self.decay_steps} samples; shorten --lr-warmup-* or lengthen --lr-decay-*"
            )
        if self.style == "WSD" and (self.wsd_decay_steps is None or self.wsd_decay_steps < 1):
            raise ValueError(
                f"--lr-decay-style WSD needs the length of its final decay, not {self.wsd_decay_steps}; "
                "give --lr-wsd-decay-iters or --lr-wsd-decay-samples"
            )

    def lr(self, steps: float, bounds: LrRange | None = None) -> float:
        """The rate after `steps` samples, between this schedule's bounds or those given."""
        max_lr, min_lr = bounds or (self.max_lr, self.min_lr)
        if self.warmup_steps > 0 and steps <= self.warmup_steps:
            return self.init_lr + (max_lr - self.init_lr) * steps / self.warmup_steps
        if self.style == "constant":
            return max_lr
        if steps > self.decay_steps:
            return min_lr
        if self.style == "inverse-square-root":
            return max(min_lr, max_lr * math.sqrt(max(self.warmup_steps, 1)) / math.sqrt(max(steps, 1)))
        return min_lr + self._share_left(steps) * (max_lr - min_lr)

    def _share_left(self, steps: float) -> float:
        """How much of max_lr - min_lr is left, 1 to 0."""
        if self.style == "WSD":
            done = (steps - (self.decay_steps - self.wsd_decay_steps)) / self.wsd_decay_steps
            if done <= 0:
                return 1.0
            if self.wsd_style == "exponential":
                return 2.0 * 0.5**done - 1.0
            if self.wsd_style == "minus_sqrt":
                return 1.0 - math.sqrt(done)
            return _falling(self.wsd_style, done)
        return _falling(self.style, (steps - self.warmup_steps) / (self.decay_steps - self.warmup_steps))


@dataclass(frozen=True, kw_only=True)
class WeightDecaySchedule:
    """Weight decay from `start` to `end` over `incr_steps` samples."""

    start: float
    end: float
    incr_steps: int
    style: str = "constant"

    def __post_init__(self):
        if self.style not in WD_STYLES:
            raise ValueError(f"--weight-decay-incr-style {self.style} is not one of {', '.join(WD_STYLES)}")
        if not 0 <= self.start <= self.end:
            raise ValueError(
                f"--start-weight-decay {self.start} and --end-weight-decay {self.end}: needs 0 <= start <= end; "
                "swap or raise them"
            )
        if self.style == "constant" and self.start != self.end:
            raise ValueError(
                f"--start-weight-decay {self.start} differs from --end-weight-decay {self.end} under "
                "--weight-decay-incr-style constant; choose linear or cosine, or give one --weight-decay"
            )

    def weight_decay(self, steps: float) -> float:
        """The weight decay after `steps` samples."""
        if self.style == "constant" or steps > self.incr_steps:
            return self.end
        done = steps / self.incr_steps
        return self.start + (1.0 - _falling(self.style, done)) * (self.end - self.start)


def _falling(style: str, done: float) -> float:
    """1 at done = 0, 0 at done = 1."""
    return 1.0 - done if style == "linear" else 0.5 * (math.cos(math.pi * done) + 1.0)
