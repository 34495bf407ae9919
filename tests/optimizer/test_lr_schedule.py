"""Learning-rate and weight-decay formulas against values worked out by hand."""

from __future__ import annotations

import math

import pytest

from megatron.optimizer.lr_schedule import LrRange, LrSchedule, Rates, WeightDecaySchedule


def cosine(**changes) -> LrSchedule:
    settings = {"max_lr": 1e-3, "min_lr": 1e-4, "warmup_steps": 4, "decay_steps": 20, "style": "cosine"}
    return LrSchedule(**{**settings, **changes})


@pytest.mark.parametrize(
    ("steps", "rate"), [(0, 0.0), (2, 5e-4), (4, 1e-3), (12, 5.5e-4), (20, 1e-4), (21, 1e-4), (500, 1e-4)]
)
def test_cosine_with_warmup(steps, rate):
    assert cosine().lr(steps) == pytest.approx(rate, abs=1e-12)


def test_warmup_starts_at_its_first_rate():
    schedule = cosine(init_lr=2e-4)
    assert schedule.lr(0) == 2e-4
    assert schedule.lr(1) == pytest.approx(2e-4 + 8e-4 / 4, abs=1e-15)


def test_without_warmup_the_first_update_is_at_the_full_rate():
    assert cosine(warmup_steps=0).lr(0) == 1e-3


@pytest.mark.parametrize(("steps", "rate"), [(0, 1e-3), (10, 5.5e-4), (20, 1e-4), (30, 1e-4)])
def test_linear(steps, rate):
    assert cosine(style="linear", warmup_steps=0).lr(steps) == pytest.approx(rate, abs=1e-15)


def test_constant_never_falls():
    schedule = cosine(style="constant")
    assert [schedule.lr(n) for n in (2, 4, 20, 1000)] == [5e-4, 1e-3, 1e-3, 1e-3]


@pytest.mark.parametrize(
    ("steps", "rate"), [(4, 1e-3), (9, 1e-3 * 2 / 3), (16, 5e-4), (20, 1e-3 * 2 / math.sqrt(20)), (21, 1e-4)]
)
def test_inverse_square_root(steps, rate):
    assert cosine(style="inverse-square-root").lr(steps) == pytest.approx(rate, abs=1e-15)


def test_inverse_square_root_stays_above_the_lowest_rate_and_needs_no_warmup():
    schedule = cosine(style="inverse-square-root", warmup_steps=0, min_lr=4e-4)
    assert [schedule.lr(n) for n in (0, 1, 4, 16)] == [1e-3, 1e-3, 5e-4, 4e-4]


@pytest.mark.parametrize(
    ("style", "left"),
    [
        ("exponential", {10: 1.0, 15: 2 * 0.5**0.5 - 1, 20: 0.0}),
        ("linear", {10: 1.0, 15: 0.5, 20: 0.0}),
        ("cosine", {10: 1.0, 15: 0.5, 20: 0.0}),
        ("minus_sqrt", {10: 1.0, 12.5: 0.5, 20: 0.0}),
    ],
)
def test_wsd_is_stable_until_its_final_decay(style, left):
    schedule = cosine(style="WSD", wsd_decay_steps=10, wsd_style=style)
    assert schedule.lr(5) == schedule.lr(9.9) == 1e-3
    for steps, share in left.items():
        assert schedule.lr(steps) == pytest.approx(1e-4 + share * 9e-4, abs=1e-15)
    assert schedule.lr(21) == 1e-4


def test_own_bounds_of_a_group():
    schedule = cosine()
    assert schedule.lr(12, LrRange(2e-3, 0.0)) == pytest.approx(1e-3, abs=1e-12)
    assert schedule.lr(2, LrRange(2e-3, 0.0)) == pytest.approx(1e-3, abs=1e-12)


def test_rates_fall_back_to_the_common_one():
    rates = Rates({"": 1e-3, "embedding": 2e-3}, 0.1)
    assert (rates.lr_of(""), rates.lr_of("embedding"), rates.lr_of("other")) == (1e-3, 2e-3, 1e-3)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"min_lr": 2e-3}, "--min-lr 0.002 and --lr 0.001"),
        ({"warmup_steps": 20}, "warm-up of 20 samples is not shorter than the decay of 20"),
        ({"style": "step"}, "--lr-decay-style step is not one of"),
        ({"style": "WSD"}, "--lr-wsd-decay-iters"),
        ({"wsd_style": "sqrt"}, "--lr-wsd-decay-style sqrt"),
        ({"init_lr": 1.0}, "--lr-warmup-init 1.0 is above --lr"),
    ],
)
def test_impossible_schedules_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        cosine(**changes)


@pytest.mark.parametrize(
    ("style", "steps", "value"),
    [
        ("linear", 0, 0.0), ("linear", 25, 0.025), ("linear", 100, 0.1), ("linear", 101, 0.1),
        ("cosine", 0, 0.0), ("cosine", 50, 0.05), ("cosine", 999, 0.1),
        ("cosine", 25, 0.1 * 0.5 * (1 - math.cos(math.pi / 4))),
    ],
)  # fmt: skip
def test_weight_decay_rises(style, steps, value):
    schedule = WeightDecaySchedule(start=0.0, end=0.1, incr_steps=100, style=style)
    assert schedule.weight_decay(steps) == pytest.approx(value, abs=1e-15)


def test_constant_weight_decay():
    assert WeightDecaySchedule(start=0.1, end=0.1, incr_steps=10).weight_decay(3) == 0.1
    with pytest.raises(ValueError, match="--weight-decay-incr-style constant"):
        WeightDecaySchedule(start=0.0, end=0.1, incr_steps=10)
    with pytest.raises(ValueError, match="0 <= start <= end"):
        WeightDecaySchedule(start=0.2, end=0.1, incr_steps=10, style="linear")
