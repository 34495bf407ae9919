"""When each op of a schedule would run, given what an op costs: makespan, bubble and live activations per rank.

A rank does its ops in order; an op starts when the rank is free and what it needs has arrived. Messages take
`message_s` from the end of the op that makes them; a schedule's own send and receive ops are not priced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from megatron.schedules.ops import BACKWARD, FORWARD, INPUT_GRAD, WEIGHT_GRAD, Key, Op, Schedule, ScheduleError

Cost = Callable[[int, Op], float]
"""(rank, op) -> seconds."""

UNIT_COST: Mapping[str, float] = {FORWARD: 1.0, BACKWARD: 2.0, INPUT_GRAD: 1.0, WEIGHT_GRAD: 1.0}
"""Of one chunk: a backward is two forwards."""


class Span(NamedTuple):
    """An op and when it runs."""

    op: Op
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """`spans[r]` in the order rank r runs them."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]

    @cached_property
    def makespan(self) -> float:
        """From the first op's start to the last one's end, over all ranks."""
        return max(spans[-1].end for spans in self.spans if spans)

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Seconds each rank computes."""
        return tuple(sum(span.end - span.start for span in spans) for spans in self.spans)

    @cached_property
    def bubble(self) -> float:
        """Share of all ranks' time that is idle, 0 to 1."""
        return 1 - sum(self.busy) / (len(self.spans) * self.makespan)

    @cached_property
    def peak_live(self) -> tuple[int, ...]:
        """Most (microbatch, chunk) pairs of each rank whose activations are held at once; 1 where nothing is kept."""
        return tuple(_peak_live(spans, self.schedule) for spans in self.spans)


def simulate(schedule: Schedule, cost: Cost | Mapping[str, float] = UNIT_COST, message_s: float = 0.0) -> Simulation:
    """Run the schedule on paper, in time proportional to its ops. Raises ScheduleError on a deadlock."""
    price: Cost = cost if callable(cost) else lambda rank, op: cost[op.kind]
    compute = schedule.compute_only()
    spans: list[list[Span]] = [[] for _ in compute.ranks]
    ready_at: dict[Key, tuple[int, float]] = {}
    parked: defaultdict[Key, list[int]] = defaultdict(list)
    runnable = list(range(compute.num_stages))
    while runnable:
        rank = runnable.pop()
        ops = compute.ranks[rank]
        while len(spans[rank]) < len(ops):
            op = ops[len(spans[rank])]
            needs = compute.needs(rank, op)
            missing = next((key for key in needs if key not in ready_at), None)
            if missing is not None:
                parked[missing].append(rank)
                break
            start = spans[rank][-1].end if spans[rank] else 0.0
            for key in needs:
                maker, end = ready_at[key]
                start = max(start, end if maker == rank else end + message_s)
            end = start + price(rank, op)
            spans[rank].append(Span(op, start, end))
            result = compute.result(rank, op)
            if result is not None:
                ready_at[result] = (rank, end)
                runnable.extend(parked.pop(result, ()))
    stuck = [(rank, len(spans[rank])) for rank, ops in enumerate(compute.ranks) if len(spans[rank]) < len(ops)]
    if stuck:
        from_rank = ", ".join(f"rank {rank} waits at {compute.ranks[rank][index]}" for rank, index in stuck)
        raise ScheduleError(f"the schedule deadlocks: {from_rank}")
    return Simulation(schedule, tuple(map(tuple, spans)))


def _peak_live(spans: tuple[Span, ...], schedule: Schedule) -> int:
    if schedule.is_forward_only:
        return 1
    splits = {(span.op.microbatch, span.op.chunk) for span in spans if span.op.kind == WEIGHT_GRAD}
    live = peak = 0
    for op in (span.op for span in spans):
        live += op.kind == FORWARD
        peak = max(peak, live)
        live -= op.kind == WEIGHT_GRAD or (op.kind == BACKWARD and (op.microbatch, op.chunk) not in splits)
    return peak
