"""Stopping and going on: bit for bit on the same layout, to rounding on others, and what each way of starting takes."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest

from megatron.datasets.indexed import IndexedDatasetWriter
from megatron.training.supervise import UserError
from tests.training.bigram import BigramStage
from tests.training.runs import run_all, run_one, same_numbers

LENGTH = "--train-iters 8 --lr-warmup-iters 2 --lr-decay-style cosine"
PP2 = "--pipeline-model-parallel-size 2"
ZERO = "--use-distributed-optimizer"


def saving(path, interval, flags=LENGTH):
    return f"{flags} --save {path} --save-interval {interval}"


@pytest.mark.parametrize("step", [1, 4, 7])
@pytest.mark.parametrize("dtype", ["", "--bf16", "--optimizer sgd"])
def test_resume_is_exact(tmp_path, step, dtype):
    whole = run_one(f"{LENGTH} {dtype}")
    first = run_one(f"{saving(tmp_path, 100)} --exit-interval {step} {dtype}")
    rest = run_one(f"{LENGTH} --load {tmp_path} {dtype}")
    assert same_numbers(whole, rest._replace(records=first.records + rest.records))
    assert [record.iteration for record in rest.records] == list(range(step + 1, 9))
    assert rest.records[-1].consumed_samples == 64


LAYOUTS = {"one": (1, ""), "pp2": (2, PP2), "dp2": (2, ""), "zero": (2, ZERO), "dp2pp2": (4, f"{PP2} {ZERO}")}


@pytest.mark.parametrize(("before", "after"), [("one", "dp2pp2"), ("zero", "pp2"), ("dp2pp2", "one"), ("pp2", "zero")])
def test_resume_on_another_layout(tmp_path, before, after):
    """Equal to rounding: data-parallel layouts sum gradients in another order."""
    whole = run_one(LENGTH)
    world, layout = LAYOUTS[before]
    run_all(f"{saving(tmp_path, 100)} --exit-interval 4 {layout}", world=world)
    world, layout = LAYOUTS[after]
    rest = run_all(f"{LENGTH} --load {tmp_path} {layout}", world=world)[0]
    assert rest.losses == pytest.approx(whole.losses[4:], rel=1e-5)
    assert rest.norms == pytest.approx(whole.norms[4:], rel=1e-5)
    assert rest.rates == whole.rates[4:]


def test_same_layout_is_exact_with_sharded_states(tmp_path):
    world, layout = LAYOUTS["dp2pp2"]
    whole = run_all(f"{LENGTH} {layout}", world=world)[0]
    run_all(f"{saving(tmp_path, 100)} --exit-interval 4 {layout}", world=world)
    rest = run_all(f"{LENGTH} --load {tmp_path} {layout}", world=world)[0]
    assert rest.losses == whole.losses[4:] and rest.norms == whole.norms[4:]


def test_resume_of_a_complete_run_trains_no_further(tmp_path):
    run_one(saving(tmp_path, 4))
    again = run_one(f"{saving(tmp_path, 4)} --load {tmp_path}")
    assert again.records == [] and again.outcome.iteration == 8


class TestSchedules:
    """A checkpoint under lr 3e-3 constant, and every way to go on from it."""

    old = "--lr 3e-3 --lr-decay-style constant --train-iters 6"
    new = "--lr 1e-3 --min-lr 1e-4 --lr-decay-style cosine --lr-decay-iters 20 --lr-warmup-iters 4 --train-iters 20"

    @pytest.fixture
    def saved(self, tmp_path):
        run_one(saving(tmp_path, 6, self.old))
        return tmp_path

    def test_override_follows_the_flags_from_the_first_step(self, saved):
        rates = run_one(f"{self.new} --load {saved} --override-opt_param-scheduler").rates
        assert max(rates) < 1e-3 and len(rates) == 14
        assert rates[12 - 7] == pytest.approx(5.5e-4, abs=1e-12)
        assert rates[-1] == pytest.approx(1e-4, abs=1e-12)

    def test_use_checkpoint_continues_the_stored_one(self, saved):
        rates = run_one(f"{self.new} --load {saved} --use-checkpoint-opt_param-scheduler").rates
        assert rates == [3e-3] * 14

    def test_neither_is_refused_when_they_differ(self, saved):
        with pytest.raises(UserError, match=r"--lr is 0.001, the checkpoint's is 0.003.*--override-opt"):
            run_one(f"{self.new} --load {saved}")

    def test_finetune_starts_at_step_one(self, saved):
        result = run_one(f"{self.new} --load {saved} --finetune")
        assert result.records[0].iteration == 1 and result.records[0].consumed_samples == 8
        assert result.rates[:4] == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3], abs=1e-12)
        assert result.losses[0] < run_one(self.old).losses[0]

    def test_a_longer_run_needs_no_flag(self, saved):
        assert len(run_one(f"{self.old} --load {saved} --train-iters 9").records) == 3

    def test_without_optimizer_state(self, saved):
        result = run_one(f"{self.old} --train-iters 9 --load {saved} --no-load-optim")
        assert [record.iteration for record in result.records] == [7, 8, 9]

    def test_pretrained_checkpoint_is_used_when_load_is_empty(self, saved, tmp_path):
        (tmp_path / "empty").mkdir()
        result = run_one(f"{self.old} --load {tmp_path}/empty --pretrained-checkpoint {saved}")
        assert result.records[0].iteration == 1
        assert "loaded the weights of iteration 6" in result.text

    def test_another_seed_is_refused(self, saved):
        flags = f"{self.old} --train-iters 8 --load {saved} --seed 99"
        with pytest.raises(UserError, match="--seed 99 differs from the checkpoint's 1234"):
            run_one(flags)
        assert len(run_one(f"{flags} --no-load-rng").records) == 2

    def test_another_model_is_refused(self, saved):
        with pytest.raises(UserError, match="--num-layers is 2 here and 4 in the checkpoint|lacks|holds"):
            run_one(f"{self.old} --load {saved} --num-layers 2")


def test_checkpoint_without_optimizer_needs_the_flag(tmp_path):
    run_one(f"{saving(tmp_path, 4)} --no-save-optim --exit-interval 4")
    with pytest.raises(UserError, match="--no-load-optim"):
        run_one(f"{LENGTH} --load {tmp_path}")
    assert len(run_one(f"{LENGTH} --load {tmp_path} --no-load-optim").records) == 4


class TestMissingCheckpoint:
    """A checkpoint that was asked for and is not there stops the run before its first step."""

    def test_absent_path(self, tmp_path):
        for world in (1, 2):
            with pytest.raises(UserError, match="nowhere.*no such directory"):
                run_all(f"{LENGTH} --load {tmp_path}/nowhere", world=world)

    def test_empty_directory_says_so(self, tmp_path):
        result = run_one(f"{LENGTH} --load {tmp_path}")
        assert "NO CHECKPOINT" in result.text and len(result.records) == 8
        with pytest.raises(UserError, match="holds no checkpoint"):
            run_one(f"{LENGTH} --load {tmp_path} --exit-on-missing-checkpoint")
        with pytest.raises(UserError, match="holds no checkpoint"):
            run_one(f"{LENGTH} --load {tmp_path} --finetune")

    def test_tracker_without_its_step_and_explicit_step(self, tmp_path):
        (tmp_path / "latest_checkpointed_iteration.txt").write_text("7\n")
        with pytest.raises(UserError, match="names iteration 7"):
            run_one(f"{LENGTH} --load {tmp_path}")
        with pytest.raises(UserError, match="--ckpt-step 3"):
            run_one(f"{LENGTH} --load {tmp_path} --ckpt-step 3")

    def test_hugging_face_directory(self, tmp_path):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
        (tmp_path / "model.safetensors").write_bytes(b"")
        with pytest.raises(UserError, match="Hugging Face"):
            run_one(f"{LENGTH} --load {tmp_path}")


def test_retain_interval_keeps_multiples_and_the_newest(tmp_path):
    run_one(f"{saving(tmp_path, 1)} --save-retain-interval 3")
    kept = sorted(name for name in os.listdir(tmp_path) if name.startswith("iter"))
    assert kept == [f"iter_{step:07d}" for step in (3, 6, 8)]


class Recording(BigramStage):
    """Notes the middle token of each sample: in `numbered_corpus` the number of the sample's document."""

    def forward(self, hidden, batch):
        if self.training and self.is_first and self.is_speaker:
            self.seen.append(batch["tokens"][:, 16].tolist())
        return super().forward(hidden, batch)


