"""Host time of the parts of a step, for --timing-log-level: what Megatron calls timers.

Level 0 measures nothing here, level 1 the parts of a step (data, forward-backward, optimizer), level 2 also the ops of
the pipeline schedule. On a GPU these are the times at which the host issued the work, unless the part waits for the
device.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

OPS = {
    "F": "forward-compute",
    "B": "backward-compute",
    "SEND_F": "forward-send",
    "RECV_F": "forward-recv",
    "SEND_B": "backward-send",
    "RECV_B": "backward-recv",
}
TITLES = {
    "max": "max time across ranks (ms):",
    "minmax": "(min, max) time across ranks (ms):",
    "all": "times across ranks (ms):",
}


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

    def record_op(self, op: str, start: float, end: float) -> None:
        """Add the time of one op of the pipeline schedule to its kind (level 2)."""
        kind = op.rstrip("0123456789.<>")
        self.add(OPS.get(kind, kind.lower()), end - start, 2)

    def take(self) -> dict[str, float]:
        """The sums, and start anew."""
        taken, self._seconds = self._seconds, {}
        return taken


def timing_lines(by_rank: Sequence[dict[str, float]], steps: int, option: str) -> list[str]:
    """Megatron's block of timings: milliseconds per step over the ranks, by --timing-log-option.

    A rank that does not do something (the first stage receives no forwards) has no entry for it.
    """
    lines = [TITLES[option]]
    for name in dict.fromkeys(name for seconds in by_rank for name in seconds):
        values = {rank: 1000 * seconds[name] / steps for rank, seconds in enumerate(by_rank) if name in seconds}
        label = (name + " ").ljust(48, ".")
        if option == "max":
            lines.append(f"    {label}: {max(values.values()):.2f}")
        elif option == "minmax":
            lines.append(f"    {label}: ({min(values.values()):.2f}, {max(values.values()):.2f})")
        else:
            lines.append(f"  {name}:")
            lines += [f"     rank {rank:2d}: {value:.2f}" for rank, value in values.items()]
    return lines
