"""A second norm behind the branches of a block. No torch here, so a wrong flag is found at once."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag


@dataclass(frozen=True, kw_only=True)
class SandwichNormConfig:
    sandwich_norm: str = flag("both", choices=("both", "attention", "mlp", "none"), own=True)
    """Which branches get a second norm, behind them; none is the plain pre-norm block."""
    sandwich_norm_init: float = flag(1.0, own=True)
    """Initial weight of the second norms, above 0: how large a branch is against the residual stream at the start."""

    def __post_init__(self) -> None:
        if self.sandwich_norm_init <= 0:
            raise ValueError(
                f"--sandwich-norm-init {self.sandwich_norm_init} is not above 0: the branches would start "
                "switched off or negated; use 1.0 (the paper's) or a small number such as 0.1"
            )
