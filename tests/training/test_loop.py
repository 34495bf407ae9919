"""The loop: what it counts, when it evaluates, saves and stops, on all ranks alike."""

from __future__ import annotations

import json
import math
import os
import re

import pytest

from megatron.config.run import RunConfig
from megatron.distributed.context import single_process_context
from megatron.ledger.events import read
from megatron.ledger.goodput import account
from megatron.ledger.writer import Ledger
from megatron.training.loop import TrainingError
from megatron.training.metrics import StepRecord
from megatron.training.supervise import train
from tests.training.bigram import BigramStage, build_bigram
from tests.training.runs import Result, corpus, run_all, run_one, same_numbers

LAYOUTS = {"dp2": (2, ""), "pp2": (2, "--pipeline-model-parallel-size 2")}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_agree_to_the_bit(layout):
    world, flags = LAYOUTS[layout]
    one = run_one("--train-iters 5")
    for result in run_all(f"--train-iters 5 {flags}", world=world):
        assert same_numbers(result, one)
    assert one.losses[-1] < one.losses[0]


def test_learning_rates_are_the_ones_megatron_prints():
    """Printed by Megatron-LM 0.20.0 for these flags: the rate after the scheduler's step, which the next step uses."""
    flags = "--train-iters 10 --lr 1e-2 --min-lr 1e-3 --lr-decay-style cosine --lr-warmup-iters 2"
    printed = [5e-3, 1e-2, 9.657457e-3, 8.681981e-3, 7.222075e-3, 5.5e-3, 3.777924e-3, 2.31802e-3, 1.342542e-3, 1e-3]
    lines = [line for line in run_one(flags).text.splitlines() if "learning rate" in line]
    assert [f"learning rate: {rate:.6E} |" in line for line, rate in zip(lines, printed)] == [True] * 10


def test_first_step_of_a_warm_up_changes_nothing():
    """Its rate is zero, so steps 1 and 2 see the same weights."""
    result = run_one("--train-iters 2 --lr-warmup-iters 1 --lr-decay-iters 4 --global-batch-size 4 --seed 7")
    still = run_one("--train-iters 2 --lr 1e-30 --min-lr 0 --lr-decay-style constant --global-batch-size 4 --seed 7")
    assert result.losses == pytest.approx(still.losses, rel=1e-12)


def test_batch_grows_and_samples_are_counted():
    result = run_one("--train-samples 60 --rampup-batch-size 2 2 30 --log-interval 3")
    sizes = [record.batch_size for record in result.records]
    assert sizes == sorted(sizes) and sizes[0] == 2 and sizes[-1] == 8
    consumed = [record.consumed_samples for record in result.records]
    assert consumed == [sum(sizes[: n + 1]) for n in range(len(sizes))] and 60 - 8 < consumed[-1] <= 60


def test_batch_goes_by_steps_of_tokens_and_resumes_between_them(tmp_path):
    # Samples of 32 tokens: 2 at a time up to 8 samples, 4 up to 24, then 8.
    flags = "--global-batch-size None --train-samples 60 --step-batch-size-schedule '0:2 256:4 0.768K:8'"
    whole = run_one(flags)
    sizes = [record.batch_size for record in whole.records]
    assert sizes == [2] * 4 + [4] * 4 + [8] * 4
    run_one(f"{flags} --save {tmp_path} --save-interval 6 --exit-interval 6")
    rest = run_all(f"{flags} --load {tmp_path} --pipeline-model-parallel-size 2", world=2)[0]
    assert [record.batch_size for record in rest.records] == sizes[6:]
    assert rest.losses == whole.losses[6:]


@pytest.mark.parametrize("flags", ["", "--use-distributed-optimizer --overlap-grad-reduce --ddp-num-buckets 2"])
def test_gradients_summed_in_bf16_train_alike(flags):
    """A gradient is rounded to 8 bits once for each microbatch and replica: 2^-8 of it, far below what a step moves."""
    exact = run_one("--train-iters 6 --bf16")
    rounded = run_all(f"--train-iters 6 --bf16 --grad-reduce-in-bf16 {flags}", world=2)[0]
    assert rounded.losses[0] == pytest.approx(exact.losses[0], rel=1e-6)
    assert rounded.losses == pytest.approx(exact.losses, rel=5e-3)
    assert rounded.norms == pytest.approx(exact.norms, rel=2e-2)
    assert rounded.norms != exact.norms