class BuildRecording:
    """Stages that write down what they train on, by step: `steps[k]` is the set of sample numbers of step k."""

    def __init__(self, batch_size):
        self.batch_size, self.seen = batch_size, []

    def __call__(self, config, ctx, vocab_size):
        stage = Recording(config, ctx, vocab_size, range(config.model.num_layers), True, True)
        stage.seen, stage.is_speaker = self.seen, ctx.coords.tp == 0
        return [stage]

    @property
    def ids(self):
        return [number for batch in self.seen for number in batch]

    @property
    def steps(self):
        return [sorted(self.ids[n : n + self.batch_size]) for n in range(0, len(self.ids), self.batch_size)]


@pytest.fixture(scope="module")
def numbered_corpus(tmp_path_factory):
    """24 documents of which number i holds the token i only, as many tokens as 24 samples of 32 need."""
    prefix = str(tmp_path_factory.mktemp("numbered") / "text")
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        for number in range(24):
            length = 33 if number == 23 else 32
            writer.add_document(np.full(length, number), [length])
        writer.finalize()
    return f"--data-path {prefix} --split 1,0,0 --global-batch-size 4 --micro-batch-size 1 --num-layers 1"


def ids_of(corpus, flags, batch_size=4, **options):
    build = BuildRecording(batch_size)
    run_all(f"{corpus} {flags}", build=build, **options)
    return build


