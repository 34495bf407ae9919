"""AdamW on a flat fp32 shard (Loshchilov and Hutter, arXiv:1711.05101), by torch's fused kernel.

Decay is decoupled: weights shrink by lr * weight_decay before the step, as Megatron's "adam" does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.optimizer.rules import UpdateSettings


class Adam:
    """`UpdateRule` of Adam with decoupled weight decay.

    Args:
        beta1, beta2: decay of the means of gradients and of their squares.
        eps: added to the denominator.
    """

    state_names = ("exp_avg", "exp_avg_sq")

    def __init__(self, *, beta1: float, beta2: float, eps: float):
        self.beta1, self.beta2, self.eps = beta1, beta2, eps

    def update_(
        self, weights: torch.Tensor, grads: torch.Tensor, states: Sequence[torch.Tensor], settings: UpdateSettings
    ) -> None:
        """See `UpdateRule.update_`."""
        exp_avg, exp_avg_sq = states
        torch._fused_adamw_(
            [weights],
            [grads],
            [exp_avg],
            [exp_avg_sq],
            [],
            [settings.step],
            lr=settings.lr,
            beta1=self.beta1,
            beta2=self.beta2,
            weight_decay=settings.weight_decay,
            eps=self.eps,
            amsgrad=False,
            maximize=False,
            grad_scale=settings.divisor,
            found_inf=settings.skip,
        )
