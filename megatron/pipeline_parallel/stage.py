"""What the pipeline asks of a model: a stage is called with hidden states and gives hidden states, or the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch

Batch = Mapping[str, torch.Tensor]
"""One microbatch: named tensors on the device of the stages. Every pipeline rank has it, so none is sent along."""


class LossOutput(Protocol):
    """What the last stage returns: a NamedTuple with the summed loss first; further fields are passed through."""

    loss_sum: torch.Tensor
    """fp32 scalar, a sum over the microbatch's target tokens."""

    def _replace(self, **fields: Any) -> LossOutput: ...


class Stage(Protocol):
    """A run of consecutive layers, with the embedding before it (first stage) or the head behind it (last stage).

    `forward(hidden, batch)`: hidden is None on the first stage, elsewhere the hidden states of the stage before, of
    `hidden_shape(batch)` and `hidden_dtype`. Returns hidden states of the same shape and dtype, or a `LossOutput` on
    the last stage. A stage without layers returns `hidden` itself.
    """

    is_first: bool
    is_last: bool
    hidden_dtype: torch.dtype

    forward: Callable[[torch.Tensor | None, Batch], Any]

    def hidden_shape(self, batch: Batch) -> tuple[int, ...]:
        """Local shape of the hidden states of this microbatch, the same for every stage."""
        ...