def metrics(path, event):
    return [entry for entry in map(json.loads, path.read_text().splitlines()) if entry["event"] == event]


def test_log_intervals_average_their_own_steps_only(tmp_path):
    every = run_one("--train-iters 7")
    run_one(f"--train-iters 7 --log-interval 3 --metrics-file {tmp_path}/m.jsonl")
    lines = metrics(tmp_path / "m.jsonl", "train")
    assert [line["iteration"] for line in lines] == [3, 6, 7]
    for line, steps in zip(lines, (range(3), range(3, 6), range(6, 7))):
        assert line["loss"] == pytest.approx(math.fsum(every.losses[n] for n in steps) / len(steps), rel=1e-15)
        assert line["grad_norm"] == every.norms[steps[-1]]


def test_reported_throughput_is_flops_over_time():
    """TFLOP/s of a rank x ranks x step time = FLOPs of the step, from the printed line (tolerance: its digits)."""
    result = run_all("--train-iters 3 --log-throughput", world=2)[0]
    fields = dict(part.split(": ") for part in result.text.splitlines()[-1].split(" | ") if ": " in part)
    seconds = float(fields["elapsed time per iteration (ms)"]) / 1000
    flops = float(fields["model TFLOP/s per rank"]) * 1e12 * 2 * seconds
    per_token = 4 * (2 * 16 * 48 + 2 * 2 * 16 * 16 + 2 * 16 * 16 + 4 * 16 * 64) + 2 * 16 * 128
    assert flops == pytest.approx(3 * 8 * 32 * per_token, rel=0.02)


def test_evaluations_take_the_blocks_that_the_iteration_says():
    flags = "--train-iters 5 --eval-interval 2 --eval-iters 3"
    outcome = run_one(flags).outcome
    kinds = [(e.split, e.iteration, e.is_final) for e in outcome.evaluations]
    assert kinds == [("valid", 2, False), ("valid", 4, False), ("valid", 5, True), ("test", 5, True)]
    assert all(e.tokens == 3 * 8 * 32 for e in outcome.evaluations)
    for world, layout in ((2, ""), (2, "--pipeline-model-parallel-size 2")):
        other = run_one(f"{flags} {layout}", world=world).outcome
        assert [e.loss for e in other.evaluations] == pytest.approx([e.loss for e in outcome.evaluations], rel=1e-12)
    assert run_one("--train-iters 2 --eval-iters 0").outcome.evaluations == ()


