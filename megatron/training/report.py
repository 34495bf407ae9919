"""What a run says: Megatron's log and evaluation lines, its TensorBoard tags, the metrics file, the progress bar.

The log line has Megatron's fields in its formats and order, so that parsers written for it go on working; our own
fields (tokens per second, model TFLOP/s per rank, MFU) stand at its end. Only the first rank reports.
"""

from __future__ import annotations

import math
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import TextIO

from megatron.training.metrics import StepRecord, Summary
from megatron.training.progress import Progress, wants_bar
from megatron.training.sinks import Sink
from megatron.training.timers import timing_lines

MEMORY_FIGURES = ("allocated", "max-allocated", "reserved")
"""What a line on memory holds, of `device.memory_bytes`."""


def log_line(summary: Summary, total_iterations: int, *, now: datetime, with_throughput: bool = False) -> str:
    """One interval as Megatron prints it, and our fields behind it."""
    last = summary.last
    parts = [
        f" [{now.strftime('%Y-%m-%d %H:%M:%S.%f')}] iteration {last.iteration:8d}/{total_iterations:8d} |",
        f" consumed samples: {last.consumed_samples:12d} |",
        f" elapsed time per iteration (ms): {summary.seconds_per_step * 1000:.1f} |",
    ]
    if with_throughput:
        parts.append(f" throughput per GPU (TFLOP/s/GPU): {summary.tflops_per_rank:.1f} |")
    parts += [
        f" learning rate: {as_fp32(last.learning_rate):.6E} |",
        f" global batch size: {last.batch_size:5d} |",
    ]
    if not math.isnan(summary.loss):
        parts.append(f" lm loss: {summary.loss:.6E} |")
    parts += [f" loss scale: {last.loss_scale:.1f} |", f" grad norm: {last.grad_norm:.3f} |"]
    if not math.isnan(last.num_zeros):
        parts.append(f" num zeros: {last.num_zeros:.1f} |")
    if not math.isnan(last.params_norm):
        parts.append(f" params norm: {last.params_norm:.3f} |")
    parts += [
        f" number of skipped iterations: {summary.num_skipped:3d} |",
        f" number of nan iterations: {summary.num_nan:3d} |",
        f" tokens per second: {summary.tokens_per_second:.1f} |",
        f" model TFLOP/s per rank: {summary.tflops_per_rank:.4g} |",
        f" MFU: {100 * summary.mfu:.2f}% |",
    ]
    return "".join(parts)


def as_fp32(value: float) -> float:
    """The nearest fp32 number: Megatron's rate is one, which shows in the last digit that it prints."""
    return struct.unpack("f", struct.pack("f", value))[0]


def perplexity(loss: float) -> float:
    """exp(loss), capped at exp(20) as Megatron caps it."""
    return math.exp(min(20.0, loss))


def evaluation_lines(loss: float, prefix: str) -> list[str]:
    """Megatron's validation line between two rules; `prefix` as in "iteration 5"."""
    text = f" validation loss at {prefix} | lm loss value: {loss:.6E} | lm loss PPL: {perplexity(loss):.6E} | "
    rule = "-" * (len(text) + 1)
    return [rule, text, rule]


