"""Spans, live activations and bubbles of schedules small enough to work out by hand."""

from __future__ import annotations

import pytest

from megatron.schedules.generators import build_schedule
from megatron.schedules.ops import parse_schedule
from megatron.schedules.simulate import simulate


def starts(simulation):
    return [{str(span.op): span.start for span in spans} for spans in simulation.spans]


def test_spans_of_two_stages():
    simulation = simulate(build_schedule("1f1b", 2, 2))
    assert starts(simulation) == [
        {"F0.0": 0, "F1.0": 1, "B0.0": 4, "B1.0": 7},
        {"F0.0": 1, "B0.0": 2, "F1.0": 4, "B1.0": 5},
    ]
    assert simulation.makespan == 9 and simulation.busy == (6, 6)
    assert simulation.bubble == pytest.approx(1 / 3)


def test_messages_take_their_time_between_ranks_only():
    assert simulate(build_schedule("1f1b", 2, 1), message_s=0.5).makespan == 1 + 0.5 + 1 + 2 + 0.5 + 2
    assert simulate(build_schedule("gpipe", 1, 1, 3), message_s=0.5).makespan == 9


def test_a_cost_may_depend_on_the_rank_and_the_op():
    simulation = simulate(build_schedule("1f1b", 2, 1), lambda rank, op: 10.0 * rank + len(op.kind))
    assert simulation.busy == (2, 22)


def test_split_backwards_hold_activations_until_the_weight_gradient():
    text = "F0 I0 F1 I1 W0 W1"
    assert simulate(parse_schedule(text)).peak_live == (2,)
    assert simulate(parse_schedule("F0 B0 F1 B1")).peak_live == (1,)


def test_weight_gradients_of_zb_h1_fill_the_bubble():
    # p = 2, m = 2 by hand: F = I = W = 1; the bubble of ZB-H1 is (p - 1)(F + I - W) = 1 of 7 (Qi et al. 2023, table 2)
    simulation = simulate(parse_schedule("F0 F1 I0 W0 I1 W1\nF0 I0 F1 I1 W0 W1"))
    assert simulation.makespan == 7
    assert simulation.bubble == pytest.approx(1 / 7)
