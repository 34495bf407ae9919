"""Where numbers are written besides the log: TensorBoard, Weights & Biases, the metrics file.

A sink has `scalar(tag, value, step)`, `record(dict)` and `close()`. Only the first rank opens sinks.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from megatron.config.stored import to_dict


class Sink(Protocol):
    """What the reporter writes to."""

    def scalar(self, tag: str, value: float, step: int) -> None:
        """One point of a curve."""

    def record(self, values: dict) -> None:
        """One log line or evaluation as a whole."""

    def close(self) -> None:
        """Write what is pending."""


class TensorBoard:
    """Event files in --tensorboard-dir; a resumed run hides the points of iterations that it does again."""

    def __init__(self, directory: str, queue_size: int, first_step: int):
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(log_dir=directory, max_queue=queue_size, purge_step=first_step + 1)

    def scalar(self, tag: str, value: float, step: int) -> None:
        self.writer.add_scalar(tag, value, step)

    def record(self, values: dict) -> None:
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class WeightsAndBiases:
    """A Weights & Biases run, its curves over an axis `iteration` of ours.

    Their own step may only grow, and points that come late would be dropped: an evaluation is written before the steps
    of a log interval that has not ended. The curves over samples are left to TensorBoard, as in Megatron.
    """

    def __init__(self, logging, save: str | None, settings: dict):
        import wandb

        directory = logging.wandb_save_dir or (str(Path(save) / "wandb") if save else "wandb")
        Path(directory).mkdir(parents=True, exist_ok=True)
        self.run = wandb.init(
            project=logging.wandb_project,
            name=logging.wandb_exp_name,
            entity=logging.wandb_entity,
            dir=directory,
            config=settings,
        )
        self.run.define_metric("iteration")
        self.run.define_metric("*", step_metric="iteration")
        self._row: dict[str, float] = {}

    def scalar(self, tag: str, value: float, step: int) -> None:
        if tag.endswith(" vs samples"):
            return
        if self._row.get("iteration", step) != step:
            self._send()
        self._row |= {"iteration": step, tag: value}

    def record(self, values: dict) -> None:
        self._send()

    def close(self) -> None:
        self._send()
        self.run.finish()

    def _send(self) -> None:
        if self._row:
            self.run.log(self._row)
        self._row = {}


class MetricsFile:
    """One JSON object for each log line and evaluation, appended. NaN and infinity become null: the file stays JSON."""

    def __init__(self, path: str | Path):
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = open(path, "a", encoding="utf-8")  # noqa: SIM115

    def scalar(self, tag: str, value: float, step: int) -> None:
        pass

    def record(self, values: dict) -> None:
        clean = {key: None if _is_not_finite(value) else value for key, value in values.items()}
        self.file.write(json.dumps(clean, allow_nan=False) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def _is_not_finite(value) -> bool:
    return isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))


def metrics_path(config) -> Path | None:
    """The metrics file of a run: --metrics-file, else metrics.jsonl in --save, else none."""
    if config.logging.metrics_file:
        return Path(config.logging.metrics_file)
    return Path(config.checkpoint.save) / "metrics.jsonl" if config.checkpoint.save else None


def open_sinks(config, first_step: int) -> list[Sink]:
    """The sinks that the flags ask for; `first_step` is the iteration the run continues after."""
    logging, sinks = config.logging, []
    if logging.tensorboard_dir:
        with writing_to(f"--tensorboard-dir {logging.tensorboard_dir}"):
            sinks.append(TensorBoard(logging.tensorboard_dir, logging.tensorboard_queue_size, first_step))
    if logging.wandb_project:
        sinks.append(WeightsAndBiases(logging, config.checkpoint.save, to_dict(config)))
    path = metrics_path(config)
    if path is not None:
        with writing_to(f"--metrics-file {path}"):
            sinks.append(MetricsFile(path))
    return sinks


@contextmanager
def writing_to(place: str) -> Iterator[None]:
    """Errors of the file system inside name `place`, a flag and its value; ValueError."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{place} cannot be written ({error.strerror or error}); name another place") from error
