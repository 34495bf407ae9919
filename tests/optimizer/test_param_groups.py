"""Rates of a bucket from its key."""

from __future__ import annotations

from megatron.data_parallel.layout import BucketKey
from megatron.optimizer.lr_schedule import Rates
from megatron.optimizer.param_groups import rates_of


def test_rates_by_group_and_decay():
    rates = Rates({"": 1e-3, "embedding": 5e-3}, 0.1)
    key = BucketKey("float32", ("dp", "cp"), (), True, "")
    assert rates_of(key, rates) == (1e-3, 0.1)
    assert rates_of(key._replace(decay=False), rates) == (1e-3, 0.0)
    assert rates_of(key._replace(lr_group="embedding"), rates) == (5e-3, 0.1)
