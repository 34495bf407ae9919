"""Passes over schedules: add the messages between ranks, and check that a schedule is complete and cannot deadlock."""

from __future__ import annotations

from collections import Counter

from megatron.schedules.ops import (
    BACKWARD,
    COMM_KINDS,
    COMPUTE_KINDS,
    FORWARD,
    INPUT_GRAD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    WEIGHT_GRAD,
    Key,
    Location,
    Op,
    Schedule,
    ScheduleError,
)
from megatron.schedules.render import op_grid
from megatron.schedules.simulate import simulate


def add_comm(schedule: Schedule) -> Schedule:
    """Add a SEND after every op whose result another rank needs, and the matching RECV there.

    The ops of all ranks are replayed in the order in which they would start, and a message is appended to both its ends
    at the moment of its op. So every pair of ranks sees its messages in one order, a receive is posted about when its
    sender begins to compute, and running the replay op by op is a proof that no order of blocking sends deadlocks.
    """
    simulation = simulate(schedule)
    ranks: list[list[Op]] = [[] for _ in schedule.ranks]
    starts = sorted(
        # of ops that start together, the one whose message travels first along the pipeline comes first
        (span.start, rank if span.op.kind == FORWARD else -rank, rank, index)
        for rank, spans in enumerate(simulation.spans)
        for index, span in enumerate(spans)
    )
    for _, _, rank, index in starts:
        op = simulation.spans[rank][index].op
        ranks[rank].append(op)
        if op.kind == FORWARD:
            to, send, receive = schedule.next_location(rank, op.chunk), SEND_F, RECV_F
        elif op.kind in (BACKWARD, INPUT_GRAD):
            to, send, receive = schedule.previous_location(rank, op.chunk), SEND_B, RECV_B
        else:
            continue
        if to is not None and to.rank != rank:
            ranks[rank].append(Op(send, op.microbatch, op.chunk, to.rank))
            ranks[to.rank].append(Op(receive, op.microbatch, to.chunk, rank))
    return Schedule(tuple(map(tuple, ranks)), schedule.num_chunks, schedule.num_microbatches, schedule.placement)


def check(schedule: Schedule) -> None:
    """Raise ScheduleError, with the grid and the offending op marked, unless the schedule is right:

    every virtual stage runs every microbatch forward once and backward once (B, or I then W; or nothing backward at
    all), a backward after its forward, no rank waits for ever; and if there are messages: each result that another
    rank needs is sent once, after it is made, received once, before it is used, and the ranks finish even if a send
    blocks until its receive is reached.
    """
    if sorted(schedule.placement) != sorted(
        Location(rank, chunk) for rank in range(schedule.num_stages) for chunk in range(schedule.num_chunks)
    ):
        raise ScheduleError("the placement must name every (rank, chunk) once")
    for rank in range(schedule.num_stages):
        _check_rank(schedule, rank)
    _check_compute_progress(schedule)
    if any(op.kind in COMM_KINDS for ops in schedule.ranks for op in ops):
        for rank in range(schedule.num_stages):
            _check_messages_of_rank(schedule, rank)
        _check_rendezvous(schedule)


def _fail(schedule: Schedule, rank: int, index: int, why: str) -> None:
    ops = schedule.ranks[rank]
    where = f"at {ops[index]}, op {index}" if index < len(ops) else "at its end"
    grid = op_grid(schedule, mark=(rank, index))
    raise ScheduleError(f"schedule of {schedule.num_stages} ranks, rank {rank} {where}: {why}\n{grid}")


def _check_rank(schedule: Schedule, rank: int) -> None:
    """Every op once, in an order that makes sense on this rank alone."""
    seen: set[tuple[str, int, int]] = set()
    for index, op in enumerate(schedule.ranks[rank]):
        if op.kind not in COMPUTE_KINDS:
            continue
        unit = (op.microbatch, op.chunk)
        if not (0 <= op.microbatch < schedule.num_microbatches and 0 <= op.chunk < schedule.num_chunks):
            _fail(schedule, rank, index, "no such microbatch or chunk")
        if (op.kind, *unit) in seen:
            _fail(schedule, rank, index, "the op is there twice")
        if op.kind == BACKWARD and (INPUT_GRAD, *unit) in seen or op.kind == INPUT_GRAD and (BACKWARD, *unit) in seen:
            _fail(schedule, rank, index, "B and I both compute the input gradient; use B, or I and W")
        if op.kind in (BACKWARD, INPUT_GRAD) and (FORWARD, *unit) not in seen:
            _fail(schedule, rank, index, "the backward comes before its forward")
        if op.kind == WEIGHT_GRAD and (INPUT_GRAD, *unit) not in seen:
            _fail(schedule, rank, index, "W without an I before it")
        seen.add((op.kind, *unit))
    for microbatch in range(schedule.num_microbatches):
        for chunk in range(schedule.num_chunks):
            kinds = {kind for kind in COMPUTE_KINDS if (kind, microbatch, chunk) in seen}
            wanted = (
                ({FORWARD},) if schedule.is_forward_only else ({FORWARD, BACKWARD}, {FORWARD, INPUT_GRAD, WEIGHT_GRAD})
            )
            if kinds not in wanted:
                _fail(
                    schedule,
                    rank,
                    len(schedule.ranks[rank]),
                    f"microbatch {microbatch} of chunk {chunk} has {sorted(kinds) or 'no ops'}, "
                    f"wanted {' or '.join(str(sorted(kinds)) for kinds in wanted)}",
                )


