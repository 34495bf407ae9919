"""Activation recomputation (Chen et al. 2016): keep the input of some layers, run them again in the backward pass.

Dropout is a function of coordinates, so the second forward is the first one without a random state being kept. The
collectives of what is run again are issued again, in the same order on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.utils.checkpoint import checkpoint

from megatron.config.recompute import RecomputeConfig


class LayerRun(NamedTuple):
    """Consecutive layers of a stage, and whether only their input is kept."""

    layers: range
    is_recomputed: bool


def layer_runs(recompute: RecomputeConfig, num_layers: int) -> list[LayerRun]:
    """How the layers of a stage are grouped; all of them, in order."""
    if recompute.granularity != "full":
        return [LayerRun(range(num_layers), False)]
    size = recompute.recompute_num_layers
    if recompute.recompute_method == "uniform":
        starts = range(0, num_layers, size)
        return [LayerRun(range(start, min(start + size, num_layers)), True) for start in starts]
    recomputed = min(size, num_layers)
    runs = [LayerRun(range(number, number + 1), True) for number in range(recomputed)]
    return [*runs, LayerRun(range(recomputed, num_layers), False)]


def run(function: Callable[..., torch.Tensor], *args: Any, is_recomputed: bool) -> torch.Tensor:
    """function(*args); if `is_recomputed`, only the arguments are kept for the backward pass."""
    if is_recomputed and torch.is_grad_enabled():
        return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
    return function(*args)
