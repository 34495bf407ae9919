"""Number formats of weights and activations, and the loss scale that fp16 needs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.rules import above_zero, at_least, raise_if, shown


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    bf16: bool = flag(False)
    """Weights and activations in bfloat16; master weights and gradients in fp32."""
    fp16: bool = flag(False)
    """Weights and activations in float16 with a loss scale; master weights and gradients in fp32."""
    grad_reduce_in_bf16: bool = flag(False)
    """Sum gradients over microbatches and ranks in bfloat16 instead of fp32: half the memory and traffic, less exact.
    Only with --bf16."""
    loss_scale: float | None = flag(None)
    """Fixed loss scale for fp16, a power of two. None: dynamic."""
    initial_loss_scale: float = flag(2.0**32)
    """First dynamic loss scale."""
    min_loss_scale: float = flag(1.0)
    """Smallest dynamic loss scale."""
    loss_scale_window: float = flag(1000)
    """Good steps in a row after which the dynamic loss scale doubles."""
    hysteresis: int = flag(2)
    """Overflows tolerated before the dynamic loss scale is halved."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = above_zero(self, "loss_scale", "initial_loss_scale", "min_loss_scale")
        lines += at_least(self, 1, "loss_scale_window", "hysteresis")
        if self.fp16 and self.bf16:
            lines.append("--fp16 and --bf16 contradict each other; keep one")
        if self.grad_reduce_in_bf16 and not self.bf16:
            lines.append("--grad-reduce-in-bf16 needs --bf16; add it or drop this one")
        if self.loss_scale is not None and not self.fp16:
            lines.append(f"{shown(self, 'loss_scale')} would be ignored without --fp16; add --fp16 or drop it")
        if self.min_loss_scale > self.initial_loss_scale:
            lines.append(
                f"--min-loss-scale {self.min_loss_scale} is above --initial-loss-scale {self.initial_loss_scale}; "
                "lower it"
            )
        return lines
