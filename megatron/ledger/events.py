"""What a ledger holds: one event a line, in the order in which one process saw them.

An event is a JSON object `{"t", "seq", "inc", "ev", ...}`: seconds since the epoch, a counter within the process, the
incarnation (one life of the job, from launch to exit), the kind, and fields of that kind:

    start {step}            an incarnation begins
    enter {phase, ...}      a phase begins inside the one that was running
    exit  {phase, ...}      that phase ends and the one around it goes on
    loaded {step}           the run continues from the state after `step`; every later step was lost
    durable {step}          the checkpoint of `step` is complete (takes no time)
    stop  {reason, step}    the incarnation ends on purpose

Equal time stamps occur, so `seq` gives the order inside an incarnation. A reader accepts a torn last line: the process
that wrote it died.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

PHASES = ("init", "load", "data", "step", "eval", "save", "log")
KINDS = ("start", "enter", "exit", "loaded", "durable", "stop")


class Event(NamedTuple):
    """One line of a ledger: time stamp (seconds since the epoch), order, incarnation, kind, and its own fields."""

    t: float
    seq: int
    inc: int
    ev: str
    fields: dict

    def line(self) -> str:
        return json.dumps({"t": self.t, "seq": self.seq, "inc": self.inc, "ev": self.ev, **self.fields}) + "\n"


def parse_lines(lines: Iterable[str], source: str = "ledger") -> list[Event]:
    """Events of a ledger file, in their order; raises ValueError naming a line that is none (the last may be torn)."""
    lines = list(lines)
    events = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            event = Event(record.pop("t"), record.pop("seq"), record.pop("inc"), record.pop("ev"), record)
        except (json.JSONDecodeError, KeyError) as error:
            # A process that dies while it writes leaves a part of a line; a restarted one begins on a new line.
            if number == len(lines) or not line.rstrip().endswith("}"):
                continue
            raise ValueError(f"{source}:{number} is not a ledger event ({error}): {line.strip()[:80]}") from error
        if event.ev not in KINDS:
            raise ValueError(f"{source}:{number} has an event of unknown kind {event.ev!r}; known: {', '.join(KINDS)}")
        events.append(event)
    return sorted(events, key=lambda event: (event.inc, event.seq))


def read(path: str | Path) -> list[Event]:
    """Events of one ledger file, ordered by (incarnation, sequence number)."""
    with open(path, encoding="utf-8") as file:
        return parse_lines(file, str(path))
