"""Numbers of the steps since the last log line: kept on the device, read by the host once an interval.

Every step leaves one row of device scalars. `flush` copies all rows at once, so the host waits for the device once an
interval and still has the values of every step. Nothing is carried from one interval into the next.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

ROW = ("loss", "tokens", "grad_norm", "is_committed", "loss_scale", "num_zeros", "params_norm")


class HostFacts(NamedTuple):
    """What the host knows of a step without asking the device."""

    iteration: int
    consumed_samples: int
    batch_size: int
    learning_rate: float
    """After the scheduler's step: the rate that the next iteration uses."""


class StepRecord(NamedTuple):
    """One finished step. `num_zeros` and `params_norm` are NaN where they were not asked for."""

    iteration: int
    consumed_samples: int
    batch_size: int
    learning_rate: float
    loss: float
    tokens: int
    grad_norm: float
    is_skipped: bool
    loss_scale: float
    num_zeros: float
    params_norm: float

    @property
    def is_nan(self) -> bool:
        """Whether the step's loss is not a finite number."""
        return not math.isfinite(self.loss)


class Summary(NamedTuple):
    """One log interval: the loss is the mean over the steps that were not skipped and have a finite loss (NaN without
    one); norms, rate, scale and batch size are the last step's, as Megatron prints them; the rest are sums or rates."""

    last: StepRecord
    loss: float
    steps: int
    num_skipped: int
    num_nan: int
    seconds_per_step: float
    tokens_per_second: float
    tflops_per_rank: float
    mfu: float


class StepRows:
    """Rows of the steps since the last flush."""

    def __init__(self):
        self._facts: list[HostFacts] = []
        self._rows: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, facts: HostFacts, row: torch.Tensor) -> None:
        """Keep one step: `row` is a device vector with one entry per name in ROW."""
        assert row.shape == (len(ROW),), row.shape
        self._facts.append(facts)
        self._rows.append(row)

    def flush(self) -> list[StepRecord]:
        """Records of all kept steps, oldest first, and start anew: here alone the host waits for the device."""
        if not self._rows:
            return []
        values = torch.stack(self._rows).tolist()
        records = [_record(facts, dict(zip(ROW, row))) for facts, row in zip(self._facts, values)]
        self._facts, self._rows = [], []
        return records


def _record(facts: HostFacts, row: dict[str, float]) -> StepRecord:
    return StepRecord(
        **facts._asdict(),
        loss=row["loss"],
        tokens=int(row["tokens"]),
        grad_norm=row["grad_norm"],
        is_skipped=row["is_committed"] == 0,
        loss_scale=row["loss_scale"],
        num_zeros=row["num_zeros"],
        params_norm=row["params_norm"],
    )


def summarize(
    records: Sequence[StepRecord], seconds: float, seq_tokens: int, flops: float, world_size: int, peak_tflops: float
) -> Summary:
    """The log line's numbers of `records`, which took `seconds` and hold `flops` model FLOPs over all ranks."""
    counted = [record.loss for record in records if not record.is_skipped and not record.is_nan]
    tflops = flops / max(seconds, 1e-9) / world_size / 1e12
    return Summary(
        last=records[-1],
        loss=math.fsum(counted) / len(counted) if counted else math.nan,
        steps=len(records),
        num_skipped=sum(record.is_skipped for record in records),
        num_nan=sum(record.is_nan for record in records),
        seconds_per_step=seconds / len(records),
        tokens_per_second=sum(record.batch_size for record in records) * seq_tokens / max(seconds, 1e-9),
        tflops_per_rank=tflops,
        mfu=tflops / peak_tflops,
    )
