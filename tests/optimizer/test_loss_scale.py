"""Loss scale: Megatron's rules, its state across a break, and the end of endless skipping."""

from __future__ import annotations

import pytest
import torch

from megatron.config.precision import PrecisionConfig
from megatron.optimizer.loss_scale import (
    ConstantLossScale,
    DynamicLossScale,
    LossScaleExhausted,
    build_loss_scale,
)

CPU = torch.device("cpu")


def dynamic(initial: float = 2.0**10, **changes) -> DynamicLossScale:
    settings = {"minimum": 1.0, "window": 2, "hysteresis": 2, "device": CPU, **changes}
    return DynamicLossScale(initial=initial, **settings)


def scales(scale, steps: str) -> list[float]:
    """The scale after each step: "." was made, "x" overflowed."""
    values = []
    for step in steps:
        scale.update(torch.tensor(float(step == ".")))
        values.append(scale.scale.item())
    return values


def test_overflows_use_up_hysteresis_then_halve_each_time():
    assert scales(dynamic(64.0), "xxxx") == [64.0, 32.0, 16.0, 8.0]


def test_a_window_of_good_steps_doubles_and_restores_hysteresis():
    assert scales(dynamic(8.0), "x..x.x") == [8.0, 8.0, 16.0, 16.0, 16.0, 8.0]


def test_good_steps_must_follow_each_other():
    assert scales(dynamic(8.0, hysteresis=9), ".x.x..") == [8.0, 8.0, 8.0, 8.0, 8.0, 16.0]


def test_the_scale_stays_between_its_minimum_and_what_fp32_holds():
    assert scales(dynamic(4.0, minimum=2.0, hysteresis=1), "xxx") == [2.0, 2.0, 2.0]
    high = dynamic(2.0**126, window=1)
    assert scales(high, "...") == [2.0**127] * 3
    assert scales(high, "xx") == [2.0**127, 2.0**126]


@pytest.mark.parametrize("broken_at", range(1, 10))
def test_state_continues_as_in_the_unbroken_run(broken_at):
    steps = "xx.x..xx.."
    unbroken, first = dynamic(), dynamic()
    expected = scales(unbroken, steps)
    scales(first, steps[:broken_at])
    second = dynamic(initial=2.0**20)
    second.load_state_dict(first.state_dict())
    assert scales(second, steps[broken_at:]) == expected[broken_at:]
    assert second.state_dict() == unbroken.state_dict()
    assert unbroken.state_dict().keys() >= {"scale", "growth_tracker", "hysteresis_tracker"}


def test_state_of_a_run_without_fp16_changes_nothing():
    scale = dynamic()
    scale.load_state_dict(ConstantLossScale(1.0, CPU).state_dict())
    assert scale.scale.item() == 2.0**10


def test_endless_skipping_at_the_smallest_scale_stops():
    scale = dynamic(4.0, hysteresis=1, max_stuck_steps=3)
    for _ in range(2 + 2):  # two halvings, then two steps at the minimum
        scale.update(False)
        scale.check_progress()
    scale.update(False)
    with pytest.raises(LossScaleExhausted, match="3 steps in a row .* smallest loss scale 1;.*--lr"):
        scale.check_progress()
    resumed = dynamic(max_stuck_steps=3)
    resumed.load_state_dict(scale.state_dict())
    with pytest.raises(LossScaleExhausted):
        resumed.check_progress()
    scale.update(True)
    scale.check_progress()


def test_no_limit_never_stops():
    scale = dynamic(1.0)
    scales(scale, "x" * 50)
    scale.check_progress()


def test_constant_scale():
    scale = ConstantLossScale(128.0, CPU, max_stuck_steps=2)
    assert scales(scale, "x.x") == [128.0] * 3
    scale.check_progress()
    scale.update(False)
    with pytest.raises(LossScaleExhausted, match="fixed loss scale 128"):
        scale.check_progress()


def test_flags():
    assert build_loss_scale(PrecisionConfig(), CPU).scale.item() == 1.0
    assert build_loss_scale(PrecisionConfig(bf16=True), CPU).scale.item() == 1.0
    assert build_loss_scale(PrecisionConfig(fp16=True, loss_scale=64.0), CPU).scale.item() == 64.0
    scale = build_loss_scale(PrecisionConfig(fp16=True, hysteresis=3, loss_scale_window=7), CPU, max_stuck_steps=5)
    assert (scale.scale.item(), scale.minimum, scale.window, scale.hysteresis) == (2.0**32, 1.0, 7, 3)
    assert scale.max_stuck_steps == 5


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"minimum": 2.0**11}, "--min-loss-scale"),
        ({"hysteresis": 0}, "--hysteresis 0"),
        ({"window": 0}, "--loss-scale-window 0"),
    ],
)
def test_impossible_settings_are_refused(changes, says):
    with pytest.raises(ValueError, match=says):
        dynamic(**changes)
