"""The global batch size as a function of the samples consumed, and iterations <-> samples under it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal

_NUMBER = r"(\d+\.?\d*|\.\d+)(?:E(\d+))?([KMBT]?)"
_STEP = re.compile(f"{_NUMBER}:{_NUMBER}", re.IGNORECASE)
_UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, kw_only=True)
class BatchSchedule:
    """A constant global batch, one that grows by equal increments over `ramp_samples`, or one that goes by steps."""

    global_batch_size: int
    """The last one."""
    start: int | None = None
    """First batch of a ramp; None: no ramp."""
    increment: int = 1
    ramp_samples: int = 0
    steps: tuple[tuple[int, int], ...] = ()
    """(samples consumed, batch from there on), rising from 0 samples; empty: no steps."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Every batch size that occurs, in order."""
        if self.steps:
            return tuple(size for _, size in self.steps)
        if self.start is None:
            return (self.global_batch_size,)
        return tuple(range(self.start, self.global_batch_size, self.increment)) + (self.global_batch_size,)

    def size_at(self, consumed_samples: int) -> int:
        """Batch of the step that starts after `consumed_samples`."""
        if self.steps:
            return [size for samples, size in self.steps if samples <= consumed_samples][-1]
        if self._is_final(consumed_samples):
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
            if self._is_final(consumed):
                return consumed + (iterations - iteration) * self.global_batch_size
            consumed += self.size_at(consumed)
        return consumed

    def iterations_for(self, samples: int) -> int:
        """Steps that fit into `samples`; a last step that would need more samples is not made."""
        consumed = iterations = 0
        while not self._is_final(consumed):
            size = self.size_at(consumed)
            if consumed + size > samples:
                return iterations
            consumed += size
            iterations += 1
        return iterations + (samples - consumed) // self.global_batch_size

    def _is_final(self, consumed_samples: int) -> bool:
        """Whether the batch stays as it is from here on."""
        if self.steps:
            return consumed_samples >= self.steps[-1][0]
        return self.start is None or consumed_samples > self.ramp_samples


def batch_steps(text: str, seq_length: int) -> tuple[tuple[int, int], ...]:
    """Megatron's "0:768 250B:1536" (from so many tokens on: this batch) as `BatchSchedule.steps`; ValueError.

    Steps are separated by spaces or commas and may come in any order; K, M, B, T stand for 10^3 to 10^12. A threshold
    counts whole samples of `seq_length` tokens.
    """
    steps = []
    for word in text.replace(",", " ").split():
        match = _STEP.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not TOKENS:BATCH, as in 250B:1536")
        parts = match.groups()
        steps.append((_count(*parts[:3]), _count(*parts[3:])))
    steps.sort()
    samples = [tokens // seq_length for tokens, _ in steps]
    if not steps or steps[0][0] != 0:
        raise ValueError("the first step must start at 0 tokens")
    if any(later <= earlier for earlier, later in zip(samples, samples[1:])):
        raise ValueError("the steps must rise, each by at least one sample")
    if any(size < 1 for _, size in steps):
        raise ValueError("a batch must be at least 1")
    return tuple((count, size) for count, (_, size) in zip(samples, steps))


def _count(digits: str, power: str | None, unit: str) -> int:
    return int(Decimal(digits) * 10 ** int(power or 0) * _UNITS[unit.upper()])
