"""Spans add up by name, and print as Megatron's timers do."""

from megatron.training.timers import Timers, timing_lines


def test_levels_choose_what_is_measured():
    timers = Timers(1)
    with timers.span("optimizer", 1), timers.span("detail", 2):
        pass
    timers.record_op("F0.1", 0.0, 1.0)
    assert list(timers.take()) == ["optimizer"] and timers.take() == {}
    timers = Timers(2)
    for op in ("F0.0", "F1.0", "SEND_F1.0>1", "B0.0"):
        timers.record_op(op, 1.0, 3.0)
    assert timers.take() == {"forward-compute": 4.0, "forward-send": 2.0, "backward-compute": 2.0}


def test_lines_show_the_ranks_that_have_the_part():
    by_rank = [{"optimizer": 0.2}, {"optimizer": 0.4, "forward-recv": 0.1}]
    dots = "optimizer " + "." * 38
    assert timing_lines(by_rank, 2, "minmax")[:2] == [
        "(min, max) time across ranks (ms):",
        f"    {dots}: (100.00, 200.00)",
    ]
    assert timing_lines(by_rank, 2, "max")[1] == f"    {dots}: 200.00"
    assert timing_lines(by_rank, 2, "all")[-2:] == ["  forward-recv:", "     rank  1: 50.00"]
