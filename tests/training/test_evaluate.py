"""Which samples an evaluation sees is a function of the iteration, and every token of them weighs the same."""

from __future__ import annotations

import pytest

from megatron.training.evaluate import evaluation_block
from megatron.training.setup import samples_wanted
from tests.training.runs import TINY, RunConfig, run_all, run_one

EVAL = "--train-iters 6 --eval-interval 2 --eval-iters 2"


@pytest.mark.parametrize(
    ("iteration", "interval", "start", "is_final", "block"),
    [
        (2, 2, None, False, 0),
        (4, 2, None, False, 1),
        (6, 2, None, True, 3),
        (5, 2, None, True, 2),
        (7, None, None, True, 0),
        (4, 2, 4, False, 0),
        (6, 2, 3, False, 1),
        (6, 2, 5, True, 1),
        (2, 2, 9, True, 0),
    ],
)
def test_blocks_follow_each_other(iteration, interval, start, is_final, block):
    flags = f"{TINY} --train-iters 9 --eval-interval {interval} " + (f"--start-eval-at-iter {start}" if start else "")
    assert evaluation_block(RunConfig.from_flags(flags).training, iteration, is_final) == block


def test_samples_asked_for_are_megatrons_and_cover_every_block():
    config = RunConfig.from_flags(f"{TINY} --global-batch-size 4 {EVAL} --eval-iters 2")
    assert samples_wanted(config) == {"train": 24, "valid": 4 * 2 * 4, "test": 2 * 4}


def test_batches_of_an_evaluation_may_be_its_own():
    one = run_one(f"{EVAL} --eval-global-batch-size 4 --eval-micro-batch-size 4").outcome.evaluations
    assert all(e.tokens == 2 * 4 * 32 for e in one)
    two = run_all(f"{EVAL} --eval-global-batch-size 4 --eval-micro-batch-size 2", world=2)[0].outcome.evaluations
    assert [e.loss for e in two] == pytest.approx([e.loss for e in one], rel=1e-6)  # replicas' gradients add up
    # Half as many batches of the usual size are the same samples.
    usual = run_one("--train-iters 6 --eval-interval 2 --eval-iters 1").outcome.evaluations
    assert [e.loss for e in usual] == pytest.approx([e.loss for e in one], rel=1e-6)


def test_evaluations_start_where_asked():
    flags = f"{TINY} --global-batch-size 4 {EVAL} --start-eval-at-iter 3"
    assert samples_wanted(RunConfig.from_flags(flags)) == {"train": 24, "valid": 3 * 2 * 4, "test": 2 * 4}
    late = run_one(f"{EVAL} --start-eval-at-iter 4").outcome.evaluations
    whole = run_one(EVAL).outcome.evaluations
    assert [(e.split, e.iteration) for e in late] == [(e.split, e.iteration) for e in whole[1:]]
    assert late[-1] == whole[-1]  # the test set has no blocks


def test_a_resumed_run_evaluates_on_the_same_samples(tmp_path):
    whole = run_one(EVAL).outcome.evaluations
    first = run_one(f"{EVAL} --save {tmp_path} --save-interval 3 --exit-interval 3").outcome.evaluations
    rest = run_one(f"{EVAL} --load {tmp_path}").outcome.evaluations
    assert first + rest == whole


def test_skip_train_evaluates_the_loaded_weights(tmp_path):
    run_one(f"{EVAL} --save {tmp_path} --save-interval 6")
    whole = run_one(EVAL).outcome.evaluations
    for world, layout in ((1, ""), (2, "--pipeline-model-parallel-size 2")):
        result = run_all(f"{EVAL} --load {tmp_path} --skip-train {layout}", world=world)[0]
        assert result.outcome.reason == "skip-train" and result.records == []
        assert [e.loss for e in result.outcome.evaluations] == pytest.approx([e.loss for e in whole[-2:]], rel=1e-12)


def test_masked_tokens_do_not_count():
    """With end-of-document masking replicas hold different numbers of targets."""
    flags = f"{EVAL} --eod-mask-loss"
    one = run_one(flags).outcome.evaluations
    assert all(e.tokens < 2 * 8 * 32 for e in one)
    # Gradients of two replicas are summed in another order.
    two = run_all(flags, world=2)[1].outcome.evaluations
    assert [e.tokens for e in two] == [e.tokens for e in one]
    assert [e.loss for e in two] == pytest.approx([e.loss for e in one], rel=1e-6)
