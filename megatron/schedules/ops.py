"""A pipeline schedule is a value: for every pipeline rank the list of things it does, in order.

The model is cut into virtual stages; `placement[k]` says which (rank, chunk) runs virtual stage k. A generator makes
the compute ops; `passes.add_comm` adds the messages. The text form has a line per rank, `F3.0 SEND_F3.0>1 B0.0`, and
parses back to the same value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FORWARD = "F"
BACKWARD = "B"  # input and weight gradients together
INPUT_GRAD = "I"  # B in two parts: the input gradient, which the stage before waits for ...
WEIGHT_GRAD = "W"  # ... and the weight gradient, for which nobody waits
SEND_F, RECV_F = "SEND_F", "RECV_F"  # hidden states, to the next virtual stage
SEND_B, RECV_B = "SEND_B", "RECV_B"  # their gradients, to the virtual stage before

COMPUTE_KINDS = (FORWARD, BACKWARD, INPUT_GRAD, WEIGHT_GRAD)
COMM_KINDS = (SEND_F, RECV_F, SEND_B, RECV_B)


class Op(NamedTuple):
    """One thing a rank does: `kind` for `microbatch` on its model `chunk`; `peer` is the other rank of a message.

    A message carries the output of (SEND) or the input for (RECV) the op of the same microbatch and chunk.
    """

    kind: str
    microbatch: int
    chunk: int = 0
    peer: int | None = None

    def __str__(self) -> str:
        peer = "" if self.peer is None else f"{'>' if self.kind in (SEND_F, SEND_B) else '<'}{self.peer}"
        return f"{self.kind}{self.microbatch}.{self.chunk}{peer}"


class Location(NamedTuple):
    """Where a virtual stage runs."""

    rank: int
    chunk: int


class Key(NamedTuple):
    """A result that other ops wait for: `kind` F or B (an input gradient, whoever computes it) of a virtual stage."""

    kind: str
    microbatch: int
    virtual_stage: int


class ScheduleError(ValueError):
    """A schedule that is wrong, or an op of one that failed; the message holds the grid with that op marked."""


@dataclass(frozen=True)
class Schedule:
    """`ranks[r]` is the list of ops of pipeline rank r; every (virtual stage, microbatch) runs exactly once."""

    ranks: tuple[tuple[Op, ...], ...]
    num_chunks: int
    num_microbatches: int
    placement: tuple[Location, ...]

    @property
    def num_stages(self) -> int:
        return len(self.ranks)

    @cached_property
    def is_forward_only(self) -> bool:
        return not any(op.kind in (BACKWARD, INPUT_GRAD, WEIGHT_GRAD) for ops in self.ranks for op in ops)

    @cached_property
    def virtual_stage_at(self) -> dict[tuple[int, int], int]:
        """Inverse of `placement`."""
        return {location: k for k, location in enumerate(self.placement)}

    @cached_property
    def _next(self) -> dict[tuple[int, int], Location]:
        return dict(zip(self.placement, self.placement[1:]))

    @cached_property
    def _previous(self) -> dict[tuple[int, int], Location]:
        return dict(zip(self.placement[1:], self.placement))

    def next_location(self, rank: int, chunk: int) -> Location | None:
        """Who takes the output of this chunk; None behind the last virtual stage."""
        return self._next.get((rank, chunk))

    def previous_location(self, rank: int, chunk: int) -> Location | None:
        """Who feeds this chunk; None before the first virtual stage."""
        return self._previous.get((rank, chunk))

    def compute_only(self) -> Schedule:
        """The same schedule without its messages."""
        ranks = tuple(tuple(op for op in ops if op.kind in COMPUTE_KINDS) for ops in self.ranks)
        return Schedule(ranks, self.num_chunks, self.num_microbatches, self.placement)

    def result(self, rank: int, op: Op) -> Key | None:
        """What a compute op makes that others wait for; None for a weight gradient."""
        if op.kind == WEIGHT_GRAD:
            return None
        kind = FORWARD if op.kind == FORWARD else BACKWARD
        return Key(kind, op.microbatch, self.virtual_stage_at[rank, op.chunk])

    def needs(self, rank: int, op: Op) -> tuple[Key, ...]:
        """The results a compute op waits for."""
        k = self.virtual_stage_at[rank, op.chunk]
        if op.kind == FORWARD:
            return (Key(FORWARD, op.microbatch, k - 1),) if k > 0 else ()
        if op.kind == WEIGHT_GRAD:
            return (Key(BACKWARD, op.microbatch, k),)
        own = Key(FORWARD, op.microbatch, k)
        return (own, Key(BACKWARD, op.microbatch, k + 1)) if k + 1 < len(self.placement) else (own,)

    def __str__(self) -> str:
        lines = [" ".join(map(str, ops)) for ops in self.ranks]
        if self.placement != loop_placement(self.num_stages, self.num_chunks):
            lines.insert(0, "# placement " + " ".join(f"{rank}.{chunk}" for rank, chunk in self.placement))
        return "\n".join(lines) + "\n"


def loop_placement(num_stages: int, num_chunks: int) -> tuple[Location, ...]:
    """Megatron's: the virtual stages go round the ranks, chunk by chunk."""
    return tuple(Location(rank, chunk) for chunk in range(num_chunks) for rank in range(num_stages))


