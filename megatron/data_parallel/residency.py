"""Which of a bucket's three buffers every rank keeps whole and which it keeps one shard of."""

from __future__ import annotations

from typing import NamedTuple


class Residency(NamedTuple):
    """True: whole on every rank of the reducing group; False: one shard per rank."""

    params: bool
    grads: bool
    optim: bool


RESIDENCIES = {
    "no_shard": Residency(params=True, grads=True, optim=True),  # DDP
    "optim": Residency(params=True, grads=True, optim=False),  # ZeRO-1
}


def residency_of(strategy: str) -> Residency:
    """The residency that --data-parallel-sharding-strategy names; ValueError for one that is not supported."""
    if strategy not in RESIDENCIES:
        raise ValueError(
            f"--data-parallel-sharding-strategy {strategy} is not supported yet; use one of {', '.join(RESIDENCIES)}"
        )
    return RESIDENCIES[strategy]
