"""What is deleted and when: never before its successor is committed, and always by renaming it out of sight first."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.catalog import STEP, Step, list_steps
from megatron.checkpoint.format import TRACKER, TRASH, fsync_directory, step_name

UNFINISHED = re.compile(r"iter_\d{7,}\.tmp-\w+")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which complete steps stay after a save."""

    keep_last: int | None = None
    """The newest this many saves. None: all, or only the newest one where `interval` is given."""
    interval: int | None = None
    """--save-retain-interval: steps at multiples of it always stay."""

    def superseded(self, steps: tuple[Step, ...]) -> list[Step]:
        """Those of `steps` (newest save first) that may go; never the newest."""
        if self.keep_last is None and self.interval is None:
            return []
        keep = max(1, self.keep_last or 1)
        return [step for step in steps[keep:] if not (self.interval and step.iteration % self.interval == 0)]


def discard(path: Path) -> None:
    """Rename a checkpoint into .trash, then delete it there."""
    trash = path.parent / TRASH
    trash.mkdir(exist_ok=True)
    doomed = trash / f"{path.name}-{os.urandom(4).hex()}"
    os.rename(path, doomed)
    fsync_directory(path.parent)
    shutil.rmtree(doomed, ignore_errors=True)


def prune(directory: Path, retention: Retention) -> list[Step]:
    """Delete the superseded steps of `directory`; returns them."""
    if retention == Retention():
        return []
    doomed = retention.superseded(list_steps(directory).complete)
    for step in doomed:
        discard(step.path)
    return doomed


def prepare_save_directory(directory: str | Path, log: Callable[[str], None] = print) -> None:
    """Create --save and clear what a killed run left in it. One rank calls it, once, before the first load or save.

    Half-written saves and half-deleted steps are deleted; a step caught between the two renames of a swap gets its name
    back.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for entry in sorted(directory.iterdir()):
        match = STEP.fullmatch(entry.name)
        if match and match[2]:
            final = directory / step_name(int(match[1]))
            if final.exists():
                discard(entry)
            else:
                os.rename(entry, final)
                log(f"restored {final}: a save that was to replace it was interrupted")
        elif UNFINISHED.fullmatch(entry.name):
            log(f"deleting {entry}: left by an interrupted save")
            discard(entry)
        elif entry.name.startswith(f"{TRACKER}.tmp-"):
            entry.unlink()
    shutil.rmtree(directory / TRASH, ignore_errors=True)
