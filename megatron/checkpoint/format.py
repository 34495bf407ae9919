"""The on-disk format: names, the index of one rank's data file, and the manifest that makes a checkpoint one.

    DIR/latest_checkpointed_iteration.txt     a hint for people and scripts; the loader trusts manifests
    DIR/iter_0000120/manifest.json            written last: its presence means complete
                     rank_00003.data          raw little-endian items, one after another, each aligned to 64 bytes
                     rank_00003.json          where each item lies and the CRC-32 of each of its blocks
    DIR/iter_0000120.tmp-<nonce>/             being written, or left by a killed save
    DIR/iter_0000120.old-<nonce>/             what a second save of the same iteration replaces, for the moment of the
    swap DIR/.trash/                               being deleted

An item is a box of a global tensor, stored contiguously. Checksums are per block of BLOCK_BYTES so that a reader that
needs a few rows verifies exactly what it reads. Nothing is pickled. No torch here.
"""

from __future__ import annotations

import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from megatron.checkpoint.boxes import Box

VERSION = 1
MANIFEST = "manifest.json"
TRACKER = "latest_checkpointed_iteration.txt"
TRASH = ".trash"
BLOCK_BYTES = 1 << 20
ALIGNMENT = 64


class CheckpointError(Exception):
    """A checkpoint could not be written or read; the message names the path and the reason."""


class CheckpointNotFound(CheckpointError, ValueError):
    """What --load, --ckpt-step or --pretrained-checkpoint asks for is not there."""


class CheckpointMismatch(CheckpointError, ValueError):
    """The checkpoint is sound but does not hold what this model asks for."""


class CheckpointDamaged(CheckpointError, OSError):
    """A file is missing, short, or fails its checksum."""


def step_name(iteration: int) -> str:
    """Directory name of an iteration, as Megatron spells it."""
    return f"iter_{iteration:07d}"


def data_name(rank: int) -> str:
    """Name of a rank's data file."""
    return f"rank_{rank:05d}.data"


def index_name(rank: int) -> str:
    """Name of a rank's index file."""
    return f"rank_{rank:05d}.json"


@dataclass(frozen=True, kw_only=True)
class Item:
    """One stored box."""

    name: str
    dtype: str
    """Torch's name without the prefix: "bfloat16"."""
    shape: tuple[int, ...]
    """Global shape, without padding."""
    box: Box
    at: int
    """First byte in the data file."""
    nbytes: int
    crc: tuple[int, ...]
    """CRC-32 of each `block` bytes of the item."""
    block: int
    file: str = ""
    """Data file, relative to the checkpoint."""

    def to_json(self) -> dict[str, Any]:
        """The index entry."""
        return {
            "name": self.name,
            "dtype": self.dtype,
            "shape": self.shape,
            "offset": self.box.offset,
            "size": self.box.size,
            "at": self.at,
            "nbytes": self.nbytes,
            "crc": self.crc,
            "block": self.block,
        }

    @classmethod
    def from_json(cls, entry: dict[str, Any], file: str) -> Item:
        """Inverse of `to_json`."""
        return cls(
            name=entry["name"],
            dtype=entry["dtype"],
            shape=tuple(entry["shape"]),
            box=Box(tuple(entry["offset"]), tuple(entry["size"])),
            at=entry["at"],
            nbytes=entry["nbytes"],
            crc=tuple(entry["crc"]),
            block=entry["block"],
            file=file,
        )


@dataclass(frozen=True, kw_only=True)
class RankFiles:
    """What one rank wrote, as it reports it to rank 0."""

    rank: int
    data: str
    data_bytes: int
    index: str
    index_bytes: int
    index_crc: int


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything about a checkpoint but its tensors."""

    iteration: int
    sequence: int
    """Counts the saves of a directory: after going back to an older step, the newest save is still the newest."""
    ranks: tuple[RankFiles, ...]
    scalars: dict[str, Any] = field(default_factory=dict)
    """Consumed samples, schedules, loss scale: JSON values."""
    config: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    """Mesh sizes of the run that wrote it; for people, the reader does not need it."""
    version: int = VERSION

    @property
    def nbytes(self) -> int:
        """Bytes of all data and index files."""
        return sum(files.data_bytes + files.index_bytes for files in self.ranks)

    def dumps(self) -> bytes:
        """JSON whose last field is the CRC-32 of the rest."""
        body = asdict(self)
        return json.dumps({**body, "crc": _crc_of(body)}, indent=1).encode()

    @classmethod
    def loads(cls, text: bytes) -> Manifest:
        """Inverse of `dumps`; ValueError when it was changed or cut, or is of a newer version."""
        body = json.loads(text)
        if not isinstance(body, dict) or "version" not in body:
            raise ValueError("not a manifest of this program")
        if body["version"] > VERSION:
            raise ValueError(f"format version {body['version']} is newer than this program reads ({VERSION})")
        crc = body.pop("crc", None)
        if crc != _crc_of(body):
            raise ValueError("checksum mismatch")
        ranks = tuple(RankFiles(**files) for files in body.pop("ranks"))
        return cls(**body, ranks=ranks)


def _crc_of(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(json.loads(json.dumps(body)), sort_keys=True).encode())


def fsync_directory(path: str | Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_durably(path: str | Path, content: bytes) -> None:
    """Create or replace a file so that a reader sees the old content or the new, whatever dies when."""
    path = Path(path)
    beside = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        write_all(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.replace(beside, path)
    fsync_directory(path.parent)


def write_all(fd: int, content: bytes | memoryview) -> None:
    """os.write until all of it is written."""
    view = memoryview(content)
    while view:
        view = view[os.write(fd, view) :]
