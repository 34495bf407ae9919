"""Every generator is right for any number of stages, chunks and microbatches, and as fast as its paper says.

The golden files are what each schedule of 8 microbatches is; they change only when a schedule is meant to change.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.schedules.generators import build_schedule, register, schedule_names
from megatron.schedules.ops import BACKWARD, FORWARD, parse_schedule
from megatron.schedules.simulate import simulate

GOLDEN = Path(__file__).parents[1] / "golden" / "schedules"
UNIT = {FORWARD: 1.0, BACKWARD: 2.0}

sizes = dict(p=st.integers(1, 8), v=st.integers(1, 4), m=st.integers(1, 24))


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(schedule_names()), extra=st.integers(0, 5), **sizes)
def test_any_numbers_make_a_correct_schedule(name, p, v, m, extra):
    schedule = build_schedule(name, p, m, v, p + extra)  # runs every check, blocking messages included
    assert (schedule.num_stages, schedule.num_chunks, schedule.num_microbatches) == (p, v, m)
    assert schedule.is_forward_only == (name == "forward-only")


@settings(deadline=None, max_examples=200)
@given(name=st.sampled_from(["gpipe", "1f1b", "interleaved"]), **sizes)
def test_gradients_are_summed_in_microbatch_order(name, p, v, m):
    for ops in build_schedule(name, p, m, v).ranks:
        for chunk in range(v):
            assert [op.microbatch for op in ops if op.kind == BACKWARD and op.chunk == chunk] == list(range(m))


@settings(deadline=None, max_examples=100)
@given(name=st.sampled_from(["gpipe", "1f1b"]), p=st.integers(1, 8), m=st.integers(1, 24))
def test_bubble_of_gpipe_and_1f1b(name, p, m):
    assert simulate(build_schedule(name, p, m), UNIT).bubble == pytest.approx((p - 1) / (m + p - 1))


@settings(deadline=None, max_examples=200)
@given(extra=st.integers(0, 40), **{**sizes, "p": st.integers(2, 8)})
def test_bubble_of_interleaved(p, v, m, extra):
    m = max(m, p)  # any number from one microbatch per stage on, multiples of the stages or not
    for group_size in (None, p + extra):
        schedule = build_schedule("interleaved", p, m, v, group_size)
        assert simulate(schedule, UNIT).bubble == pytest.approx((p - 1) / (v * m + p - 1))


@settings(deadline=None, max_examples=100)
@given(p=st.integers(1, 8), m=st.integers(1, 24))
def test_live_microbatches(p, m):
    assert simulate(build_schedule("gpipe", p, m)).peak_live == (m,) * p
    assert simulate(build_schedule("1f1b", p, m)).peak_live == tuple(min(p - rank, m) for rank in range(p))
    assert simulate(build_schedule("forward-only", p, m)).peak_live == (1,) * p


def test_live_microbatches_of_interleaved():
    # Megatron's warm-up plus one: 2 (p - 1 - rank) + (v - 1) p + 1
    assert simulate(build_schedule("1f1b", 4, 16, 2)).peak_live == (11, 9, 7, 5)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("p", [2, 4])
@pytest.mark.parametrize("v", [1, 2])
def test_golden(name, p, v):
    text = (GOLDEN / f"{name}_pp{p}_vpp{v}_m8.txt").read_text()
    schedule = build_schedule(name, p, 8, v)
    assert str(schedule) == text
    assert parse_schedule(text) == schedule


def test_a_fork_registers_its_own():
    @register("test-backwards-last")
    def mine(num_stages, num_microbatches, num_chunks, group_size):
        return build_schedule("gpipe", num_stages, num_microbatches, num_chunks).compute_only()

    assert build_schedule("test-backwards-last", 2, 3) == build_schedule("gpipe", 2, 3)
    with pytest.raises(ValueError, match="already registered"):
        register("test-backwards-last")(mine)


@pytest.mark.parametrize(
    "arguments, words",
    [
        (("zigzag", 2, 3), ["'zigzag'", "gpipe, 1f1b"]),
        (("1f1b", 2, 0), ["microbatches, not 0"]),
        (("1f1b", 4, 8, 2, 3), ["--microbatch-group-size-per-virtual-pipeline-stage 3", "use 4 or more"]),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ValueError) as caught:
        build_schedule(*arguments)
    for word in words:
        assert word in str(caught.value)