@pytest.mark.parametrize("kind", ["single", "cyclic"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("step", [3, 6, 9, 15])
def test_data_order_over_epochs_survives_a_break(numbered_corpus, tmp_path, kind, workers, step):
    flags = f"--train-iters 18 --dataloader-type {kind} --num-workers {workers}"
    whole = ids_of(numbered_corpus, flags).ids
    assert sorted(whole) == sorted(list(range(24)) * 3)
    if kind == "cyclic":
        for epoch in range(3):
            assert sorted(whole[24 * epoch : 24 * epoch + 24]) == list(range(24))
    first = ids_of(numbered_corpus, f"{flags} --save {tmp_path} --save-interval 100 --exit-interval {step}").ids
    rest = ids_of(numbered_corpus, f"{flags} --load {tmp_path}").ids
    assert first + rest == whole


@pytest.mark.parametrize("kind", ["single", "cyclic"])
def test_data_order_survives_another_batch_size(numbered_corpus, tmp_path, kind):
    flags = f"--dataloader-type {kind}"
    whole = ids_of(numbered_corpus, f"{flags} --train-iters 18").ids
    first = ids_of(
        numbered_corpus, f"{flags} --train-iters 18 --save {tmp_path} --save-interval 9 --exit-interval 9"
    ).ids
    halved = f"{flags} --global-batch-size 2 --train-iters 27 --load {tmp_path} --override-opt-param-scheduler"
    rest = ids_of(numbered_corpus, halved).ids
    assert first + rest == whole


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 4), (1, 2), (4, 2)])
def test_data_position_survives_another_number_of_replicas(numbered_corpus, tmp_path, before, after):
    whole = ids_of(numbered_corpus, "--train-iters 6").steps
    save = f"--train-iters 6 --save {tmp_path} --save-interval 3 --exit-interval 3"
    first = ids_of(numbered_corpus, save, world=before).steps
    rest = ids_of(numbered_corpus, f"--train-iters 6 --load {tmp_path}", world=after).steps
    assert first + rest == whole


class TestFp16:
    """Loss scale: overflow at the start, state carried over, all ranks skipping alike, and an end to skipping."""

    flags = "--fp16 --train-iters 30 --loss-scale-window 2 --hysteresis 2"

    @pytest.mark.parametrize("step", [2, 3, 25])
    def test_resume_before_and_after_the_first_update(self, tmp_path, step):
        whole = run_one(self.flags)
        skipped = [record.is_skipped for record in whole.records]
        assert skipped[:9] == [True] * 9 and not all(skipped)
        first = run_one(f"{self.flags} --save {tmp_path} --save-interval 1 --exit-interval {step}")
        rest = run_one(f"{self.flags} --load {tmp_path}")
        joined = rest._replace(records=first.records + rest.records)
        assert [r.loss_scale for r in joined.records] == [r.loss_scale for r in whole.records]
        assert [r.is_skipped for r in joined.records] == skipped
        assert joined.losses == whole.losses and joined.rates == whole.rates

    def test_a_skip_moves_samples_and_iterations_but_not_the_schedule(self):
        records = run_one(f"{self.flags} --lr-warmup-iters 4").records
        assert [record.consumed_samples for record in records] == [8 * n for n in range(1, 31)]
        rate, made = 0.0, 0
        for record in records:
            made += not record.is_skipped
            assert (record.learning_rate == rate) == record.is_skipped or made == 0
            rate = record.learning_rate
        untouched = [record.loss for record in records if record.is_skipped]
        assert len(untouched) >= 9

    @pytest.mark.parametrize("layout", [(2, ""), (2, PP2), (2, ZERO)])
    def test_overflow_on_one_rank_skips_on_all(self, layout):
        world, flags = layout
        results = run_all(
            f"--fp16 --initial-loss-scale 1024 --train-iters 7 {flags}", world=world, build=build_bursting
        )
        for result in results:
            assert [record.iteration for record in result.records if record.is_skipped] == [5]
            assert result.norms[:4] == results[0].norms[:4] and result.losses == results[0].losses

    def test_endless_overflow_stops_the_run(self):
        flags = "--fp16 --train-iters 60 --initial-loss-scale 4 --min-loss-scale 2 --hysteresis 1 --lr 1e-3"
        with pytest.raises(Exception, match="steps in a row were skipped"):
            run_one(f"{flags} --max-consecutive-skipped-iterations 5", build=build_overflowing)


class Bursting(BigramStage):
    """Its fifth training step has an infinite gradient."""

    always = False

    def forward(self, hidden, batch):
        output = super().forward(hidden, batch)
        if self.always or 32 <= batch["sample_ids"][0] < 40:
            weight = self.layers[0]
            infinite = (weight.float() * 1e38).sum() * 1e38
            return output._replace(loss_sum=output.loss_sum + infinite) if self.is_last else output * float("inf")
        return output


def build_bursting(config, ctx, vocab_size):
    """Only the last rank bursts."""
    count = config.model.num_layers // ctx.mesh.pp
    layers = range(ctx.coords.pp * count, (ctx.coords.pp + 1) * count)
    kind = Bursting if ctx.rank == ctx.mesh.world_size - 1 else BigramStage
    return [kind(config, ctx, vocab_size, layers, ctx.coords.pp == 0, ctx.coords.pp == ctx.mesh.pp - 1)]


def build_overflowing(config, ctx, vocab_size):
    stages = build_bursting(config, ctx, vocab_size)
    stages[0].always = True
    return stages
