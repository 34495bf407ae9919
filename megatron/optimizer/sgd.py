"""SGD with momentum on a flat fp32 shard, by torch's fused kernel. Weight decay is added to the gradient (L2)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.optimizer.rules import UpdateSettings


class Sgd:
    """`UpdateRule` of SGD; without momentum it has no state.

    Args:
        momentum: decay of the running sum of gradients; 0: none.
    """

    def __init__(self, *, momentum: float):
        self.momentum = momentum
        self.state_names: tuple[str, ...] = ("momentum",) if momentum else ()

    def update_(
        self, weights: torch.Tensor, grads: torch.Tensor, states: Sequence[torch.Tensor], settings: UpdateSettings
    ) -> None:
        """See `UpdateRule.update_`. The sum starts at zero, so its first value is the first gradient."""
        torch._fused_sgd_(
            [weights],
            [grads],
            list(states),
            weight_decay=settings.weight_decay,
            momentum=self.momentum,
            lr=settings.lr,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            grad_scale=settings.divisor,
            found_inf=settings.skip,
        )
