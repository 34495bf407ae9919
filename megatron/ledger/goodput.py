"""Events to an account: every second of the wall clock belongs to exactly one category.

    productive   training steps whose result the run still has
    warmup       the first step of an incarnation (allocation, compilation, cold caches)
    lost         steps undone because a later incarnation continued from an earlier one
    data         waiting for the next batch        save | load | eval | init | log    the phases of these names
    down         from the last event of an incarnation to the start of the next one (detection, rescheduling, launch)
    other        what no phase claims

An interval between two neighbouring events is charged to the phase that ran in it; the intervals tile the time from the
first event to the last, so the categories sum to the wall clock (asserted on every account). Goodput is productive
time over wall time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from megatron.ledger.events import Event

CATEGORIES = ("productive", "warmup", "lost", "data", "save", "load", "eval", "init", "log", "down", "other")


class Interval(NamedTuple):
    """A span of wall time (seconds since the epoch) and the category it is charged to; `step` where it is a step's."""

    begin: float
    end: float
    category: str
    step: int | None
    inc: int


class Account(NamedTuple):
    """Seconds by category (all of CATEGORIES), and the wall clock they sum to."""

    seconds: dict[str, float]
    wall: float

    @property
    def goodput(self) -> float:
        """Share of the wall clock in productive steps, 0 to 1."""
        return self.seconds["productive"] / self.wall if self.wall > 0 else 0.0

    def render(self) -> str:
        """The account as lines of text, largest category first."""
        rows = sorted(self.seconds.items(), key=lambda row: -row[1])
        lines = [
            f"{name:<12}{seconds:>12.1f} s {100 * seconds / max(self.wall, 1e-9):>6.1f} %"
            for name, seconds in rows
            if seconds
        ]
        return "\n".join([*lines, f"{'wall clock':<12}{self.wall:>12.1f} s", f"goodput {100 * self.goodput:.1f} %"])


def tile(events: Iterable[Event]) -> list[Interval]:
    """Intervals between neighbouring events, `lost` steps not yet told from the productive ones.

    Events may come in any order. A time stamp before its predecessor's (two machines, a corrected clock) is moved up to
    it: the order is (incarnation, sequence number), never the clock.
    """
    intervals: list[Interval] = []
    stack: list[tuple[str, int | None]] = []
    previous, incarnation, first_step = None, None, None
    for event in sorted(events, key=lambda event: (event.inc, event.seq)):
        now = event.t if previous is None else max(event.t, previous)
        if event.inc != incarnation:
            if incarnation is not None:
                intervals.append(Interval(previous, now, "down", None, event.inc))
            incarnation, stack, first_step = event.inc, [], None
        elif now > previous:
            phase, step = stack[-1] if stack else ("other", None)
            category = phase
            if phase == "step":
                category = "warmup" if step == first_step else "productive"
            intervals.append(Interval(previous, now, category, step, event.inc))
        if event.ev == "enter":
            if event.fields["phase"] == "step" and first_step is None:
                first_step = event.fields.get("step")
            stack.append((event.fields["phase"], event.fields.get("step")))
        elif event.ev == "exit" and stack:
            stack.pop()
        previous = now
    return intervals


def account(events: Iterable[Event]) -> Account:
    """The account of a whole ledger, also of a run that is still going on."""
    events = list(events)
    kept = _steps_kept(events)
    intervals = tile(events)
    seconds = dict.fromkeys(CATEGORIES, 0.0)
    for interval in intervals:
        lost = (
            interval.category in ("productive", "warmup")
            and interval.step is not None
            and interval.step > kept[interval.inc]
        )
        seconds["lost" if lost else interval.category] += interval.end - interval.begin
    wall = intervals[-1].end - intervals[0].begin if intervals else 0.0
    total = math.fsum(seconds.values())
    assert abs(total - wall) <= 1e-6 * max(1.0, wall), f"ledger categories sum to {total} s of {wall} s"
    return Account(seconds, wall)


def _steps_kept(events: list[Event]) -> dict[int, float]:
    """For each incarnation the last step whose result no later one undid; a run from scratch has `loaded {step: 0}`."""
    kept: dict[int, float] = {}
    floor = math.inf
    for event in sorted(events, key=lambda event: (event.inc, event.seq), reverse=True):
        kept.setdefault(event.inc, floor)
        if event.ev == "loaded":
            floor = min(floor, event.fields["step"])
    return kept
