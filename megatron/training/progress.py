"""A progress bar with the time left, on a terminal; elsewhere nothing, because the log lines say it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

BAR_CELLS = 30
REDRAW_SECONDS = 0.1


def clock_text(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03."""
    minutes, second = divmod(int(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}" if hour else f"{minute}:{second:02d}"


class Progress:
    """One bar at the bottom of the terminal. `total` is the last count, `begin` the count it starts from."""

    def __init__(
        self,
        label: str,
        total: int,
        *,
        begin: int = 0,
        is_shown: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.label, self.total, self.begin = label, total, begin
        self.stream = sys.stderr if stream is None else stream
        self.is_shown = is_shown
        self._clock, self._start, self._drawn, self._width = clock, clock(), -1.0, 0

    def update(self, count: int, note: str = "") -> None:
        """Show that `count` of `total` are done, at most ten times a second."""
        now = self._clock()
        if not self.is_shown or (now - self._drawn < REDRAW_SECONDS and count < self.total and self._drawn >= 0):
            return
        self._drawn = now
        share = min(1.0, count / max(self.total, 1))
        full = round(share * BAR_CELLS)
        done, left = count - self.begin, self.total - count
        time_left = clock_text((now - self._start) / done * left) if done > 0 else "?"
        passed = clock_text(now - self._start)
        text = f"{self.label} {'█' * full}{'░' * (BAR_CELLS - full)} {count}/{self.total} {passed}<{time_left} {note}"
        self.stream.write("\r" + text.ljust(self._width))
        self._width = len(text)
        self.stream.flush()

    def clear(self) -> None:
        """Take the bar away so that a line can be printed; the next update draws it again."""
        if self.is_shown and self._width:
            self.stream.write("\r" + " " * self._width + "\r")
            self.stream.flush()
            self._width, self._drawn = 0, -1.0


def wants_bar(choice: str, rank: int, stream: TextIO | None = None) -> bool:
    """Whether --progress-bar `choice` (auto | on | off) shows a bar on this rank: only on the first."""
    stream = sys.stderr if stream is None else stream
    return rank == 0 and (choice == "on" or (choice == "auto" and stream.isatty()))
