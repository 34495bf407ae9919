"""The ramp passes the sizes it should, and counts steps and samples consistently."""

import pytest

from megatron.training.batch_size import BatchSizes


def test_constant():
    sizes = BatchSizes.of(8, None, 4)
    assert sizes.at(0) == sizes.at(1000) == 8
    assert sizes.iterations(41) == 5 and sizes.samples(5) == 40


def test_ramp_grows_evenly_over_its_samples():
    sizes = BatchSizes.of(8, (2, 2, 30), 2)  # 3 increments of 10 samples each
    assert [sizes.at(consumed) for consumed in (0, 9, 10, 19, 20, 29, 30, 31)] == [2, 2, 4, 4, 6, 6, 8, 8]
    consumed, seen = 0, []
    while consumed < 60:
        seen.append(sizes.at(consumed))
        consumed += seen[-1]
    assert seen == [2, 2, 2, 2, 2, 4, 4, 4, 6, 6, 8, 8, 8, 8]
    assert [sizes.samples(n) for n in range(14)] == [sum(seen[:n]) for n in range(14)]
    assert all(sizes.iterations(sizes.samples(n)) == n for n in range(14))
    assert sizes.iterations(sizes.samples(5) + 3) == 5  # the next step needs 4


def test_a_ramp_that_starts_full_or_lasts_no_sample_is_constant():
    assert BatchSizes.of(8, (8, 2, 100), 2).at(0) == 8
    assert BatchSizes.of(8, (2, 2, 0), 2).at(0) == 8


@pytest.mark.parametrize(
    ("ramp", "unit", "words"),
    [
        ((2, 4, 10), 2, "--rampup-batch-size 2 4 10 does not reach --global-batch-size 8"),
        ((16, 2, 10), 2, "does not reach"),
        ((2, 3, 10), 2, "passes a batch of 5"),
        (None, 3, "--global-batch-size 8 is not a multiple"),
    ],
)
def test_sizes_that_do_not_fit_are_named(ramp, unit, words):
    with pytest.raises(ValueError, match=words):
        BatchSizes.of(8, ramp, unit)
