"""A range of one stored parameter and the memory that holds its values or a state of its optimizer."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.topology.param_spec import ParamSpec


class StatePiece(NamedTuple):
    """What a checkpoint reads and writes."""

    kind: str
    """"param", "master" (fp32 of a 16-bit parameter), or a state: "exp_avg", "exp_avg_sq", "momentum"."""
    spec: ParamSpec
    start: int
    """First element of the local stored parameter, flattened."""
    stop: int
    view: torch.Tensor
    """1-D, the live memory of those elements; loading writes into it."""
    sharded_over: tuple[str, ...]
    """Mesh axes over which the parameter's ranges are dealt; () where each rank holds the whole."""
