"""What the layers of a stage may know about the tokens of a microbatch, beside their hidden states."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.distributed.rng import fold_in, sample_keys
from megatron.ops.rope import RotaryAngles


@dataclass(frozen=True, kw_only=True)
class SequenceInfo:
    """Letters: S the whole sequence, S' the part of it in the residual stream on this rank, B batch."""

    seed: int
    """Seed of the run's dropout."""
    sample_ids_B: torch.Tensor
    """int64 number of each sample in the run."""
    positions_S: torch.Tensor
    """int64 [S'] places in the sequence of the rows of the residual stream here."""
    rotary: RotaryAngles | None = None
    """Angles [S, B, 1, R/2] of the position ids; None without rotary positions."""
    document_ids_BS: torch.Tensor | None = None
    """int32 number of each token's document; None: attention crosses documents."""

    def sample_keys(self, *site: int | str) -> torch.Tensor:
        """int64 [B] dropout keys for a place in the network, such as (layer number, "attention")."""
        return sample_keys(self.seed, self.sample_ids_B, *site)

    def row_keys(self, *site: int | str) -> torch.Tensor:
        """int64 [S', B] dropout keys of the rows of the residual stream."""
        return fold_in(self.sample_keys(*site)[None, :], self.positions_S[:, None])
