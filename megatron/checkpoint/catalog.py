"""Which checkpoints a directory holds: complete, damaged, half-written; and the one that a --load asks for.

Reads names and manifests only; needs neither torch nor a process group, so a launcher or --use-checkpoint-args can call
it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.checkpoint.format import (
    MANIFEST,
    TRACKER,
    CheckpointDamaged,
    CheckpointNotFound,
    Item,
    Manifest,
    RankFiles,
    step_name,
)

STEP = re.compile(r"iter_(\d{7,})(\.old-\w+)?")


@dataclass(frozen=True)
class Step:
    """A complete checkpoint: its manifest is sound and all its files are there with their right sizes."""

    path: Path
    manifest: Manifest

    @property
    def iteration(self) -> int:
        """The iteration after which it was written."""
        return self.manifest.iteration


@dataclass(frozen=True)
class Listing:
    """What a directory holds."""

    complete: tuple[Step, ...]
    """Newest save first."""
    broken: tuple[tuple[Path, str], ...]
    """Steps that cannot be used, and why."""


def open_step(path: str | Path) -> Step:
    """The step at `path`; CheckpointDamaged with file and reason when it is not complete."""
    path = Path(path)
    try:
        manifest = Manifest.loads((path / MANIFEST).read_bytes())
    except FileNotFoundError:
        raise CheckpointDamaged(f"{path}: no {MANIFEST}, so this save never completed") from None
    except (ValueError, TypeError, KeyError, OSError) as error:
        raise CheckpointDamaged(f"{path / MANIFEST}: {error}") from None
    for files in manifest.ranks:
        _check_size(path / files.index, files.index_bytes, "")
        if not _has_size(path / files.data, files.data_bytes):
            _check_size(path / files.data, files.data_bytes, _first_lost(path, files))
    return Step(path, manifest)


def read_index(path: Path, files: RankFiles) -> tuple[list[Item], dict]:
    """The verified items and rank state of one rank's index file."""
    try:
        text = (path / files.index).read_bytes()
    except OSError as error:
        raise CheckpointDamaged(f"{path / files.index}: {error.strerror}") from None
    if zlib.crc32(text) != files.index_crc:
        raise CheckpointDamaged(f"{path / files.index}: checksum mismatch in the index of rank {files.rank}")
    index = json.loads(text)
    return [Item.from_json(entry, files.data) for entry in index["items"]], index["state"]


def _has_size(path: Path, nbytes: int) -> bool:
    try:
        return path.stat().st_size == nbytes
    except OSError:
        return False


def _check_size(path: Path, nbytes: int, lost: str) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise CheckpointDamaged(f"{path}: {error.strerror}{lost}") from None
    if found != nbytes:
        raise CheckpointDamaged(f"{path}: {found} bytes, the manifest says {nbytes}{lost}")


def _first_lost(path: Path, files: RankFiles) -> str:
    """The first parameter that a short or missing data file no longer holds, for the message."""
    try:
        items, _ = read_index(path, files)
        found = (path / files.data).stat().st_size if (path / files.data).exists() else 0
    except (CheckpointDamaged, OSError, ValueError, KeyError):
        return ""
    lost = [item.name for item in items if item.at + item.nbytes > found]
    return f"; lost: {lost[0]}" + (f" and {len(lost) - 1} more" if len(lost) > 1 else "") if lost else ""


def list_steps(directory: str | Path) -> Listing:
    """All steps of `directory`, the newest save first (by the order of saves, not by iteration number)."""
    complete, broken = [], []
    for entry in sorted(Path(directory).iterdir()):
        match = STEP.fullmatch(entry.name)
        if not match or not entry.is_dir():
            continue
        if match[2] and (entry.parent / step_name(int(match[1]))).exists():
            continue  # an old version whose replacement is in place
        try:
            complete.append(open_step(entry))
        except CheckpointDamaged as error:
            broken.append((entry, str(error)))
    complete.sort(key=lambda step: (step.manifest.sequence, step.iteration), reverse=True)
    return Listing(tuple(complete), tuple(broken))


def read_tracker(directory: str | Path) -> int | None:
    """The iteration the tracker file names; None when there is none or it holds no number."""
    try:
        return int((Path(directory) / TRACKER).read_text().strip())
    except (OSError, ValueError):
        return None


