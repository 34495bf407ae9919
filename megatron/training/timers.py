"""Host time of the parts of a step, for --timing-log-level: what Megatron calls timers.

Level 0 measures nothing here, level 1 the parts of a step (data, forward-backward, optimizer). On a GPU these are the
times at which the host issued the work, unless the part waits for the device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

OPTIONS = ("max", "minmax", "all")


class Timers:
    """Seconds by name since the last `take`."""

    def __init__(self, level: int = 0):
        self.level = level
        self._seconds: dict[str, float] = {}

    @contextmanager
    def span(self, name: str, level: int) -> Iterator[None]:
        """Add the time of the block to `name` if `level` is measured."""
        if level > self.level:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(name, time.perf_counter() - start, level)

    def add(self, name: str, seconds: float, level: int) -> None:
        """Add `seconds` to `name` if `level` is measured."""
        if level <= self.level:
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def take(self) -> dict[str, float]:
        """The sums, and start anew."""
        taken, self._seconds = self._seconds, {}
        return taken


def timing_lines(by_rank: Sequence[dict[str, float]], steps: int, option: str) -> list[str]:
    """Megatron's block of timings: milliseconds per step over the ranks, by --timing-log-option."""
    titles = {
        "max": "max time across ranks (ms):",
        "minmax": "(min, max) time across ranks (ms):",
        "all": "times across ranks (ms):",
    }
    lines = [titles[option]]
    for name in by_rank[0]:
        values = [1000 * seconds[name] / steps for seconds in by_rank]
        label = (name + " ").ljust(48, ".")
        if option == "max":
            lines.append(f"    {label}: {max(values):.2f}")
        elif option == "minmax":
            lines.append(f"    {label}: ({min(values):.2f}, {max(values):.2f})")
        else:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in enumerate(values)]
    return lines
