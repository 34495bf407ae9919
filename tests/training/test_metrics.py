"""Intervals hold their own steps only, every step once, and skipped or non-finite steps do not enter the loss."""

import math

import pytest
import torch

from megatron.training.metrics import ROW, HostFacts, StepRows, summarize


def row(loss, committed=1.0, **values):
    full = {"loss": loss, "tokens": 8, "grad_norm": 2.0, "is_committed": committed, "loss_scale": 1.0}
    full |= {"num_zeros": math.nan, "params_norm": math.nan} | values
    return torch.tensor([full[name] for name in ROW], dtype=torch.float64)


def facts(iteration, batch_size=4):
    return HostFacts(iteration, iteration * batch_size, batch_size, 1e-3)


def test_no_interval_leaks_into_the_next():
    rows = StepRows()
    means = []
    for interval in ([1.0, 2.0], [3.0, 5.0], [10.0]):
        for loss in interval:
            rows.add(facts(1), row(loss))
        records = rows.flush()
        assert len(records) == len(interval) and len(rows) == 0
        means.append(summarize(records, 1.0, 32, 1e12, 1, 1.0).loss)
    assert means == [1.5, 4.0, 10.0]
    assert rows.flush() == []


def test_skipped_and_nan_steps_are_counted_not_averaged():
    rows = StepRows()
    rows.add(facts(1), row(2.0))
    rows.add(facts(2), row(50.0, committed=0.0))
    rows.add(facts(3), row(math.nan))
    rows.add(facts(4), row(4.0))
    summary = summarize(rows.flush(), 2.0, 32, 8e12, 2, 4.0)
    assert (summary.loss, summary.num_skipped, summary.num_nan, summary.steps) == (3.0, 1, 1, 4)
    assert summary.seconds_per_step == 0.5
    assert summary.tokens_per_second == 4 * 4 * 32 / 2.0
    # TFLOP/s of a rank x ranks x seconds = the interval's FLOPs.
    assert summary.tflops_per_rank * 2 * 2.0 == pytest.approx(8.0)
    assert summary.mfu == pytest.approx(0.5)


def test_an_interval_without_a_good_step_has_no_loss():
    rows = StepRows()
    rows.add(facts(1), row(9.0, committed=0.0))
    assert math.isnan(summarize(rows.flush(), 1.0, 32, 1.0, 1, 1.0).loss)
