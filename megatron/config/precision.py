"""Number formats of weights and activations, and the loss scale that fp16 needs."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class PrecisionConfig:
    bf16: bool = flag(False)
    """Weights and activations in bfloat16; master weights and gradients in fp32."""
    fp16: bool = flag(False)
    """Weights and activations in float16 with a loss scale; master weights and gradients in fp32."""
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
        pass
