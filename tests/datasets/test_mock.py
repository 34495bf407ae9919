"""Mock documents, as Megatron generates them."""

import numpy as np

from megatron.datasets.mock import MockSource


def test_documents():
    source = MockSource(vocab_size=100, eod=99)
    assert len(source) == 100_000
    assert source.sequence_lengths[:4].tolist() == [3484, 2609, 2094, 1105]
    assert source.sequence_lengths.min() >= 1 and source.sequence_lengths.max() <= 4095
    whole = source.get(0)
    assert whole[:3].tolist() == [1, 2, 3] and whole[98:101].tolist() == [99, 0, 1] and whole[-1] == 99
    assert np.array_equal(source.get(0, 50, 20), whole[50:70])
    assert np.array_equal(source.get(0, 3480), whole[3480:])
    assert source.get(0, 3484).tolist() == []
