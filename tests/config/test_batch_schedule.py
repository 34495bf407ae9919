"""Global batch by samples consumed, and steps <-> samples."""

from __future__ import annotations

import pytest

from megatron.config.batch_schedule import BatchSchedule, batch_steps


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


def test_steps():
    schedule = BatchSchedule(global_batch_size=8, steps=batch_steps("0:2 20:4 0.04K:8", 4))
    assert schedule.steps == ((0, 2), (5, 4), (10, 8)) and schedule.sizes == (2, 4, 8)
    assert walk(schedule, 7) == [2, 2, 2, 4, 8, 8, 8]
    for iterations in range(20):
        samples = schedule.samples_after(iterations)
        assert samples == sum(walk(schedule, iterations))
        assert schedule.iterations_for(samples) == iterations
        assert schedule.iterations_for(samples + schedule.size_at(samples) - 1) == iterations


def test_units_of_steps():
    steps = batch_steps("0:768 250B:1536 1.5t:3072", 4096)
    assert steps == ((0, 768), (61_035_156, 1536), (366_210_937, 3072))
    assert batch_steps("256:4 0:2", 4) == batch_steps("0:2,256:4", 4) == ((0, 2), (64, 4))
    assert batch_steps("0:1K, .5K:4e3 1.e3:8000", 4) == ((0, 1000), (125, 4000), (250, 8000))


@pytest.mark.parametrize(
    "text, said",
    [
        ("", "must start at 0"),
        ("4:2", "must start at 0"),
        ("3:2", "must start at 0"),
        ("0:2 8:4 8:8", "must rise"),
        ("0:2 1:4", "must rise"),
        ("0:0", "at least 1"),
        ("0:2;8:4", "'0:2;8:4' is not TOKENS:BATCH"),
        ("0:2 5G:4", "'5G:4' is not TOKENS:BATCH"),
    ],
)
def test_steps_that_make_no_schedule(text, said):
    with pytest.raises(ValueError, match=said):
        batch_steps(text, 4)


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
