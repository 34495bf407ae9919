"""The scheduler's position and state: rates that Megatron printed, four ways to resume with another schedule."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from megatron.config.optimizer import OptimizerConfig
from megatron.optimizer.opt_param_scheduler import OptParamScheduler, build_scheduler
from megatron.training.report import as_fp32

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/megatron_losses.json").read_text())
BATCH = 4


def scheduler(
    train_iters: int = 6, train_samples: int | None = None, batch: int = BATCH, **fields
) -> OptParamScheduler:
    fields = {"lr": 3e-3, "lr_decay_style": "constant", **fields}
    iters = None if train_samples else train_iters
    config = OptimizerConfig(**fields)
    return build_scheduler(config, global_batch_size=batch, train_iters=iters, train_samples=train_samples)


def after_phase_one(**fields) -> dict:
    first = scheduler(**fields)
    for _ in range(6):
        first.step(BATCH)
    return first.state_dict()


@pytest.mark.parametrize("run", sorted(GOLDEN))
def test_prints_the_rates_that_megatron_printed(run):
    ours = scheduler(
        10, batch=8, lr=1e-2, min_lr=1e-3, lr_decay_style="cosine", lr_warmup_iters=2, weight_decay=0.1
    )  # the flags stored beside the numbers
    assert ours.rates().lr_of("") == 0.0  # the first update of a warm-up changes nothing
    for line in GOLDEN[run]["iterations"]:
        ours.step(8)
        assert float(f"{as_fp32(ours.rates().lr_of('')):.6E}") == line["lr"]


def test_override_follows_the_flags_from_the_first_step():
    second = scheduler(
        20, lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_decay_iters=20, lr_warmup_iters=4,
        decoupled_lr=5e-4, decoupled_min_lr=0.0, weight_decay=0.2,
    )  # fmt: skip
    said = second.load_state_dict(after_phase_one(), override=True)
    assert any("--lr: flags 0.001, checkpoint 0.003; the flags' applies" in line for line in said)
    expected = {6: 1e-4 + 4.5e-4 * (1 + math.cos(math.pi / 8)), 12: 5.5e-4, 20: 1e-4, 26: 1e-4}
    for iteration in range(6, 27):
        rates = second.rates()
        assert rates.lr_of("") <= 1e-3 and rates.lr_of("embedding") <= 5e-4 and rates.weight_decay == 0.2
        if iteration in expected:
            assert rates.lr_of("") == pytest.approx(expected[iteration], abs=1e-12)
        second.step(BATCH)


def test_use_checkpoint_continues_the_stored_schedule():
    unbroken = scheduler(30, lr_decay_style="cosine", min_lr=1e-4, decoupled_lr=1e-2, lr_warmup_fraction=0.1)
    for _ in range(6):
        unbroken.step(BATCH)
    second = scheduler(20, lr=1e-3, lr_decay_style="linear", lr_warmup_iters=3)
    said = second.load_state_dict(unbroken.state_dict(), use_checkpoint=True)
    assert any("the checkpoint's applies" in line for line in said)
    for _ in range(20):
        assert second.rates() == unbroken.rates()
        unbroken.step(BATCH), second.step(BATCH)


def test_another_schedule_without_a_flag_is_refused_with_both_values_and_the_ways_out():
    second = scheduler(lr=1e-3, weight_decay=0.5)
    with pytest.raises(ValueError) as refusal:
        second.load_state_dict(after_phase_one())
    for part in (
        "--lr is 0.001, the checkpoint's is 0.003", "--start-weight-decay is 0.5",
        "--override-opt-param-scheduler", "--use-checkpoint-opt-param-scheduler",
    ):  # fmt: skip
        assert part in str(refusal.value)
    assert second.num_steps == 0
    with pytest.raises(ValueError, match="decoupled"):
        scheduler(decoupled_lr=1e-3).load_state_dict(after_phase_one())
    with pytest.raises(ValueError, match="contradict"):
        second.load_state_dict(after_phase_one(), override=True, use_checkpoint=True)


def test_a_fresh_scheduler_starts_the_new_schedule_at_its_first_step():
    """What --finetune does: the stored position is not loaded."""
    second = scheduler(20, lr=1e-3, min_lr=1e-4, lr_decay_style="cosine", lr_warmup_iters=4)
    assert second.rates().lr_of("") == 0.0
    second.step(BATCH)
    assert second.rates().lr_of("") == pytest.approx(2.5e-4, abs=1e-12)


def test_resume_with_equal_flags_continues_silently():
    second = scheduler()
    assert second.load_state_dict(after_phase_one()) == []
    assert second.num_steps == 24


def test_a_longer_run_needs_no_flag_when_the_decay_is_as_long_as_the_run():
    stored = after_phase_one(lr_decay_style="cosine", lr_warmup_fraction=0.25)
    longer = scheduler(12, lr_decay_style="cosine", lr_warmup_fraction=0.25)
    assert len(longer.load_state_dict(stored)) == 2  # decay and warm-up, both said
    assert longer.rates().lr_of("") == scheduler(12, lr_decay_style="cosine", lr_warmup_fraction=0.25).lr.lr(24)
    typed = scheduler(12, lr_decay_style="cosine", lr_decay_iters=12)
    with pytest.raises(ValueError, match="--lr-decay-iters"):
        typed.load_state_dict(after_phase_one(lr_decay_style="cosine"))


def test_reads_the_state_that_megatron_writes():
    megatron = {
        "max_lr": 0.003, "lr_warmup_steps": 0, "num_steps": 24, "lr_decay_style": "constant",
        "lr_decay_steps": 24, "min_lr": 0.0, "start_wd": 0.01, "end_wd": 0.01,
        "wd_incr_style": "constant", "wd_incr_steps": 24,
    }  # fmt: skip
    second = scheduler()
    assert second.load_state_dict(megatron) == [] and second.num_steps == 24


def test_sample_based_lengths():
    by_samples = scheduler(
        train_samples=1000, lr_decay_style="WSD", lr_decay_samples=800, lr_warmup_samples=100, lr_wsd_decay_samples=200
    )
    lr = by_samples.lr
    assert (lr.warmup_steps, lr.decay_steps, lr.wsd_decay_steps, by_samples.weight_decay.incr_steps) == (
        100,
        800,
        200,
        1000,
    )
    fraction = scheduler(train_samples=1000, lr_warmup_fraction=0.01, lr_decay_style="cosine")
    assert fraction.lr.warmup_steps == 10


@pytest.mark.parametrize("fields", [{"lr": None}, {"train_iters": None}, {"train_iters": 0}])
def test_a_run_without_updates_takes_any_stored_schedule(fields):
    idle = scheduler(**fields)
    assert idle.rates() == ({"": 0.0}, 0.0)
    assert idle.load_state_dict(after_phase_one()) == []
    assert idle.rates().lr_of("") == 3e-3 and idle.num_steps == 24