def find_checkpoint(
    load: str | Path,
    *,
    ckpt_step: int | None = None,
    required: bool = False,
    flag: str = "--load",
    log: Callable[[str], None] = print,
) -> list[Step]:
    """The usable checkpoints of a --load in the order in which to try them; empty for a start from scratch.

    `load` is a directory of checkpoints, or one iter_* directory itself. With `ckpt_step` the answer is that step or
    CheckpointNotFound / CheckpointDamaged: one who asks for a step never gets another. Without, it is every complete
    step, the newest save first. An existing directory without any checkpoint means a start from scratch, said in one
    line, or CheckpointNotFound when `required` (--exit-on-missing-checkpoint, --finetune, --pretrained-checkpoint). A
    path that does not exist, a tracker that names an absent step, a model of another program, or nothing but damaged
    steps is always an error.
    """
    load = Path(load)
    if not load.exists():
        raise CheckpointNotFound(
            f"{flag} {load}: no such directory; correct the path, or leave {flag} out to start anew"
        )
    if not load.is_dir():
        raise CheckpointNotFound(f"{flag} {load}: not a directory")
    if (load / MANIFEST).exists():
        return [_wanted(open_step(load), ckpt_step, flag)]
    if ckpt_step is not None:
        return [_explicit_step(load, ckpt_step, flag)]
    listing = list_steps(load)
    for path, reason in listing.broken:
        log(f"WARNING: skipping damaged checkpoint {path.name}: {reason}")
    if listing.complete:
        _check_tracker(load, listing, flag, log)
        return list(listing.complete)
    if listing.broken:
        reasons = "; ".join(reason for _, reason in listing.broken)
        raise CheckpointNotFound(f"{flag} {load}: no complete checkpoint ({foreign(load) or reasons})")
    kind = foreign(load)
    if kind:
        raise CheckpointNotFound(f"{flag} {load}: {kind}; {flag} reads checkpoints that this program wrote")
    tracked = read_tracker(load)
    if tracked is not None:
        raise CheckpointNotFound(
            f"{flag} {load}: {TRACKER} names iteration {tracked}, but {load / step_name(tracked)} is not there"
        )
    if required:
        raise CheckpointNotFound(f"{flag} {load}: the directory holds no checkpoint, and one is required")
    inner = min((entry for entry in load.iterdir() if (entry / TRACKER).exists()), default=None)
    hint = f" ({inner} holds one: was that meant?)" if inner else ""
    log(f"NO CHECKPOINT in {flag} {load}{hint}: STARTING FROM SCRATCH with newly initialised weights")
    return []


def _wanted(step: Step, ckpt_step: int | None, flag: str) -> Step:
    if ckpt_step not in (None, step.iteration):
        raise CheckpointNotFound(f"--ckpt-step {ckpt_step}: {flag} {step.path} holds iteration {step.iteration}")
    return step


def _explicit_step(load: Path, ckpt_step: int, flag: str) -> Step:
    path = load / step_name(ckpt_step)
    if path.exists():
        return open_step(path)
    for step in list_steps(load).complete:  # a swap interrupted between its two renames
        if step.iteration == ckpt_step:
            return step
    present = sorted(step.iteration for step in list_steps(load).complete)
    raise CheckpointNotFound(
        f"--ckpt-step {ckpt_step}: no {path}; complete steps in {flag} {load}: {present or 'none'}"
    )


def _check_tracker(load: Path, listing: Listing, flag: str, log: Callable[[str], None]) -> None:
    tracked, newest = read_tracker(load), listing.complete[0]
    if tracked is None or tracked == newest.iteration:
        return
    names = [step.path.name for step in listing.complete] + [path.name for path, _ in listing.broken]
    if not any(name.split(".")[0] == step_name(tracked) for name in names):
        raise CheckpointNotFound(
            f"{flag} {load}: {TRACKER} names iteration {tracked}, but {load / step_name(tracked)} is not there; "
            f"choose one of the complete steps with --ckpt-step {newest.iteration}, or remove {TRACKER}"
        )
    log(
        f"{TRACKER} in {load} names iteration {tracked}; the newest complete save is iteration {newest.iteration}, "
        f"which is tried first (--ckpt-step {tracked} selects the other)"
    )


def foreign(directory: Path) -> str:
    """What kind of another program's model a directory is, or ""."""
    names = {entry.name for entry in directory.iterdir()}
    weights = any(name.endswith((".safetensors", ".safetensors.index.json")) for name in names)
    if "config.json" in names and (weights or any(n.startswith(("pytorch_model", "tokenizer")) for n in names)):
        return "this is a Hugging Face model directory"
    if weights:
        return "this is a directory of safetensors files"
    steps = [directory, *(entry for entry in directory.iterdir() if entry.name.startswith(("iter_", "release")))]
    for step in steps:
        inside = {entry.name for entry in step.iterdir()} if step.is_dir() else set()
        if any(name.startswith("mp_rank_") for name in inside) or {".metadata", "common.pt"} & inside:
            return "this is a Megatron-LM checkpoint"
    return ""
