"""Blending: the grammar of --data-path and exact shares, extreme weights included (FIELD_REPORTS B26)."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.datasets.blend import (
    Blend,
    BlendedDataset,
    exhaustive_order,
    fields_of,
    normalized,
    parse_blend,
    share_of_samples,
    weighted_order,
)
from megatron.datasets.gpt import GPTDataset, SampleRules
from megatron.datasets.masks import MaskRules


class Counting:
    """A source of one long document of the tokens base, base + 1, ..."""

    def __init__(self, base, tokens):
        self.base = base
        self.sequence_lengths = np.array([tokens], dtype=np.int32)

    def get(self, sequence, offset=0, length=None):
        end = int(self.sequence_lengths[0]) if length is None else offset + length
        return self.base + np.arange(offset, end)


def source_of_40(base=0, num_samples=None):
    return GPTDataset(Counting(base, 161), np.array([0]), num_samples, SampleRules(4, 1), MaskRules(eod=-2))


def naive_order(weights, size):
    counts, order = [0.0] * len(weights), []
    for draw in range(size):
        lags = [w * max(draw, 1.0) - c if w > 0 else -np.inf for w, c in zip(weights, counts)]
        choice = lags.index(max(lags))
        order.append((choice, int(counts[choice])))
        counts[choice] += 1
    return order


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0, 10, allow_subnormal=False), min_size=1, max_size=8), st.integers(1, 200))
def test_greedy_equals_its_definition_and_keeps_shares(weights, size):
    if sum(weights) < 1e-3:
        return
    weights = normalized(weights)
    order = weighted_order(weights, size)
    assert list(zip(order.dataset_index.tolist(), order.dataset_sample_index.tolist())) == naive_order(weights, size)


@pytest.mark.parametrize(
    "weights, draws, counts",
    [
        ((3, 7), 1000, (300, 700)),
        ((0.001, 0.999), 500, (1, 499)),
        ((2, 3, 5), 777, (156, 233, 388)),
        ((1, 0), 100, (100, 0)),
        ((0, 1), 100, (0, 100)),
        ((0, 1, 0, 1), 100, (0, 50, 0, 50)),
    ],
)
def test_b26_counts(weights, draws, counts):
    order = weighted_order(normalized(weights), draws)
    drawn = np.bincount(order.dataset_index, minlength=len(weights))
    assert np.abs(drawn - counts).max() <= 1
    assert all(count > 0 or weight == 0 for count, weight in zip(drawn, weights) if weight * draws >= 1 or not weight)
    assert [count for count, weight in zip(drawn, weights) if weight == 0] == [0] * weights.count(0)
    if len(weights) == 2:
        shares = np.outer(np.arange(1, draws + 1), normalized(weights))
        prefix_counts = np.stack([np.cumsum(order.dataset_index == source) for source in (0, 1)], axis=1)
        assert np.abs(prefix_counts - shares).max() <= 1 + 1e-9


def test_b26_every_draw_is_inside_its_source_and_wraps_by_epoch():
    """Sources of 40 samples asked for 300 and 700: draw k of a source is its sample k mod 40."""
    sources = [source_of_40(0), source_of_40(1000)]
    assert [len(source) for source in sources] == [40, 40]
    blended = BlendedDataset(sources, (3, 7), 1000)
    assert len(blended) == 1000
    places = [blended.locate(draw) for draw in range(1000)]
    for source, wanted in ((0, 300), (1, 700)):
        samples = [sample for chosen, sample in places if chosen == source]
        assert samples == [number % 40 for number in range(wanted)]
    for draw in (0, 999):
        source, sample = places[draw]
        assert np.array_equal(blended[draw]["tokens"], sources[source][sample]["tokens"])
        assert blended[draw]["dataset_id"] == source


def test_the_same_source_twice():
    source = source_of_40()
    blended = BlendedDataset([source, source], (1, 1), 80)
    samples = sorted(blended.locate(draw)[1] for draw in range(80))
    assert samples == sorted(2 * list(range(40)))


def test_more_than_32767_sources():
    order = weighted_order(normalized([1.0] * 40_000), 100)
    assert order.dataset_index.min() == 0 and order.dataset_index.max() == 99
    sizes = np.zeros(40_000, dtype=np.int64)
    sizes[39_999] = 3
    assert exhaustive_order(sizes).dataset_index.tolist() == [39_999] * 3


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=6))
def test_exhaustive_draws_every_sample_once(sizes):
    order = exhaustive_order(sizes)
    for source, size in enumerate(sizes):
        samples = order.dataset_sample_index[order.dataset_index == source]
        assert samples.tolist() == list(range(size))


def test_reserve():
    assert share_of_samples(0.5, 150, 0.005) == 76
    assert share_of_samples(0.2, 150, 0.005) == 31
    assert share_of_samples(1 / 3, 100) == 34


def test_batches_equal_single_samples():
    blended = BlendedDataset([source_of_40(0), source_of_40(1000)], (1, 2), 30)
    fields = fields_of(blended, [3, 0, 29])
    for row, draw in enumerate((3, 0, 29)):
        for name in ("tokens", "labels", "loss_mask", "position_ids"):
            assert np.array_equal(fields[name][row], blended[draw][name])


def test_grammar():
    assert parse_blend(["a"], "--data-path") == Blend(("a",), None)
    assert parse_blend(["a", "b"], "--data-path") == Blend(("a", "b"), None)
    assert parse_blend(["a", "b", "c"], "--data-path") == Blend(("a", "b", "c"), None)
    assert parse_blend(["1", "a"], "--data-path") == Blend(("a",), (1.0,))
    assert parse_blend(["0.3", "a", "7e-1", "b"], "--data-path") == Blend(("a", "b"), (0.3, 0.7))
    assert parse_blend(["0", "a", "1", "a"], "--data-path") == Blend(("a", "a"), (0.0, 1.0))


@pytest.mark.parametrize(
    "items, message",
    [
        ([], "empty"),
        (["-1", "a", "2", "b"], "negative"),
        (["nan", "a", "2", "b"], "not finite"),
        (["0", "a", "0", "b"], "all weights are zero"),
        (["3", "a", "7"], "needs a path"),
        (["3", "a", "x", "b"], "where the weight of b belongs"),
        (["3", "7"], "not by a path"),
        (["a", "3"], "needs a path"),
    ],
)
def test_refused_grammar(items, message):
    with pytest.raises(ValueError, match=message) as caught:
        parse_blend(items, "--valid-data-path")
    assert "--valid-data-path" in str(caught.value)