class Reporter:
    """Prints and writes for one rank; `is_first` False keeps all of it silent."""

    def __init__(
        self,
        *,
        is_first: bool,
        logging,
        total_iterations: int,
        world_size: int,
        save_directory: str | None = None,
        sinks: Sequence[Sink] = (),
        stream: TextIO | None = None,
    ):
        self.is_first, self.logging, self.total_iterations = is_first, logging, total_iterations
        self.world_size, self.sinks, self.progress = world_size, list(sinks), None
        self.save_directory = save_directory
        self.has_bar = wants_bar(logging.progress_bar, 0 if is_first else 1)
        self.stream = sys.stdout if stream is None else stream

    def begin(self, iteration: int, sinks: Sequence[Sink]) -> None:
        """Open what depends on where the run starts: the progress bar and the sinks."""
        self.sinks = list(sinks)
        if self.has_bar:
            self.progress = Progress("training", self.total_iterations, begin=iteration)

    def say(self, text: str) -> None:
        """Print a line, once for the whole run."""
        if self.is_first:
            if self.progress is not None:
                self.progress.clear()
            print(text, file=self.stream, flush=True)

    @contextmanager
    def stage(self, title: str) -> Iterator[None]:
        """Say that a part which may take long begins, and how long it took."""
        self.say(f"> {title} ...")
        start = time.monotonic()
        yield
        self.say(f"  done in {time.monotonic() - start:.1f} s")

    def step(self, iteration: int) -> None:
        """Move the progress bar."""
        if self.progress is not None:
            self.progress.update(iteration)

    def interval(self, records: Sequence[StepRecord], summary: Summary, memory: dict[str, int] | None) -> None:
        """One log interval: the line, the curves of its steps, one record in the metrics file."""
        if not self.is_first:
            return
        self.say(
            log_line(
                summary,
                self.total_iterations,
                now=datetime.now(),
                with_throughput=self.logging.log_throughput,
            )
        )
        for record in records:
            if record.iteration % self.logging.tensorboard_log_interval == 0:
                self._curves(record)
        self._interval_curves(summary, memory)
        self._record(
            {
                "event": "train",
                **summary.last._asdict(),
                "loss": summary.loss,
                "num_skipped": summary.num_skipped,
                "num_nan": summary.num_nan,
                "seconds_per_step": summary.seconds_per_step,
                "tokens_per_second": summary.tokens_per_second,
                "tflops_per_rank": summary.tflops_per_rank,
                "mfu": summary.mfu,
                "time": datetime.now().isoformat(),
            }
        )

    def timings(self, by_rank: Sequence[dict[str, float]], summary: Summary) -> None:
        """The parts of the interval's steps, over the ranks; in TensorBoard the slowest rank's."""
        if not self.is_first:
            return
        for line in timing_lines(by_rank, summary.steps, self.logging.timing_log_option):
            self.say(line)
        if self.logging.log_timers_to_tensorboard:
            for name in dict.fromkeys(name for seconds in by_rank for name in seconds):
                slowest = max(seconds.get(name, 0.0) for seconds in by_rank)
                self._scalar(f"{name}-time", slowest / summary.steps, summary.last.iteration)

    def memory(self, by_rank: Mapping[int, dict[str, int]], iteration: int) -> None:
        """Megatron's line on memory for each rank given."""
        for rank, figures in by_rank.items():
            parts = [f"{name.replace('-', ' ')}: {figures[name] / 2**20:.1f}" for name in MEMORY_FIGURES]
            self.say(f"[Rank {rank}] (after {iteration} iterations) memory (MB) | {' | '.join(parts)}")

    def note(self, text: str) -> None:
        """Append a line to progress.txt in --save, with --log-progress."""
        if self.is_first and self.logging.log_progress and self.save_directory is not None:
            stamp = datetime.now().strftime("%Y-%m-%d %H:%M:%S")
            with open(Path(self.save_directory) / "progress.txt", "a", encoding="utf-8") as file:
                file.write(f"{stamp}\t# processes: {self.world_size}\t{text}\n")

    def evaluation(
        self, loss: float, tokens: int, *, split: str, iteration: int, consumed_samples: int, is_final: bool
    ):
        """One evaluation: Megatron's lines, its curves (validation only), one record in the metrics file."""
        prefix = f"iteration {iteration}"
        if is_final:
            prefix += " on validation set" if split == "valid" else " on test set"
        for line in evaluation_lines(loss, prefix):
            self.say(line)
        if split == "valid":
            self._scalar("lm loss validation", loss, iteration)
            self._scalar("lm loss validation vs samples", loss, consumed_samples)
            if self.logging.log_validation_ppl_to_tensorboard:
                self._scalar("lm loss validation ppl", perplexity(loss), iteration)
                self._scalar("lm loss validation ppl vs samples", perplexity(loss), consumed_samples)
        self._record(
            {
                "event": "eval",
                "split": split,
                "iteration": iteration,
                "consumed_samples": consumed_samples,
                "loss": loss,
                "ppl": perplexity(loss),
                "tokens": tokens,
                "is_final": is_final,
                "time": datetime.now().isoformat(),
            }
        )

    def close(self) -> None:
        """Write what is pending and take the bar away."""
        if self.progress is not None:
            self.progress.clear()
        for sink in self.sinks:
            sink.close()

    def _curves(self, record: StepRecord) -> None:
        curves = {
            "learning-rate": record.learning_rate,
            "batch-size": record.batch_size,
            "lm loss": None if record.is_skipped else record.loss,
            "loss-scale": record.loss_scale if self.logging.log_loss_scale_to_tensorboard else None,
            "world-size": self.world_size if self.logging.log_world_size_to_tensorboard else None,
            "grad-norm": record.grad_norm,
            "num-zeros": None if math.isnan(record.num_zeros) else record.num_zeros,
            "params-norm": None if math.isnan(record.params_norm) else record.params_norm,
        }
        for tag, value in curves.items():
            if value is not None:
                self._scalar(tag, value, record.iteration)
                self._scalar(f"{tag} vs samples", value, record.consumed_samples)

    def _interval_curves(self, summary: Summary, memory: dict[str, int] | None) -> None:
        iteration = summary.last.iteration
        if self.logging.log_memory_to_tensorboard and memory is not None:
            for name, value in memory.items():
                self._scalar(f"mem-{name}" if name.endswith("count") else f"mem-{name}-bytes", value, iteration)
        if self.logging.log_throughput:
            self._scalar("throughput", summary.tflops_per_rank, iteration)
        if self.logging.log_timers_to_tensorboard:
            self._scalar("iteration-time", summary.seconds_per_step, iteration)
            self._scalar("iteration-time vs samples", summary.seconds_per_step, summary.last.consumed_samples)

    def _scalar(self, tag: str, value: float, step: int) -> None:
        for sink in self.sinks:
            sink.scalar(tag, value, step)

    def _record(self, values: dict) -> None:
        for sink in self.sinks:
            sink.record(values)
