"""The program around a run: exit codes, and what an error looks like."""

from __future__ import annotations

import json
import sys
import types

import pytest

from megatron.checkpoint.format import CheckpointError
from megatron.training import exit_codes
from megatron.training.process import Process
from megatron.training.start import stored_configuration
from megatron.training.supervise import pretrain
from tests.training.bigram import build_bigram
from tests.training.runs import TINY, RunConfig, corpus, run_one


def config_of(flags: str) -> RunConfig:
    return RunConfig.from_flags(f"{TINY} --data-path {corpus()} {flags}")


def test_a_complete_run_ends_with_zero_and_says_so(tmp_path, capsys):
    flags = f"--train-iters 2 --save {tmp_path} --save-interval 2 --log-progress --tensorboard-dir {tmp_path}/tb"
    assert pretrain(config_of(flags), Process(), build_bigram) == exit_codes.COMPLETE
    text = capsys.readouterr().out
    assert "finished (complete) at iteration 2" in text and "> building the data sets ..." in text
    lines = (tmp_path / "progress.txt").read_text().splitlines()
    assert ["Starting job" in lines[0], "Saved checkpoint\tIteration: 2" in lines[1]] == [True, True]
    assert list((tmp_path / "tb").glob("events.*"))
    entries = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [entry["iteration"] for entry in entries] == [1, 2]


def test_what_a_user_can_mend_is_one_line(tmp_path, capsys):
    bad = RunConfig.from_flags(f"{TINY} --train-iters 2 --data-path {tmp_path}/nothing")
    assert pretrain(bad, Process(), build_bigram) == exit_codes.FAILED
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].startswith("error: ") and f"{tmp_path}/nothing" in lines[0]


def test_a_run_of_no_steps_evaluates_and_ends(capsys):
    assert pretrain(config_of("--train-iters 0 --eval-iters 1 --split 80,10,10"), Process(), build_bigram) == 0
    text = capsys.readouterr().out
    assert "on test set" in text and "finished (complete) at iteration 0" in text


def test_a_split_without_training_data_is_named(capsys):
    config = config_of("--train-iters 2 --split 0,90,10")
    assert pretrain(config, Process(), build_bigram) == exit_codes.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert "--split 0,90,10 gives none of it to training" in line


@pytest.mark.parametrize("flag", ["--save", "--tensorboard-dir", "--metrics-file"])
def test_a_place_that_cannot_be_written_is_named_with_its_flag(flag, tmp_path, capsys):
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "x"
    config = config_of(f"--train-iters 2 {flag} {place} --save-interval 2")
    assert pretrain(config, Process(), build_bigram) == exit_codes.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {flag} {place} cannot be written")


def test_a_save_directory_that_cannot_be_made_fails_before_the_ranks_meet(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr("megatron.training.supervise.launch", None)
    config = config_of(f"--train-iters 2 --save {tmp_path}/file/x --save-interval 2")
    for rank in (0, 1):
        assert pretrain(config, Process(rank, rank, 2), build_bigram) == exit_codes.FAILED
        assert f"error: --save {tmp_path}/file/x cannot be written" in capsys.readouterr().err


def test_data_that_does_not_fit_is_one_line_though_it_shows_in_a_step(tmp_path, capsys):
    flags = f"{TINY} --train-iters 2 --data-path {corpus()}".replace("--num-workers 0", "--num-workers 1")
    small = RunConfig.from_flags(f"{flags} --tokenizer-type NullTokenizer --vocab-size 20")
    assert pretrain(small, Process(), build_bigram) == exit_codes.FAILED
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: the data holds token id") and "--vocab-size" in line


def test_a_save_that_fails_is_a_failure(tmp_path, capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise CheckpointError("disk full")

    monkeypatch.setattr("megatron.training.state.save_checkpoint", fail)
    flags = f"--train-iters 4 --save {tmp_path} --save-interval 2"
    assert pretrain(config_of(flags), Process(), build_bigram) == exit_codes.FAILED
    assert "error: disk full" in capsys.readouterr().err


def test_an_error_of_ours_has_its_traceback_and_its_rank(capsys):
    def broken(config, ctx, vocab_size):
        raise RuntimeError("boom")

    assert pretrain(config_of("--train-iters 2"), Process(), broken) == exit_codes.FAILED
    text = capsys.readouterr().err
    assert "rank 0 failed:" in text and "Traceback" in text and "boom" in text


def test_weights_and_biases_gets_the_curves(tmp_path, monkeypatch):
    logged, settings, axes = [], {}, {}

    class FakeRun:
        def define_metric(self, name, step_metric=None):
            axes[name] = step_metric

        def log(self, values):
            logged.append(values)

        def finish(self):
            logged.append("finished")

    def init(**given):
        settings.update(given)
        return FakeRun()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    flags = f"--train-iters 4 --wandb-project demo --wandb-exp-name first --wandb-save-dir {tmp_path} "
    flags += "--log-interval 4 --eval-interval 2 --eval-iters 1"
    assert pretrain(config_of(flags), Process(), build_bigram) == exit_codes.COMPLETE
    assert settings["project"] == "demo" and settings["config"]["training"]["train_iters"] == 4
    assert axes == {"iteration": None, "*": "iteration"} and logged.pop() == "finished"
    assert [row["iteration"] for row in logged if "lm loss" in row] == [1, 2, 3, 4]
    assert [row["iteration"] for row in logged if "lm loss validation" in row] == [2, 4, 4]  # the last is the final one
    assert {tag for row in logged for tag in row} >= {"learning-rate", "grad-norm"}
    assert not any("samples" in tag for row in logged for tag in row)


@pytest.mark.parametrize("directory", ["", "iter_0000002"])
def test_stored_configuration_is_what_the_run_had(tmp_path, directory):
    run_one(f"--train-iters 2 --save {tmp_path} --save-interval 2")
    config = config_of(f"--train-iters 2 --load {tmp_path / directory}")
    stored = stored_configuration(config.checkpoint)
    assert stored["model"]["num_layers"] == 4 and stored["training"]["train_iters"] == 2
