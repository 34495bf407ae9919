"""Writes a ledger: `with ledger.phase("step"):` around the parts of a run.

Phases nest: what a phase does inside another is charged to the inner one only, so at every moment one phase runs
and the phases tile the wall clock. Time comes from the monotonic clock, laid on the wall clock once at the start, so a
clock correction during the run cannot make an interval negative. The same marks feed `listeners` (a heartbeat, a
watchdog): functions that are called with the phase that begins to run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron.ledger.events import PHASES, Event, read


class Ledger:
    """An open ledger. `path=None` keeps phases and listeners and writes nothing: ranks other than the first."""

    def __init__(
        self,
        path: str | Path | None,
        *,
        step: int = 0,
        listeners: Sequence[Callable[[str], None]] = (),
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ):
        self._clock, self._origin = clock, wall() - clock()
        self._running = ["other"]
        self._listeners = tuple(listeners)
        self._seq = 0
        self._file = None
        self.incarnation = 0
        self.seconds: dict[str, float] = {}
        self._since = self._clock()
        if path is not None:
            path = Path(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            torn = False
            if path.exists() and path.stat().st_size:
                self.incarnation = max((event.inc for event in read(path)), default=-1) + 1
                with open(path, "rb") as file:
                    file.seek(-1, os.SEEK_END)
                    torn = file.read(1) != b"\n"
            self._file = open(path, "a", encoding="utf-8")
            if torn:
                self._file.write("\n")
        self._write("start", {"step": step})

    @property
    def running(self) -> str:
        """The phase that time is charged to now."""
        return self._running[-1]

    @contextmanager
    def phase(self, name: str, **fields) -> Iterator[None]:
        """Charge the time inside the block to `name` (one of PHASES), and none of it to the phase around the block."""
        if name not in PHASES:
            raise ValueError(f"ledger phase {name!r} is not one of {', '.join(PHASES)}")
        self._switch("enter", name, fields)
        self._running.append(name)
        self._announce()
        try:
            yield
        finally:
            self._switch("exit", name, fields)
            self._running.pop()
            self._announce()

    def mark(self, kind: str, **fields) -> None:
        """Record an event that takes no time: loaded, durable."""
        self._write(kind, fields)

    def totals(self) -> dict[str, float]:
        """Seconds of this incarnation by phase until now; their sum is the time since the ledger was opened."""
        now = self._clock()
        totals = dict(self.seconds)
        totals[self.running] = totals.get(self.running, 0.0) + now - self._since
        return totals

    def close(self, reason: str, step: int) -> None:
        """End the incarnation on purpose; a ledger without this line belongs to a process that died."""
        self._write("stop", {"reason": reason, "step": step})
        if self._file is not None:
            self._file.close()
            self._file = None

    def _switch(self, kind: str, name: str, fields: dict) -> None:
        now = self._clock()
        self.seconds[self.running] = self.seconds.get(self.running, 0.0) + now - self._since
        self._since = now
        self._write(kind, {"phase": name, **fields}, now)

    def _announce(self) -> None:
        for listener in self._listeners:
            listener(self.running)

    def _write(self, kind: str, fields: dict, now: float | None = None) -> None:
        if self._file is None:
            return
        stamp = round(self._origin + (self._clock() if now is None else now), 6)
        self._file.write(Event(stamp, self._seq, self.incarnation, kind, fields).line())
        self._file.flush()
        self._seq += 1
