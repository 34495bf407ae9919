"""Signals that ask a run to stop: kept as a flag that the loop reads between steps.

A handler only sets the flag, so a second signal, or one during a save, changes nothing that is under way. SIGTERM and
SIGINT are always handled; --exit-signal-handler adds --exit-signal. Handlers stay until the context ends, after the
process groups are gone: a launcher that signals the remaining ranks once the first has left cannot cut them short.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

STDERR = 2


class StopRequest:
    """Whether somebody asked this process to stop, and by which signal."""

    def __init__(self):
        self.signal_name: str | None = None

    @property
    def is_set(self) -> bool:
        """True from the first signal on."""
        return self.signal_name is not None

    def receive(self, number: int, _frame=None) -> None:
        """The signal handler."""
        first = self.signal_name is None
        self.signal_name = self.signal_name or signal.Signals(number).name
        text = "finishing the step, then saving and leaving" if first else "already stopping"
        # Not print: the handler may run inside one, and the buffer of a stream is not re-entrant.
        os.write(STDERR, f"{signal.Signals(number).name} received: {text}\n".encode())


@contextmanager
def catch_signals(exit_signal: str | None) -> Iterator[StopRequest]:
    """Handle SIGTERM, SIGINT and `exit_signal` (a name or None) inside the block; only the main thread can."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = {signal.SIGTERM, signal.SIGINT}
    if exit_signal is not None:
        numbers.add(signal.Signals[exit_signal])
    former = {number: signal.signal(number, request.receive) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
