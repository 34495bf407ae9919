"""Box arithmetic against numpy indexing."""

import random

import numpy as np
import pytest

from megatron.checkpoint.boxes import Box, flat_range, flat_span, intersect, whole


def at(array, box):
    return array[tuple(slice(o, o + n) for o, n in zip(box.offset, box.size))]


def random_box(rng, shape):
    offset = tuple(rng.randrange(n) for n in shape)
    return Box(offset, tuple(rng.randint(1, n - o) for n, o in zip(shape, offset)))


@pytest.mark.parametrize("seed", range(200))
def test_a_flat_range_cuts_into_few_boxes_that_hold_it_in_order(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(1, 4)))
    array = np.arange(np.prod(shape)).reshape(shape)
    start = rng.randint(0, array.size)
    stop = rng.randint(start, array.size)
    cuts = list(flat_range(shape, start, stop))
    assert len(cuts) <= 2 * len(shape) - 1
    assert [first for first, _ in cuts] == [at(array, box).flat[0] for _, box in cuts]
    together = np.concatenate([at(array, box).ravel() for _, box in cuts]) if cuts else np.arange(0)
    np.testing.assert_array_equal(together, np.arange(start, stop))


def test_a_flat_range_outside_the_array_is_refused():
    with pytest.raises(ValueError, match="outside"):
        list(flat_range((2, 3), 0, 7))


@pytest.mark.parametrize("seed", range(50))
def test_intersection_is_the_set_of_common_indices(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 3)))
    a, b = random_box(rng, shape), random_box(rng, shape)
    array = np.arange(np.prod(shape)).reshape(shape)
    common = intersect(a, b)
    expected = set(at(array, a).flat) & set(at(array, b).flat)
    assert (set(at(array, common).flat) if common else set()) == expected
    if common:
        inside = at(array, a)
        assert set(at(inside, common.relative_to(a)).flat) == expected


@pytest.mark.parametrize("seed", range(50))
def test_flat_span_is_the_first_and_last_index(seed):
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
    box = random_box(rng, shape)
    inside = at(np.arange(np.prod(shape)).reshape(shape), box)
    assert flat_span(shape, box) == (inside.min(), inside.max() + 1)


def test_whole_box():
    assert whole((2, 3)) == Box((0, 0), (2, 3)) and whole((2, 3)).numel == 6
