"""What an update rule is: an elementwise change of a flat fp32 shard, which knows no parallelism.

A rule must leave weights and states untouched where `skip` is 1, without asking the host. To add an optimizer, write a
class of this shape and name it in `sharded.build_optimizer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch


class UpdateSettings(NamedTuple):
    """What one update of one bucket uses beside its tensors."""

    lr: float
    weight_decay: float
    step: torch.Tensor
    """0-d fp32: the number of this update, counted from 1, skipped ones left out."""
    divisor: torch.Tensor | None
    """0-d fp32 that gradients are divided by; None: 1."""
    skip: torch.Tensor | None
    """0-d fp32, 1: change nothing; None: 0."""


class UpdateRule(Protocol):
    """One optimizer."""

    state_names: tuple[str, ...]
    """Checkpoint names of its fp32 states, each of the shard's shape and zero at the start."""

    def update_(
        self, weights: torch.Tensor, grads: torch.Tensor, states: Sequence[torch.Tensor], settings: UpdateSettings
    ) -> None:
        """Change fp32 `weights` and `states` (all 1-D, equal shapes); `grads` may be overwritten."""
