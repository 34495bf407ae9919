"""Names of sharding strategies."""

from __future__ import annotations

import pytest

from megatron.data_parallel.residency import residency_of


def test_strategies():
    assert residency_of("no_shard") == (True, True, True)
    assert residency_of("optim") == (True, True, False)
    with pytest.raises(
        ValueError, match="--data-parallel-sharding-strategy optim_grads is not supported yet; use one of"
    ):
        residency_of("optim_grads")
