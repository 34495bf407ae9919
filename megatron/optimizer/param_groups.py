"""Which rates a bucket's parameters are updated with. All parameters of a bucket share them: they are in its key."""

from __future__ import annotations

from megatron.data_parallel.layout import BucketKey
from megatron.optimizer.lr_schedule import Rates


def rates_of(key: BucketKey, rates: Rates) -> tuple[float, float]:
    """(learning rate, weight decay) for a bucket: no decay where its specs say so (biases, norms)."""
    return rates.lr_of(key.lr_group), rates.weight_decay if key.decay else 0.0
