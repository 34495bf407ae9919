"""`check` finds each way a schedule can be wrong and shows where; `add_comm` never makes one of them."""

from __future__ import annotations

import pytest

from megatron.schedules.generators import build_schedule
from megatron.schedules.ops import ScheduleError, parse_schedule
from megatron.schedules.passes import add_comm, check


def pairs(schedule, a, b):
    """The messages between ranks a and b as a sees them, from `SEND_F0.0>1` to the (sender, kind, microbatch)."""
    for op in schedule.ranks[a]:
        if op.peer == b:
            yield (a if op.kind.startswith("SEND") else b, op.kind[-1], op.microbatch)


@pytest.mark.parametrize("stages, chunks, microbatches", [(2, 1, 5), (4, 1, 8), (2, 2, 3), (4, 2, 6), (3, 3, 7)])
def test_both_ends_see_one_order(stages, chunks, microbatches):
    schedule = build_schedule("1f1b", stages, microbatches, chunks)
    for a in range(stages):
        for b in range(stages):
            if a != b:
                assert list(pairs(schedule, a, b)) == list(pairs(schedule, b, a))


def test_messages_can_be_added_to_a_hand_written_split_backward_on_a_v():
    text = "# placement 0.0 1.0 1.1 0.1\nF0.0 F0.1 I0.1 W0.1 B0.0\nF0.0 F0.1 B0.1 I0.0 W0.0\n"
    schedule = add_comm(parse_schedule(text))
    check(schedule)
    assert str(schedule).splitlines()[2].split()[:2] == ["RECV_F0.0<0", "F0.0"]
    assert sum(op.peer is not None for op in schedule.ranks[1]) == 4  # nothing is sent where the V turns


@pytest.mark.parametrize(
    "text, words",
    [
        ("F0 B0 F0", ["there twice", ">>F0.0<<"]),
        ("F0 F1 B0", ["microbatch 1 of chunk 0 has ['F']", ">>end<<"]),
        ("B0 F0", ["before its forward", ">>B0.0<< F0.0"]),
        ("F0 I0", ["has ['F', 'I']"]),
        ("F0 W0 I0", ["W without an I", ">>W0.0<<"]),
        ("F0 B0 I0 W0", ["both compute", ">>I0.0<<"]),
        ("F0 B0\nF0", ["rank 1 at its end"]),
        (
            "F0 B0 F1 B1\nF1 B1 F0 B0",
            ["deadlock", "waits for ever for B0 of virtual stage 1", "rank 0: F0.0 >>B0.0<< F1.0"],
        ),
        ("F0 RECV_B0<1 B0\nRECV_F0<0 F0 B0 SEND_B0>0", ["the result of F0.0 is never sent"]),
        ("F0 SEND_F0>1 B0\nRECV_F0<0 F0 B0 SEND_B0>0", ["not received before", ">>B0.0<<"]),
        ("SEND_F0>1 F0 RECV_B0<1 B0\nRECV_F0<0 F0 B0 SEND_B0>0", ["before it is made", ">>SEND_F0.0>1<<"]),
        ("F0 SEND_F0>1 SEND_F0>1 RECV_B0<1 B0\nRECV_F0<0 F0 B0 SEND_B0>0", ["sent twice"]),
        ("F0 SEND_F0>1 RECV_B0<1 B0\nRECV_F0<0 RECV_F0<0 F0 B0 SEND_B0>0", ["received twice"]),
        ("F0 SEND_B0>1 RECV_B0<1 B0\nRECV_F0<0 F0 B0 SEND_B0>0", ["does not need it", ">>SEND_B0.0>1<<"]),
        ("F0 SEND_F0>1 RECV_F0<1 B0\nRECV_F0<0 F0 B0 SEND_B0>0", ["does not make it", ">>RECV_F0.0<1<<"]),
        (
            # both send first: works only while sends are buffered
            "F0 SEND_F0>1 F1 SEND_F1>1 RECV_B0<1 B0 RECV_B1<1 B1\nRECV_F0<0 F0 B0 SEND_B0>0 RECV_F1<0 F1 B1 SEND_B1>0",
            ["blocking messages", ">>SEND_F1.0>1<<", "never reached"],
        ),
    ],
)
def test_wrong_schedules_are_refused_with_the_op_marked(text, words):
    with pytest.raises(ScheduleError) as caught:
        check(parse_schedule(text))
    for word in words:
        assert word in str(caught.value)


def test_forward_only_is_complete_without_backwards():
    check(parse_schedule("F0 F1\nF0 F1"))


def test_add_comm_refuses_a_deadlock():
    with pytest.raises(ScheduleError, match="rank 1 waits at F1.0"):
        add_comm(parse_schedule("F0 B0 F1 B1\nF1 B1 F0 B0"))
