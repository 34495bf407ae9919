"""Global batch by samples consumed, and steps <-> samples."""

from __future__ import annotations

import pytest

from megatron.config.batch_schedule import BatchSchedule


def walk(schedule: BatchSchedule, iterations: int) -> list[int]:
    """Batch sizes of the first steps, by plain addition."""
    sizes, consumed = [], 0
    for _ in range(iterations):
        sizes.append(schedule.size_at(consumed))
        consumed += sizes[-1]
    return sizes


def test_constant():
    schedule = BatchSchedule(global_batch_size=8)
    assert walk(schedule, 3) == [8, 8, 8]
    assert schedule.samples_after(5) == 40
    assert schedule.iterations_for(43) == 5


def test_ramp_grows_evenly_over_its_samples():
    # 3 increments of 4 over 48 samples: one each 16 samples.
    schedule = BatchSchedule(global_batch_size=16, start=4, increment=4, ramp_samples=48)
    assert schedule.sizes == (4, 8, 12, 16)
    assert walk(schedule, 9) == [4, 4, 4, 4, 8, 8, 12, 12, 16]


def test_the_size_does_not_fall_short_of_or_pass_the_global_batch():
    schedule = BatchSchedule(global_batch_size=16, start=4, increment=4, ramp_samples=48)
    assert schedule.size_at(48) == 16 == schedule.size_at(10**9)


@pytest.mark.parametrize("start, increment, ramp", [(None, 1, 0), (4, 4, 48), (2, 2, 100), (16, 1, 10), (8, 8, 1)])
def test_steps_and_samples_agree(start, increment, ramp):
    schedule = BatchSchedule(global_batch_size=16, start=start, increment=increment, ramp_samples=ramp)
    for iterations in range(60):
        samples = schedule.samples_after(iterations)
        assert samples == sum(walk(schedule, iterations))
        assert schedule.iterations_for(samples) == iterations
        assert schedule.iterations_for(samples + schedule.size_at(samples) - 1) == iterations
