"""Saving: all ranks write beside, all ranks agree, one rank makes it visible by a rename.

Order: room on the disk is checked; every rank writes and fsyncs its files in iter_N.tmp-<nonce>; every rank's success
or error reaches every rank; rank 0 checks that it sees all files, writes manifest.json, fsyncs, renames to iter_N,
fsyncs the parent; then the tracker; then older steps are pruned. A process may die at any point: what is not complete
is invisible.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from megatron.checkpoint.catalog import list_steps
from megatron.checkpoint.format import (
    MANIFEST,
    TRACKER,
    CheckpointError,
    Manifest,
    RankFiles,
    fsync_directory,
    step_name,
    write_durably,
)
from megatron.checkpoint.pieces import Piece
from megatron.checkpoint.retention import Retention, discard, prune
from megatron.checkpoint.writer import planned_bytes, write_rank
from megatron.distributed.collectives import all_gather_object, broadcast_object
from megatron.distributed.context import ParallelContext

HEADROOM = 1.2
"""Free space asked for, as a multiple of what will be written."""


def save_checkpoint(
    directory: str | Path,
    iteration: int,
    ctx: ParallelContext,
    pieces: Iterable[Piece],
    *,
    scalars: dict[str, Any],
    config: dict[str, Any],
    rank_state: dict[str, Any] | None = None,
    retention: Retention | None = None,
    log: Callable[[str], None] = print,
) -> Path:
    """Write iteration `iteration` into `directory`; called by every rank with its own `pieces` and `rank_state`.

    `scalars`, `config` (rank 0's are stored) and `rank_state` (every rank's) are JSON values. Returns the checkpoint's
    path once it is complete and durable. CheckpointError, on every rank and with the text of each rank that failed,
    leaves `directory` as it was. A complete step of the same iteration is replaced, and stays until the new one has its
    name.
    """
    pieces = list(pieces)
    temporary = Path(_together(ctx, lambda sizes: _open(Path(directory), iteration, sum(sizes)), planned_bytes(pieces)))
    try:
        report: RankFiles | str = write_rank(temporary, ctx.rank, pieces, rank_state or {})
    except Exception as error:
        report = f"rank {ctx.rank}: {type(error).__name__}: {error}"

    def conclude(reports: list[RankFiles | str]) -> str:
        failures = [text for text in reports if isinstance(text, str)]
        if failures:
            shutil.rmtree(temporary, ignore_errors=True)
            raise CheckpointError("; ".join(failures))
        try:
            manifest = _manifest(directory, iteration, reports, ctx, scalars, config)
            final = commit(temporary, manifest)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        try:
            for step in prune(final.parent, retention or Retention()):
                log(f"deleted checkpoint {step.path} (superseded by iteration {iteration})")
        except OSError as error:  # the new checkpoint is safe, and the next save tries again
            log(f"WARNING: could not delete older checkpoints of {final.parent}: {error}")
        return str(final)

    try:
        return Path(_together(ctx, conclude, report))
    except CheckpointError as error:
        raise CheckpointError(f"saving iteration {iteration} to {directory} failed: {error}") from None


def _together(ctx: ParallelContext, act: Callable[[list[Any]], str], mine: Any) -> str:
    """Rank 0 calls `act` with every rank's value; its answer, or its error as CheckpointError, reaches every rank."""
    values = all_gather_object(mine, ctx.world)
    answer, failure = "", ""
    if ctx.rank == 0:
        try:
            answer = act(values)
        except CheckpointError as error:
            failure = str(error)
        except Exception as error:
            failure = f"rank 0: {type(error).__name__}: {error}"
    answer, failure = broadcast_object((answer, failure), ctx.world)
    if failure:
        raise CheckpointError(failure)
    return answer


def _open(directory: Path, iteration: int, nbytes: int) -> str:
    """A new empty directory to write into, on a disk with room for it."""
    directory.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(directory).free
    if free < HEADROOM * nbytes:
        raise CheckpointError(
            f"saving iteration {iteration} to {directory} needs {_readable(HEADROOM * nbytes)} free "
            f"({_readable(nbytes)} to write), the disk has {_readable(free)}"
        )
    temporary = directory / f"{step_name(iteration)}.tmp-{secrets.token_hex(4)}"
    temporary.mkdir()
    return str(temporary)


def _readable(nbytes: float) -> str:
    return f"{nbytes / 1e9:.2f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.2f} MB"


def _manifest(
    directory: str | Path,
    iteration: int,
    reports: list[RankFiles],
    ctx: ParallelContext,
    scalars: dict[str, Any],
    config: dict[str, Any],
) -> Manifest:
    complete = list_steps(directory).complete
    mesh = ctx.mesh
    return Manifest(
        iteration=iteration,
        sequence=1 + max((step.manifest.sequence for step in complete), default=0),
        ranks=tuple(reports),
        scalars=scalars,
        config=config,
        layout={"tp": mesh.tp, "cp": mesh.cp, "dp": mesh.dp, "pp": mesh.pp, "order": mesh.order},
    )


def commit(temporary: Path, manifest: Manifest) -> Path:
    """Make a fully written directory the checkpoint of its iteration, durably; returns its final path."""
    for files in manifest.ranks:
        for name, nbytes in ((files.data, files.data_bytes), (files.index, files.index_bytes)):
            found = (temporary / name).stat().st_size if (temporary / name).exists() else None
            if found != nbytes:
                raise CheckpointError(
                    f"{temporary / name} of rank {files.rank} has {found} bytes seen from rank 0, {nbytes} were "
                    "written; --save must be on storage that all nodes share"
                )
    write_durably(temporary / MANIFEST, manifest.dumps())
    parent, nonce = temporary.parent, temporary.name.rpartition("-")[2]
    final = parent / step_name(manifest.iteration)
    old = parent / f"{final.name}.old-{nonce}"
    if final.exists():
        os.rename(final, old)
        try:
            os.rename(temporary, final)
        except OSError:
            os.rename(old, final)
            raise
    else:
        os.rename(temporary, final)
    fsync_directory(parent)
    write_durably(parent / TRACKER, f"{manifest.iteration}\n".encode())
    if old.exists():
        discard(old)
    return final
