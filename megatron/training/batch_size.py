"""The global batch size as a function of the samples consumed: constant, or growing under --rampup-batch-size.

`START INCREMENT SAMPLES` grows the batch from START to the full size in equal steps, each lasting SAMPLES divided by the
number of steps. Every size the ramp passes is checked before anything is built.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """`start == full` and `ramp_samples == 0` mean a constant batch."""

    start: int
    increment: int
    ramp_samples: int
    full: int

    @classmethod
    def of(cls, full: int, ramp: tuple[int, int, int] | None, unit: int) -> BatchSizes:
        """The sizes for --global-batch-size `full` and --rampup-batch-size `ramp`; each must be a multiple of `unit`.

        `unit` is the micro batch times the data-parallel size. Raises ValueError when a size does not fit.
        """
        if full % unit:
            raise ValueError(
                f"--global-batch-size {full} is not a multiple of the micro batch times the data-parallel size, {unit}; "
                f"use {max(1, full // unit) * unit}"
            )
        if ramp is None:
            return cls(start=full, increment=0, ramp_samples=0, full=full)
        start, increment, samples = ramp
        text = f"--rampup-batch-size {start} {increment} {samples}"
        if start < 1 or increment < 1 or samples < 0 or start > full or (full - start) % increment:
            raise ValueError(
                f"{text} does not reach --global-batch-size {full} from {start} in steps of {increment}; INCREMENT must "
                "divide the difference, START lie between 1 and the full size, SAMPLES be 0 or more"
            )
        for size in range(start, full, increment):
            if size % unit:
                raise ValueError(
                    f"{text} passes a batch of {size}, which is not a multiple of the micro batch times the "
                    f"data-parallel size, {unit}; choose START and INCREMENT as multiples of it"
                )
        return cls(start=start, increment=increment, ramp_samples=samples if start < full else 0, full=full)

    def at(self, consumed_samples: int) -> int:
        """The global batch size of the step that begins after `consumed_samples` samples."""
        if consumed_samples >= self.ramp_samples:
            return self.full
        grown = consumed_samples * ((self.full - self.start) // self.increment) // self.ramp_samples
        return self.start + grown * self.increment

    def iterations(self, samples: int) -> int:
        """How many whole steps `samples` samples make."""
        consumed = steps = 0
        while consumed < self.ramp_samples and consumed + self.at(consumed) <= samples:
            consumed += self.at(consumed)
            steps += 1
        return steps + (samples - consumed) // self.full if consumed >= self.ramp_samples else steps

    def samples(self, iterations: int) -> int:
        """How many samples `iterations` steps consume from the start of the run."""
        consumed = steps = 0
        while consumed < self.ramp_samples and steps < iterations:
            consumed += self.at(consumed)
            steps += 1
        return consumed + (iterations - steps) * self.full
