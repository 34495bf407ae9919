"""Reading a checkpoint into any layout: boxes are intersected, and only the blocks that hold wanted bytes are read and
verified.

Needs no process group: tools use it as the ranks of a run do.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron.checkpoint.boxes import Box, flat_span, intersect, whole
from megatron.checkpoint.catalog import Step, open_step, read_index
from megatron.checkpoint.format import CheckpointDamaged, CheckpointMismatch, Item, Manifest
from megatron.checkpoint.pieces import Piece, narrow

SPAN_BYTES = 64 << 20
"""Most bytes held at once for a part of an item, where its shape allows cutting."""


class Checkpoint:
    """An open checkpoint. Close it, or use it as a context manager."""

    def __init__(self, step: Step | str | Path):
        step = step if isinstance(step, Step) else open_step(step)
        self.path: Path = step.path
        self.manifest: Manifest = step.manifest
        self._files: dict[str, int] = {}
        self._index: dict[str, list[Item]] | None = None
        self._states: dict[int, dict[str, Any]] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the data files."""
        for fd in self._files.values():
            os.close(fd)
        self._files.clear()

    @property
    def iteration(self) -> int:
        """The iteration after which it was written."""
        return self.manifest.iteration

    @property
    def scalars(self) -> dict[str, Any]:
        """Counters and schedules as the run stored them."""
        return self.manifest.scalars

    @property
    def config(self) -> dict[str, Any]:
        """The configuration the run stored."""
        return self.manifest.config

    def rank_state(self, rank: int) -> dict[str, Any] | None:
        """What that rank of the writing run stored for itself; None when the run had no such rank."""
        self._load_index()
        return self._states.get(rank)

    def items(self) -> dict[str, list[Item]]:
        """Stored boxes by name of their tensor."""
        return self._load_index()

    def names(self, kind: str | None = None) -> list[str]:
        """Names of the stored tensors, of one kind ("param", "exp_avg") or all."""
        return sorted(name for name in self._load_index() if kind is None or name.startswith(f"{kind}/"))

    def shape(self, name: str) -> tuple[int, ...]:
        """Global shape of a stored tensor, without padding."""
        return self._items_of(name)[0].shape

    def dtype(self, name: str) -> torch.dtype:
        """Stored type."""
        return getattr(torch, self._items_of(name)[0].dtype)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """The tensor `name`, or the part of it at `box`, in its stored type."""
        box = whole(self.shape(name)) if box is None else box
        out = torch.empty(box.size, dtype=self.dtype(name))
        self._fill(name, box, out)
        return out

    def read_into(self, pieces: Iterable[Piece], *, strict: bool = True) -> list[str]:
        """Fill the views of `pieces`; floating point types are converted to the view's.

        Padding rows come back where the writing run padded to the same number of rows, else they become zero.

        An absent "master/x" is read from "param/x", and a float32 "param/x" from "master/x" where that is stored, so
        that runs of different precision read each other. Returns the names that the checkpoint lacks, whose views are
        unchanged; with `strict` those are CheckpointMismatch, as is a global shape that differs. CheckpointDamaged for
        bytes that fail their checksum.
        """
        pieces = list(pieces)
        sources = {piece.name: self._source(piece) for piece in pieces}
        missing = sorted(name for name, source in sources.items() if source is None)
        wrong = {
            f"{piece.name} is {self.shape(source)} there and {piece.valid} in this model"
            for piece in pieces
            if (source := sources[piece.name]) and self.shape(source) != piece.valid
        }
        if wrong:
            weights = {text for text in wrong if text.startswith("param/")}
            raise CheckpointMismatch(f"{self.path}: {_some(sorted(weights or wrong))}")
        if missing and strict:
            raise CheckpointMismatch(f"{self.path} {self._explain(missing)}")
        with torch.no_grad():
            for piece in pieces:
                if sources[piece.name]:
                    self._read_piece(sources[piece.name], piece)
        return missing

    def verify(self) -> Iterator[tuple[str, str]]:
        """Read everything; yield (tensor, what is wrong with it). Nothing is yielded for a sound checkpoint."""
        for name, items in self._load_index().items():
            covered = 0
            for i, item in enumerate(items):
                covered += item.box.numel
                if any(intersect(item.box, other.box) for other in items[:i]):
                    yield name, f"{item.box} is stored twice"
                try:
                    for start in range(0, item.nbytes, SPAN_BYTES):
                        self._read_blocks(item, start, min(start + SPAN_BYTES, item.nbytes))
                except CheckpointDamaged as error:
                    yield name, str(error)
            if covered != whole(items[0].shape).numel and not name.startswith("padding/"):
                yield name, f"{covered} of {whole(items[0].shape).numel} elements are stored"

    def _load_index(self) -> dict[str, list[Item]]:
        if self._index is None:
            index: dict[str, list[Item]] = {}
            for files in self.manifest.ranks:
                items, self._states[files.rank] = read_index(self.path, files)
                for item in items:
                    index.setdefault(item.name, []).append(item)
            self._index = index
        return self._index

    def _items_of(self, name: str) -> list[Item]:
        try:
            return self._load_index()[name]
        except KeyError:
            raise CheckpointMismatch(f"{self.path} holds no {name}") from None

    def _source(self, piece: Piece) -> str | None:
        kind, _, parameter = piece.name.partition("/")
        candidates = [piece.name]
        if kind == "master":
            candidates.append(f"param/{parameter}")
        if kind == "param" and piece.view.dtype == torch.float32:
            candidates.insert(0, f"master/{parameter}")
        index = self._load_index()
        return next((name for name in candidates if name in index), None)

    def _explain(self, missing: list[str]) -> str:
        kinds = {name.partition("/")[0] for name in missing}
        if "param" not in kinds and not any(self.names(kind) for kind in kinds):
            return (
                f"holds no optimizer state ({', '.join(sorted(kinds))}); it was saved with --no-save-optim or by "
                "another optimizer: load with --no-load-optim or --finetune"
            )
        return f"lacks what this model asks for: {_some(missing)}"

    def _read_piece(self, source: str, piece: Piece) -> None:
        real, padding = piece.real(), piece.padding()
        if real is not None:
            self._fill(source, real.box, real.view)
        if padding is not None:
            stored = self._load_index().get(f"padding/{source}")
            if stored and stored[0].shape == piece.shape:
                self._fill(f"padding/{source}", padding.box, padding.view)
            else:
                padding.view.zero_()

    def _fill(self, name: str, box: Box, out: torch.Tensor) -> None:
        filled = 0
        for item in self._items_of(name):
            part = intersect(item.box, box)
            if part is not None:
                filled += part.numel
                self._copy(item, part.relative_to(item.box), narrow(out, part.relative_to(box)))
        if filled != box.numel:
            raise CheckpointDamaged(
                f"{self.path}: {name} has {filled} of the {box.numel} elements at {box} (corrupt index?)"
            )

    def _copy(self, item: Item, box: Box, out: torch.Tensor) -> None:
        """Copy `box`, counted from the item's corner, into `out`; cut to skip gaps and bound memory."""
        first, last = flat_span(item.box.size, box)
        dtype = getattr(torch, item.dtype)
        dim = next((d for d, size in enumerate(box.size) if size > 1), None)
        if dim is not None:
            row = Box(box.offset, (*box.size[:dim], 1, *box.size[dim + 1 :]))
            stride = int(np.prod(item.box.size[dim + 1 :], dtype=np.int64))
            row_first, row_last = flat_span(item.box.size, row)
            gap = (stride - (row_last - row_first)) * dtype.itemsize
            if gap >= item.block or (last - first) * dtype.itemsize > SPAN_BYTES:
                half = box.size[dim] // 2
                for start, size in ((0, half), (half, box.size[dim] - half)):
                    offset = (*box.offset[:dim], box.offset[dim] + start, *box.offset[dim + 1 :])
                    part = Box(offset, (*box.size[:dim], size, *box.size[dim + 1 :]))
                    self._copy(item, part, out.narrow(dim, start, size))
                return
        start = first * dtype.itemsize // item.block * item.block
        content = self._read_blocks(item, start, last * dtype.itemsize)
        strides = [int(np.prod(item.box.size[d + 1 :], dtype=np.int64)) for d in range(len(box.size))]
        elements = torch.from_numpy(content).view(dtype)
        out.copy_(torch.as_strided(elements, box.size, strides, first - start // dtype.itemsize))

    def _read_blocks(self, item: Item, start: int, stop: int) -> np.ndarray:
        """Verified bytes of the item from `start`, a multiple of its block, up to `stop` or the end of that block."""
        stop = min(-(-stop // item.block) * item.block, item.nbytes)
        content = np.empty(stop - start, dtype=np.uint8)
        view = memoryview(content)
        while view:
            got = os.preadv(self._open(item), [view], item.at + stop - len(view))
            if got == 0:
                raise CheckpointDamaged(f"{self.path / item.file}: ends inside {item.name}")
            view = view[got:]
        for block in range(start // item.block, -(-stop // item.block)):
            part = content[block * item.block - start : (block + 1) * item.block - start]
            if zlib.crc32(part.data) != item.crc[block]:
                where = item.at + block * item.block
                raise CheckpointDamaged(
                    f"{self.path / item.file}: checksum mismatch in {item.name}, bytes {where}..{where + part.nbytes}"
                )
        return content

    def _open(self, item: Item) -> int:
        if item.file not in self._files:
            try:
                self._files[item.file] = os.open(self.path / item.file, os.O_RDONLY)
            except OSError as error:
                raise CheckpointDamaged(f"{self.path / item.file}: {error.strerror}; it holds {item.name}") from None
        return self._files[item.file]


def _some(texts: list[str]) -> str:
    return "; ".join(texts[:5]) + (f"; and {len(texts) - 5} more" if len(texts) > 5 else "")