_OP = re.compile(r"(?P<kind>[A-Z_]+)(?P<microbatch>\d+)(?:\.(?P<chunk>\d+))?(?:(?P<way>[<>])(?P<peer>\d+))?")


def parse_schedule(text: str) -> Schedule:
    """Inverse of `str(schedule)`. A line per rank; `#` starts a comment; `F3` is `F3.0`; `# placement 0.0 1.0 1.1 0.1`
    names the (rank.chunk) of the virtual stages in model order where they do not simply go round the ranks.

    Raises ValueError naming line and word. Only the spelling is checked here; `passes.check` does the rest.
    """
    ranks: list[tuple[Op, ...]] = []
    placement: tuple[Location, ...] | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        words, _, comment = line.partition("#")
        if comment.split()[:1] == ["placement"]:
            try:
                pairs = [word.split(".") for word in comment.split()[1:]]
                placement = tuple(Location(int(rank), int(chunk)) for rank, chunk in pairs)
            except ValueError:
                raise ValueError(
                    f"schedule line {number}: {comment.strip()!r} is not a placement; "
                    f"write for example '# placement 0.0 1.0'"
                ) from None
        if words.strip():
            ranks.append(tuple(_parse_op(word, number) for word in words.split()))
    if not ranks:
        raise ValueError("a schedule needs a line of ops for every pipeline rank, and there is none")
    num_chunks = 1 + max(op.chunk for ops in ranks for op in ops)
    num_microbatches = 1 + max(op.microbatch for ops in ranks for op in ops)
    expected = loop_placement(len(ranks), num_chunks)
    if placement is not None and sorted(placement) != sorted(expected):
        raise ValueError(f"'# placement' must name each of {len(ranks)} ranks x {num_chunks} chunks once")
    return Schedule(tuple(ranks), num_chunks, num_microbatches, placement or expected)


def _parse_op(word: str, line: int) -> Op:
    match = _OP.fullmatch(word)
    kind = match["kind"] if match else ""
    is_send = kind in (SEND_F, SEND_B)
    way = {">": True, "<": False, None: None}[match["way"]] if match else None
    if (
        not match
        or kind not in COMPUTE_KINDS + COMM_KINDS
        or (way is None) != (kind in COMPUTE_KINDS)
        or way not in (None, is_send)
    ):
        raise ValueError(
            f"schedule line {line}: {word!r} is not an op; write <kind><microbatch>.<chunk> with kind F, B, I or W "
            f"(F3.0), or a message with its peer (SEND_F3.0>1, RECV_B3.0<1)"
        )
    peer = None if match["peer"] is None else int(match["peer"])
    return Op(kind, int(match["microbatch"]), int(match["chunk"] or 0), peer)