def _check_compute_progress(schedule: Schedule) -> None:
    """Replay all ranks; an op waits for the results it needs."""
    done: set[Key] = set()
    position = [0] * schedule.num_stages
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ranks):
            while position[rank] < len(ops):
                op = ops[position[rank]]
                if op.kind in COMPUTE_KINDS:
                    if any(key not in done for key in schedule.needs(rank, op)):
                        break
                    done.add(schedule.result(rank, op))
                position[rank] += 1
                moved = True
    for rank, ops in enumerate(schedule.ranks):
        if position[rank] < len(ops):
            missing = [key for key in schedule.needs(rank, ops[position[rank]]) if key not in done]
            text = ", ".join(f"{key.kind}{key.microbatch} of virtual stage {key.virtual_stage}" for key in missing)
            _fail(schedule, rank, position[rank], f"deadlock: it waits for ever for {text}")


def _check_messages_of_rank(schedule: Schedule, rank: int) -> None:
    """Each needed message once, sent after it is made, received before it is used, with the right peer."""
    made: set[tuple[str, int, int]] = set()
    received: set[tuple[str, int, int]] = set()
    sent: Counter[tuple[str, int, int]] = Counter()
    for index, op in enumerate(schedule.ranks[rank]):
        is_forward = op.kind in (FORWARD, SEND_F, RECV_F)
        flow = FORWARD if is_forward else BACKWARD
        unit = (flow, op.microbatch, op.chunk)
        after, before = schedule.next_location(rank, op.chunk), schedule.previous_location(rank, op.chunk)
        target, source = (after, before) if is_forward else (before, after)
        if op.kind in (SEND_F, SEND_B):
            if target is None or target.rank != op.peer or target.rank == rank:
                _fail(schedule, rank, index, "sent to a rank that does not need it")
            if unit not in made or sent[unit]:
                _fail(schedule, rank, index, "sent before it is made, or sent twice")
            sent[unit] += 1
        elif op.kind in (RECV_F, RECV_B):
            if source is None or source.rank != op.peer or source.rank == rank:
                _fail(schedule, rank, index, "received from a rank that does not make it")
            if unit in received or unit in made:
                _fail(schedule, rank, index, "received twice, or after its use")
            received.add(unit)
        elif op.kind != WEIGHT_GRAD:
            if source is not None and source.rank != rank and unit not in received:
                _fail(schedule, rank, index, "its input is not received before it")
            made.add(unit)
    for flow, microbatch, chunk in sorted(made):
        target = (schedule.next_location if flow == FORWARD else schedule.previous_location)(rank, chunk)
        if target is not None and target.rank != rank and not sent[flow, microbatch, chunk]:
            _fail(schedule, rank, len(schedule.ranks[rank]), f"the result of {flow}{microbatch}.{chunk} is never sent")


def _check_rendezvous(schedule: Schedule) -> None:
    """Replay with sends and receives that both block until the other end is reached, and must match."""
    position = [0] * schedule.num_stages
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ranks):
            while position[rank] < len(ops):
                op = ops[position[rank]]
                if op.kind in COMM_KINDS:
                    other = schedule.ranks[op.peer]
                    if position[op.peer] == len(other) or other[position[op.peer]] != _other_end(schedule, rank, op):
                        break
                    position[op.peer] += 1
                position[rank] += 1
                moved = True
    for rank, ops in enumerate(schedule.ranks):
        if position[rank] < len(ops):
            _fail(schedule, rank, position[rank], "deadlock: with blocking messages, the other end is never reached")


def _other_end(schedule: Schedule, rank: int, op: Op) -> Op:
    """The op that a message meets on its peer."""
    forwards = op.kind in (SEND_F, RECV_B)
    there = (schedule.next_location if forwards else schedule.previous_location)(rank, op.chunk)
    kind = {SEND_F: RECV_F, RECV_F: SEND_F, SEND_B: RECV_B, RECV_B: SEND_B}[op.kind]
    return Op(kind, op.microbatch, there.chunk, rank)