def test_evaluating_does_not_change_training():
    assert same_numbers(run_one("--train-iters 4 --eval-interval 1 --eval-iters 2"), run_one("--train-iters 4"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_signal_to_one_rank_stops_all_after_one_step_and_saves_once(tmp_path, layout):
    world, flags = LAYOUTS[layout]
    whole = run_one("--train-iters 6")
    save = f"--save {tmp_path} --save-interval 4 --train-iters 6 {flags}"
    results = run_all(save, world=world, signal_at={1: 3})
    for result in results:
        assert result.outcome.reason == "signal" and result.outcome.iteration == 4
    assert sorted(name for name in os.listdir(tmp_path) if name.startswith("iter")) == ["iter_0000004"]
    assert results[0].text.count("saved checkpoint") == 1
    rest = run_all(f"{save} --load {tmp_path}", world=world)[0]
    assert results[0].losses + rest.losses == whole.losses
    assert results[0].norms + rest.norms == whole.norms


def test_a_signal_before_the_first_step_saves_nothing(tmp_path):
    for result in run_all(f"--save {tmp_path} --save-interval 4 --train-iters 6", world=2, signal_at={1: 0}):
        assert result.outcome.reason == "signal" and result.outcome.iteration == 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith("iter")]


def test_a_signal_during_evaluation_breaks_it_off_and_saves(tmp_path):
    flags = f"--save {tmp_path} --save-interval 100 --train-iters 6 --eval-interval 3 --eval-iters 50"
    result = run_one(flags, signal_at={0: 3})
    assert result.outcome.reason == "signal" and result.outcome.iteration == 3
    assert result.outcome.evaluations == () and (tmp_path / "iter_0000003").is_dir()


def test_exit_interval_and_duration(tmp_path):
    result = run_one(f"--train-iters 9 --exit-interval 4 --save {tmp_path} --save-interval 100 --eval-iters 2")
    assert result.outcome.reason == "exit-interval" and result.outcome.evaluations == ()
    assert (tmp_path / "iter_0000004").is_dir()
    ticks = iter(range(0, 10**6, 30))
    result = run_one("--train-iters 9 --exit-duration-in-mins 10", clock=lambda: next(ticks))
    assert result.outcome.reason == "exit-duration" and 0 < result.outcome.iteration < 9


class Poisoned(BigramStage):
    """Returns NaN as its third loss on the second data-parallel rank."""

    def forward(self, hidden, batch):
        output = super().forward(hidden, batch)
        self.count = getattr(self, "count", 0) + 1
        return output._replace(loss_sum=output.loss_sum * math.nan) if self.count == 3 else output


def build_poisoned(config, ctx, vocab_size):
    if ctx.rank == 0:
        return build_bigram(config, ctx, vocab_size)
    return [Poisoned(config, ctx, vocab_size, range(config.model.num_layers), True, True)]


def test_a_loss_that_is_not_finite_stops_all_ranks_and_names_iteration_and_rank(tmp_path, capsys):
    flags = f"--train-iters 6 --micro-batch-size 4 --save {tmp_path} --save-interval 1"
    with pytest.raises(TrainingError, match="iteration 3: the loss of 1 rank"):
        run_all(flags, world=2, build=build_poisoned)
    assert "rank 1, iteration 3: the loss is not finite here" in capsys.readouterr().err
    assert "iter_0000003" not in os.listdir(tmp_path) and "iter_0000002" in os.listdir(tmp_path)


def test_without_the_check_such_a_step_is_skipped_and_counted():
    flags = "--train-iters 6 --micro-batch-size 4 --no-check-for-nan-in-loss-and-grad"
    for result in run_all(flags, world=2, build=build_poisoned):
        assert [record.is_skipped for record in result.records] == [False, False, True, False, False, False]
        assert [record.is_nan for record in result.records] == [False, False, True, False, False, False]
        assert math.isfinite(result.losses[-1])
        assert result.rates[2] == result.rates[1] > result.rates[3]  # the schedule did not move
    text = run_all(flags, world=2, build=build_poisoned)[0].text
    lines = [line for line in text.splitlines() if "lm loss" in line or "learning rate" in line]
    assert "number of skipped iterations:   1 | number of nan iterations:   1 |" in lines[2]


def test_norms_and_zeros_are_reported_when_asked_for():
    result: Result = run_one("--train-iters 1 --log-num-zeros-in-grad --log-params-norm")
    record: StepRecord = result.records[0]
    assert record.num_zeros > 0 and record.params_norm > 0
    assert "num zeros:" in result.text and "params norm:" in result.text


def test_memory_of_the_first_replica_is_reported_when_asked_for():
    flags = "--train-iters 4 --log-memory-interval 2 --pipeline-model-parallel-size 2"
    first, *others = run_all(flags, world=4)
    found = re.findall(r"\[Rank (\d)\] \(after (\d) iterations\) memory \(MB\) \| allocated: [1-9]", first.text)
    assert found == [("0", "2"), ("2", "2"), ("0", "4"), ("2", "4")]
    assert not any("memory (MB)" in other.text for other in others)


def test_ledger_of_a_run_has_its_phases(tmp_path):
    config = RunConfig.from_flags(
        f"--num-layers 1 --hidden-size 8 --num-attention-heads 1 --train-iters 4 --save {tmp_path} --save-interval 2 "
        f"--eval-interval 2 --eval-iters 1 --peak-tflops 1 --data-path {corpus()} --split 8,1,1"
    )
    ledger = Ledger(tmp_path / "ledger.jsonl")
    outcome = train(config, single_process_context(), build_bigram, ledger=ledger)
    ledger.close(outcome.reason, outcome.iteration)
    events = read(tmp_path / "ledger.jsonl")
    result = account(events)
    assert all(result.seconds[name] > 0 for name in ("productive", "warmup", "data", "save", "load", "eval", "init"))
    assert [event.fields["step"] for event in events if event.ev == "durable"] == [2, 4]
    assert math.fsum(result.seconds.values()) == pytest.approx(result.wall)
