"""The sample order against a plain walk over the documents, and its rules for epochs."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.datasets.sample_index import build_sample_order, plan_epochs


def walk(lengths, document_index, num_samples, sequence_length, extra):
    """Sample starts found one document at a time."""
    rows, position, offset = [(0, 0)], 0, 0
    while len(rows) <= num_samples:
        needed = sequence_length + extra
        while True:
            available = int(lengths[document_index[position]]) - offset
            if available >= needed:
                offset += needed - extra
                break
            if position == len(document_index) - 1:
                offset = int(lengths[document_index[position]]) - extra
                break
            needed -= available
            position, offset = position + 1, 0
        rows.append((position, offset))
    return rows


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30),
    sequence_length=st.integers(1, 20),
    extra=st.integers(0, 1),
    num_samples=st.one_of(st.none(), st.integers(1, 60)),
    keep=st.booleans(),
)
def test_equals_a_walk_over_documents(lengths, sequence_length, extra, num_samples, keep):
    lengths = np.array(lengths, dtype=np.int32)
    if num_samples is None and lengths.sum() < sequence_length + extra:
        return
    order = build_sample_order(
        lengths,
        np.arange(len(lengths), dtype=np.int32),
        num_samples=num_samples,
        sequence_length=sequence_length,
        seed=7,
        extra_tokens=extra,
        keep_last_partial=keep,
    )
    count = len(order.shuffle_index)
    assert num_samples is None or count >= num_samples
    assert order.sample_index.tolist() == [
        list(row) for row in walk(lengths, order.document_index, count, sequence_length, extra)
    ]
    assert sorted(order.shuffle_index.tolist()) == list(range(count))
    repeats = np.bincount(order.document_index, minlength=len(lengths))
    assert (repeats == repeats[0]).all()


def test_empty_sequences_are_stepped_over():
    lengths = np.array([0, 3, 0, 4, 0], dtype=np.int32)
    order = build_sample_order(lengths, np.arange(5, dtype=np.int32), num_samples=None, sequence_length=2, seed=3)
    assert len(order.shuffle_index) == 3
    ordered = lengths[order.document_index]
    starts = np.cumsum(ordered) - ordered
    assert (starts[order.sample_index[1:, 0]] + order.sample_index[1:, 1]).tolist() == [2, 4, 6]


@pytest.mark.parametrize(
    "num_samples, epochs, separate",
    [(None, 1, False), (0, 1, False), (9, 1, False), (10, 2, True), (15, 2, True), (16, 2, False), (19, 2, False)],
)
def test_the_final_epoch_is_separate_below_80_percent(num_samples, epochs, separate):
    """100 tokens, samples of 10 + 1: 9 in one epoch, so fewer than int(0.8 x 9) = 7 wanted of the last one."""
    plan = plan_epochs(100, num_samples, 10, 1)
    assert (plan.num_epochs, plan.is_final_epoch_separate) == (epochs, separate)


def test_a_separate_final_epoch_comes_last():
    lengths = np.full(20, 10, dtype=np.int32)
    order = build_sample_order(lengths, np.arange(20, dtype=np.int32), num_samples=45, sequence_length=10, seed=5)
    before = (2 * 200 - 1) // 10
    assert sorted(order.shuffle_index[:before].tolist()) == list(range(before))
    assert sorted(order.document_index[40:].tolist()) == list(range(20))


def test_same_inputs_same_order_another_seed_another_order():
    lengths = np.random.default_rng(1).integers(1, 50, 100).astype(np.int32)
    build = lambda seed: build_sample_order(  # noqa: E731
        lengths, np.arange(100, dtype=np.int32), num_samples=100, sequence_length=8, seed=seed
    )
    first, again, other = build(1), build(1), build(2)
    assert all(np.array_equal(a, b) for a, b in zip(first, again))
    assert not np.array_equal(first.document_index, other.document_index)


def test_a_split_without_tokens_is_an_error_not_a_loop():
    lengths = np.array([0, 0, 5], dtype=np.int32)
    with pytest.raises(ValueError, match="no tokens"):
        build_sample_order(lengths, np.arange(2), num_samples=10, sequence_length=4, seed=1)
    with pytest.raises(ValueError, match="no tokens"):
        build_sample_order(lengths, np.arange(0), num_samples=10, sequence_length=4, seed=1)
    with pytest.raises(ValueError, match="too few"):
        build_sample_order(lengths, np.arange(2, 3), num_samples=None, sequence_length=8, seed=1)


def test_a_negative_length_is_damage():
    with pytest.raises(ValueError, match="1 have a negative length"):
        build_sample_order(np.array([30, -5], np.int32), np.arange(2), num_samples=2, sequence_length=4, seed=1)
