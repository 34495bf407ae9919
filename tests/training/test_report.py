"""Lines that other people's parsers read, byte for byte, and the curves and records beside them."""

import io
import json
import math
from datetime import datetime
from types import SimpleNamespace

from megatron.training.metrics import StepRecord, Summary
from megatron.training.progress import Progress, clock_text, wants_bar
from megatron.training.report import Reporter, evaluation_lines, log_line
from megatron.training.sinks import MetricsFile


def record(**values):
    full = {
        "iteration": 1, "consumed_samples": 4, "batch_size": 4, "learning_rate": 5e-4, "loss": 6.971315, "tokens": 128,
        "grad_norm": 2.054, "is_skipped": False, "loss_scale": 1.0, "num_zeros": 1.0, "params_norm": 28.354,
    }  # fmt: skip
    return StepRecord(**(full | values))


def summary(**values):
    full = {
        "last": record(), "loss": 6.971315, "steps": 1, "num_skipped": 0, "num_nan": 0, "seconds_per_step": 0.115,
        "tokens_per_second": 1113.0, "tflops_per_rank": 0.000123, "mfu": 0.0041,
    }  # fmt: skip
    return Summary(**(full | values))


def test_log_line_is_megatrons_with_ours_behind():
    line = log_line(summary(), 10, now=datetime(2026, 8, 1, 12, 0, 0, 5), with_throughput=True)
    megatron = (
        " [2026-08-01 12:00:00.000005] iteration        1/      10 | consumed samples:            4 |"
        " elapsed time per iteration (ms): 115.0 | throughput per GPU (TFLOP/s/GPU): 0.0 |"
        " learning rate: 5.000000E-04 | global batch size:     4 | lm loss: 6.971315E+00 | loss scale: 1.0 |"
        " grad norm: 2.054 | num zeros: 1.0 | params norm: 28.354 | number of skipped iterations:   0 |"
        " number of nan iterations:   0 |"
    )
    assert line == megatron + " tokens per second: 1113.0 | model TFLOP/s per rank: 0.000123 | MFU: 0.41% |"


def test_fields_that_were_not_asked_for_or_have_no_value_are_left_out():
    bare = summary(last=record(num_zeros=math.nan, params_norm=math.nan), loss=math.nan)
    line = log_line(bare, 10, now=datetime(2026, 8, 1))
    for field in ("num zeros", "params norm", "lm loss", "throughput per GPU"):
        assert field not in line


def test_evaluation_line():
    rule, line, _ = evaluation_lines(6.948237, "iteration 5")
    assert line == " validation loss at iteration 5 | lm loss value: 6.948237E+00 | lm loss PPL: 1.041312E+03 | "
    assert rule == "-" * (len(line) + 1)
    assert "PPL: 4.851652E+08" in evaluation_lines(99.0, "iteration 5")[1]


class Curves:
    """A sink that keeps everything."""

    def __init__(self):
        self.points, self.records = [], []

    def scalar(self, tag, value, step):
        self.points.append((tag, value, step))

    def record(self, values):
        self.records.append(values)

    def close(self):
        pass


def reporter(sink, **flags):
    logging = SimpleNamespace(
        progress_bar="off", timing_log_option="minmax", log_progress=True,
        log_throughput=True, tensorboard_log_interval=1, log_loss_scale_to_tensorboard=True,
        log_world_size_to_tensorboard=False, log_memory_to_tensorboard=True, log_timers_to_tensorboard=True,
        log_validation_ppl_to_tensorboard=True,
    )  # fmt: skip
    return Reporter(
        is_first=flags.pop("is_first", True),
        logging=logging,
        total_iterations=10,
        world_size=2,
        sinks=[sink],
        stream=io.StringIO(),
    )


def test_tensorboard_tags_are_megatrons():
    sink = Curves()
    memory = {"reserved": 1, "allocated": 2, "max-allocated": 3, "allocated-count": 4}
    reporter(sink).interval([record(), record(iteration=2, is_skipped=True)], summary(), memory)
    reporter(sink).evaluation(2.0, 64, split="valid", iteration=2, consumed_samples=8, is_final=False)
    per_step = {"learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "num-zeros", "params-norm"}
    per_interval = {
        "mem-reserved-bytes", "mem-allocated-bytes", "mem-max-allocated-bytes", "mem-allocated-count", "throughput",
        "iteration-time", "iteration-time vs samples", "lm loss validation", "lm loss validation vs samples",
        "lm loss validation ppl", "lm loss validation ppl vs samples",
    }  # fmt: skip
    assert {tag for tag, _, _ in sink.points} == per_step | {f"{tag} vs samples" for tag in per_step} | per_interval
    assert [step for tag, _, step in sink.points if tag == "lm loss"] == [1]  # the skipped step has no loss point
    assert [entry["event"] for entry in sink.records] == ["train", "eval"]


def test_other_ranks_are_silent():
    quiet = reporter(Curves(), is_first=False)
    quiet.say("x")
    quiet.interval([record()], summary(), None)
    assert quiet.stream.getvalue() == ""


def test_metrics_file_is_json_even_with_nan(tmp_path):
    sink = MetricsFile(tmp_path / "new" / "metrics.jsonl")
    sink.record({"loss": math.nan, "iteration": 3, "mfu": 0.5})
    sink.close()
    assert json.loads((tmp_path / "new" / "metrics.jsonl").read_text()) == {"loss": None, "iteration": 3, "mfu": 0.5}


def test_progress_bar_shows_the_time_left():
    now, stream = [0.0], io.StringIO()
    bar = Progress("train", 10, begin=2, stream=stream, clock=lambda: now[0])
    now[0] = 8.0
    bar.update(6)
    assert "6/10 0:08<0:08" in stream.getvalue()
    bar.clear()
    assert stream.getvalue().endswith("\r")
    assert clock_text(3723) == "1:02:03"
    assert wants_bar("on", 0, stream) and not wants_bar("on", 1, stream) and not wants_bar("auto", 0, stream)
