"""Loading on all ranks together: one choice of step, every byte verified, the next older step when one is damaged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from megatron.checkpoint.catalog import Step, find_checkpoint
from megatron.checkpoint.format import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotFound,
    Manifest,
)
from megatron.checkpoint.pieces import Piece
from megatron.checkpoint.reader import Checkpoint
from megatron.distributed.collectives import all_gather_object, broadcast_object
from megatron.distributed.context import ParallelContext


def load_checkpoint(
    load: str | Path,
    ctx: ParallelContext,
    pieces: Iterable[Piece],
    *,
    ckpt_step: int | None = None,
    required: bool = False,
    flag: str = "--load",
    accept: Callable[[Manifest], None] | None = None,
    log: Callable[[str], None] = print,
) -> Checkpoint | None:
    """Fill every rank's `pieces` from the newest sound checkpoint of `load`; None for a start from scratch.

    Which step is tried and what is an error says `catalog.find_checkpoint`. A step in which any rank finds damage is
    given up by all ranks with a warning that names file and parameter, and the next older one is read instead; with
    `ckpt_step` the damage is an error. CheckpointError reaches all ranks with the text of those that failed. `log`
    speaks on rank 0 only. `accept` may refuse a step by raising before anything is read; it decides alike on all ranks.
    """
    pieces = list(pieces)
    say = log if ctx.rank == 0 else _silent
    steps = _choose(load, ctx, ckpt_step=ckpt_step, required=required, flag=flag, log=say)
    for step in steps:
        if accept is not None:
            accept(step.manifest)
        checkpoint, failures, damaged = _read(step, ctx, pieces)
        if not failures:
            return checkpoint
        text = "; ".join(dict.fromkeys(failures))
        if not damaged:
            raise CheckpointMismatch(f"{flag} {load}: {text}")
        if ckpt_step is not None:
            raise CheckpointDamaged(f"{flag} {load} --ckpt-step {ckpt_step}: {text}")
        say(f"WARNING: checkpoint of iteration {step.iteration} is DAMAGED, falling back to the next older one: {text}")
    if steps:
        raise CheckpointDamaged(f"{flag} {load}: every checkpoint there is damaged: {text}")
    return None


def _silent(_: str) -> None:
    return


def _choose(load: str | Path, ctx: ParallelContext, **options) -> list[Step]:
    """Rank 0's answer on every rank, so that no two ranks ever read different steps."""
    found: tuple[list[Step], CheckpointError | None] = ([], None)
    if ctx.rank == 0:
        try:
            found = find_checkpoint(load, **options), None
        except CheckpointError as error:
            found = [], error
        except OSError as error:
            found = [], CheckpointNotFound(f"{options['flag']} {load}: {error}")
    steps, error = broadcast_object(found, ctx.world)
    if error is not None:
        raise error
    return steps


def _read(step: Step, ctx: ParallelContext, pieces: list[Piece]) -> tuple[Checkpoint, list[str], bool]:
    """This rank's part read, and all ranks' failures: their texts, and whether they are damage (else a mismatch)."""
    checkpoint = Checkpoint(step)
    failure: tuple[str, bool] | None = None
    stored: list[str] = []
    try:
        checkpoint.read_into(pieces)
        stored = checkpoint.names("param") if ctx.rank == 0 else []
    except CheckpointMismatch as error:
        failure = str(error), False
    except (CheckpointDamaged, OSError, ValueError, KeyError) as error:
        failure = f"rank {ctx.rank}: {error}", True
    asked = {piece.name for piece in pieces} if ctx.coords.dp == 0 else set()
    reports = all_gather_object((failure, asked, stored), ctx.world)
    failures = [report[0] for report in reports if report[0] is not None]
    unread = sorted(set(reports[0][2]) - set().union(*(report[1] for report in reports)))
    if unread and not failures:
        extra = f"{step.path} holds parameters this model has not ({len(unread)}: {', '.join(unread[:3])}, ...)"
        failures = [(f"{extra}; they would be dropped silently", False)]
    checkpoint.close()
    return checkpoint, [text for text, _ in failures], any(damaged for _, damaged in failures)
