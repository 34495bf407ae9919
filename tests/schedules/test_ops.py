"""A schedule's text form is exact, and a word that is no op is refused by line."""

from __future__ import annotations

import pytest

from megatron.schedules.generators import build_schedule
from megatron.schedules.ops import Location, Op, parse_schedule


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "forward-only"])
@pytest.mark.parametrize("stages, chunks, microbatches", [(1, 1, 3), (2, 1, 1), (4, 2, 5), (3, 3, 7)])
def test_text_round_trips(name, stages, chunks, microbatches):
    schedule = build_schedule(name, stages, microbatches, chunks)
    assert parse_schedule(str(schedule)) == schedule
    compute = schedule.compute_only()
    assert parse_schedule(str(compute)) == compute


def test_one_stage_reads_forward_backward_in_turn():
    assert str(build_schedule("1f1b", 1, 3)) == "F0.0 B0.0 F1.0 B1.0 F2.0 B2.0\n"


def test_short_form_comments_and_placement():
    text = "# by hand\n# placement 0.0 1.0 1.1 0.1\nF0 F0.1 I0.1 W0.1 B0  # rank 0\n\nF0.0 F0.1 B0.1 B0.0\n"
    schedule = parse_schedule(text)
    assert schedule.ranks[0] == (Op("F", 0), Op("F", 0, 1), Op("I", 0, 1), Op("W", 0, 1), Op("B", 0))
    assert schedule.placement == ((0, 0), (1, 0), (1, 1), (0, 1))
    assert schedule.next_location(1, 0) == Location(1, 1) and schedule.previous_location(0, 1) == Location(1, 1)
    assert schedule.next_location(0, 1) is None and schedule.previous_location(0, 0) is None
    assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize(
    "text, words",
    [
        ("F0\nX3", ["line 2", "'X3'"]),
        ("F0>1", ["'F0>1'"]),
        ("F0 SEND_F0", ["'SEND_F0'"]),
        ("F0 SEND_F0<1", ["'SEND_F0<1'"]),
        ("RECV_F0>1 F0", ["'RECV_F0>1'"]),
        ("F", ["'F'"]),
        ("# nothing", ["line of ops"]),
        ("# placement 0.0 1\nF0", ["placement"]),
        ("# placement 0.0 0.0\nF0", ["1 ranks x 1 chunks"]),
    ],
)
def test_misspelt_text_is_refused(text, words):
    with pytest.raises(ValueError) as caught:
        parse_schedule(text)
    for word in words:
        assert word in str(caught.value)
