"""One rank's data and index files: large sequential writes from the tensors' own memory, a checksum for every block.

Needs no process group and no context, so that the same code can run in a background process over copied buffers.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.format import (
    ALIGNMENT,
    BLOCK_BYTES,
    Item,
    RankFiles,
    data_name,
    fsync_directory,
    index_name,
    write_all,
)
from megatron.checkpoint.pieces import Part, Piece

WRITE_BYTES = 16 << 20
"""Small items are collected to writes of about this size; larger ones are written from their own memory."""


def dtype_name(dtype: torch.dtype) -> str:
    """ "bfloat16" for torch.bfloat16."""
    return str(dtype).removeprefix("torch.")


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """The bytes of a tensor, row-major, as a flat uint8 array: its own memory where it is contiguous on the CPU."""
    return tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()


def planned_bytes(pieces: Iterable[Piece]) -> int:
    """Bytes of the data file that `write_rank` would write, alignment aside."""
    return sum(part.view.numel() * part.view.element_size() for piece in pieces for part in piece.written())


class _DataFile:
    """A new file written front to back."""

    def __init__(self, path: Path):
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        self.pending = bytearray()
        self.size = 0

    def append(self, content: np.ndarray) -> int:
        """Write `content` at the next aligned byte; returns that byte."""
        gap = -self.size % ALIGNMENT
        self.pending += bytes(gap)
        at = self.size + gap
        self.size = at + content.nbytes
        if content.nbytes < WRITE_BYTES // 4:
            self.pending += content.data
        else:
            self.flush()
            write_all(self.fd, content.data)
        if len(self.pending) >= WRITE_BYTES:
            self.flush()
        return at

    def flush(self) -> None:
        """Hand what was collected to the system."""
        if self.pending:
            write_all(self.fd, bytes(self.pending))
            self.pending.clear()


def write_rank(directory: str | Path, rank: int, pieces: Iterable[Piece], state: dict[str, Any]) -> RankFiles:
    """Write what this rank owns of `pieces` and its own JSON `state` into two new files of `directory`, durably."""
    directory = Path(directory)
    items: list[Item] = []
    file = _DataFile(directory / data_name(rank))
    try:
        for piece in pieces:
            for part in piece.written():
                items.append(_write_item(file, part))
        file.flush()
        os.fsync(file.fd)
    finally:
        os.close(file.fd)
    index = json.dumps({"rank": rank, "state": state, "items": [item.to_json() for item in items]}).encode()
    fd = os.open(directory / index_name(rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        write_all(fd, index)
        os.fsync(fd)
    finally:
        os.close(fd)
    fsync_directory(directory)
    return RankFiles(
        rank=rank,
        data=data_name(rank),
        data_bytes=file.size,
        index=index_name(rank),
        index_bytes=len(index),
        index_crc=zlib.crc32(index),
    )


def _write_item(file: _DataFile, part: Part) -> Item:
    content = bytes_of(part.view)
    crc = tuple(zlib.crc32(content[i : i + BLOCK_BYTES].data) for i in range(0, content.nbytes, BLOCK_BYTES))
    at = file.append(content)
    return Item(
        name=part.name,
        dtype=dtype_name(part.view.dtype),
        shape=part.shape,
        box=part.box,
        at=at,
        nbytes=content.nbytes,
        crc=crc,
        block=BLOCK_BYTES,
    )
