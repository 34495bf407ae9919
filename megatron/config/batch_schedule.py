"""The global batch size as a function of the samples consumed, and iterations <-> samples under it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """A constant global batch, or one that grows by equal increments over the first `ramp_samples` samples."""

    global_batch_size: int
    start: int | None = None
    """First batch of a ramp; None: no ramp."""
    increment: int = 1
    ramp_samples: int = 0

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every batch size that occurs, in order."""
        if self.start is None:
            return (self.global_batch_size,)
        return tuple(range(self.start, self.global_batch_size, self.increment)) + (self.global_batch_size,)

    def size_at(self, consumed_samples: int) -> int:
        """Batch of the step that starts after `consumed_samples`."""
        if self.start is None or consumed_samples > self.ramp_samples:
            return self.global_batch_size
        num_increments = (self.global_batch_size - self.start) // self.increment
        if num_increments == 0 or self.ramp_samples == 0:
            return self.global_batch_size
        steps = int(consumed_samples / (self.ramp_samples / num_increments))
        return min(self.start + steps * self.increment, self.global_batch_size)

    def samples_after(self, iterations: int) -> int:
        """Samples consumed by the first `iterations` steps."""
        consumed = 0
        for iteration in range(iterations):
            size = self.size_at(consumed)
            if size == self.global_batch_size and (self.start is None or consumed > self.ramp_samples):
                return consumed + (iterations - iteration) * size
            consumed += size
        return consumed

    def iterations_for(self, samples: int) -> int:
        """Steps that fit into `samples`; a last step that would need more samples is not made."""
        consumed = iterations = 0
        while self.start is not None and consumed <= self.ramp_samples:
            size = self.size_at(consumed)
            if consumed + size > samples:
                return iterations
            consumed += size
            iterations += 1
        return iterations + (samples - consumed) // self.global_batch_size
