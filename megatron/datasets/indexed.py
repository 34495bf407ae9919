"""Token files: the `.bin`/`.idx` pair, read and written byte for byte as Megatron lays it out.

`.bin` holds the tokens of all sequences back to back. `.idx` is little endian and unpadded: magic (9 bytes), uint64
version 1, uint8 dtype code, uint64 sequences S, uint64 D, int32 lengths[S], int64 byte pointers[S], int64 document
boundaries[D] (first 0, last S) and, for multimodal data only, int8 modes[S].

Invariants: byte offsets are int64 everywhere; a pair whose sizes disagree is refused when it is opened, not when the
missing bytes are read; arrays handed out keep their file mapping alive; a writer's files appear only when complete.
"""

from __future__ import annotations

import hashlib
import os
import struct
import weakref
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER = struct.Struct("<9sQBQQ")
DTYPE_OF_CODE = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}
CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}
MAX_SEQUENCE_TOKENS = 2**31 - 1
MAX_READ_BYTES = 2**30


class DataError(ValueError):
    """Data that is damaged or does not fit the run, which shows only when a sample is read."""


def token_dtype(vocab_size: int | None) -> np.dtype:
    """uint16 when the vocabulary is known and below 65,500, else int32: the rule every Megatron tool follows."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def fitting(tokens: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """The ids in the stored type, contiguous; ValueError when one does not fit, as it would become another token."""
    if tokens.dtype != dtype and len(tokens):
        limits = np.iinfo(dtype)
        lowest, highest = int(tokens.min()), int(tokens.max())
        if lowest < max(limits.min, 0) or highest > limits.max:
            raise ValueError(
                f"token id {lowest if lowest < 0 else highest} does not fit {dtype} (0 to {limits.max}); the tokenizer"
                " produces ids beyond the vocabulary size it states"
            )
    return np.ascontiguousarray(tokens, dtype=dtype)


@dataclass(frozen=True)
class SequenceIndex:
    """What an `.idx` file says: token type, sequence lengths, byte pointers and document boundaries."""

    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    document_indices: np.ndarray
    modes: np.ndarray | None = None

    @classmethod
    def from_lengths(
        cls, dtype: np.dtype, lengths: np.ndarray, document_indices: np.ndarray, modes: np.ndarray | None = None
    ) -> SequenceIndex:
        """Lays the sequences out back to back; pointers are summed in int64 whatever type the lengths have."""
        lengths = np.asarray(lengths, dtype=np.int32)
        ends = np.cumsum(lengths, dtype=np.int64) * np.int64(dtype.itemsize)
        pointers = np.zeros(len(lengths), dtype=np.int64)
        pointers[1:] = ends[:-1]
        return cls(np.dtype(dtype), lengths, pointers, np.asarray(document_indices, dtype=np.int64), modes)

    @classmethod
    def read(cls, path: str | os.PathLike) -> SequenceIndex:
        """Maps the file; ValueError when it is not an index, is cut short or contradicts itself."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path} does not exist; a data path is the prefix of a .bin/.idx pair, without extension")
        size = path.stat().st_size
        if size < HEADER.size:
            raise ValueError(f"{path} is {size} bytes, too short for an index header of {HEADER.size}")
        raw = np.memmap(path, mode="r", dtype=np.uint8)
        magic, version, code, sequences, documents = HEADER.unpack(raw[: HEADER.size].tobytes())
        if magic != MAGIC or version != VERSION or code not in DTYPE_OF_CODE:
            raise ValueError(f"{path} is not a version {VERSION} token index (magic {magic!r}, version {version})")
        plain = HEADER.size + 12 * sequences + 8 * documents
        if size not in (plain, plain + sequences):
            raise ValueError(f"{path} is {size} bytes, but its header announces {plain}; it was not written completely")

        def part(dtype: str, count: int, offset: int) -> np.ndarray:
            return np.frombuffer(raw, dtype=dtype, count=count, offset=offset)

        lengths = part("<i4", sequences, HEADER.size)
        pointers = part("<i8", sequences, HEADER.size + 4 * sequences)
        document_indices = part("<i8", documents, HEADER.size + 12 * sequences)
        modes = part("i1", sequences, plain) if size != plain else None
        if documents == 0 or document_indices[-1] != sequences:
            raise ValueError(f"{path}: the last document boundary is not the number of sequences, {sequences}")
        return cls(DTYPE_OF_CODE[code], lengths, pointers, document_indices, modes)

    def write(self, path: str | os.PathLike) -> None:
        """Writes beside `path`, flushes to disk and renames."""
        temporary = f"{path}.tmp-{os.getpid()}"
        sequences, documents = len(self.lengths), len(self.document_indices)
        with removed_on_error(temporary), open(temporary, "wb") as file:
            file.write(HEADER.pack(MAGIC, VERSION, CODE_OF_DTYPE[self.dtype], sequences, documents))
            file.write(np.ascontiguousarray(self.lengths, dtype="<i4").data)
            file.write(np.ascontiguousarray(self.pointers, dtype="<i8").data)
            file.write(np.ascontiguousarray(self.document_indices, dtype="<i8").data)
            if self.modes is not None:
                file.write(np.ascontiguousarray(self.modes, dtype="i1").data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    @property
    def num_bytes(self) -> int:
        """Size of the `.bin` file these pointers describe."""
        return int(self.pointers[-1]) + int(self.lengths[-1]) * self.dtype.itemsize if len(self.lengths) else 0

    def followed_by(self, other: SequenceIndex) -> SequenceIndex:
        """The index of both token files, one after the other."""
        if self.dtype != other.dtype:
            raise ValueError(f"token types differ ({self.dtype} and {other.dtype}); the files cannot be joined")
        if (self.modes is None) != (other.modes is None):
            raise ValueError("one index has modes (multimodal data) and the other has not; they cannot be joined")
        documents = np.concatenate([self.document_indices, other.document_indices[1:] + np.int64(len(self.lengths))])
        modes = None if self.modes is None else np.concatenate([self.modes, other.modes])
        return SequenceIndex.from_lengths(self.dtype, np.concatenate([self.lengths, other.lengths]), documents, modes)


class removed_on_error:  # noqa: N801  (reads as a statement: `with removed_on_error(path)`)
    """Deletes the named files when the block raises."""

    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        if kind is not None:
            for path in self.paths:
                Path(path).unlink(missing_ok=True)


class IndexedDataset:
    """Read access to one `.bin/.idx` pair. Arrays are read-only and in the stored dtype.

    With `mmap` (the default) a read is a view of the mapped file, which lives as long as the view. Without it
    (`--no-mmap-bin-files`) every read is a `pread` into memory of its own; a short read is an error.
    """

    def __init__(self, prefix: str | os.PathLike, mmap: bool = True) -> None:
        self.prefix = str(prefix)
        self.mmap = mmap
        self.index = SequenceIndex.read(f"{self.prefix}.idx")
        path = Path(f"{self.prefix}.bin")
        if not path.is_file():
            raise ValueError(f"{path} does not exist, but {self.prefix}.idx does")
        size = path.stat().st_size
        if size != self.index.num_bytes:
            raise ValueError(
                f"{path} is {size} bytes, but {self.prefix}.idx describes {self.index.num_bytes}: the two files are not"
                " from the same run of the preprocessing tool; write them again"
            )
        self._mapped = np.memmap(path, mode="r", dtype=self.index.dtype) if mmap and size else None
        self._file = None
        if not mmap:
            self._file = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._file)

    def __reduce__(self) -> tuple:
        return (IndexedDataset, (self.prefix, self.mmap))

    def __len__(self) -> int:
        return len(self.index.lengths)

    @property
    def sequence_lengths(self) -> np.ndarray:
        return self.index.lengths

    @property
    def document_indices(self) -> np.ndarray:
        return self.index.document_indices

    def identity(self) -> dict:
        """What a sample order depends on: the sequence lengths, by content. Regenerated data has another identity."""
        digest = hashlib.sha256(np.ascontiguousarray(self.index.lengths).data).hexdigest()
        return {"sequences": len(self), "bytes": self.index.num_bytes, "lengths_sha256": digest}

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Tokens `offset` to `offset + length` (default: to the end) of one sequence."""
        available = int(self.index.lengths[sequence]) - offset
        length = available if length is None else length
        if offset < 0 or length < 0 or length > available:
            raise IndexError(f"{self.prefix}: sequence {sequence} has no {length} tokens at offset {offset}")
        itemsize, pointer = self.index.dtype.itemsize, int(self.index.pointers[sequence])
        if pointer < 0 or pointer + (offset + length) * itemsize > self.index.num_bytes:
            raise DataError(
                f"{self.prefix}.idx is damaged: it puts sequence {sequence} at byte {pointer}, but {self.prefix}.bin"
                f" has {self.index.num_bytes} bytes; write the pair again"
            )
        return self._read(pointer // itemsize + offset, length)

    def __getitem__(self, which: int | slice) -> np.ndarray | list[np.ndarray]:
        if isinstance(which, slice):
            first, last, step = which.indices(len(self))
            if step != 1:
                raise ValueError("sequences are read in contiguous slices; step must be 1")
            return [self.get(sequence) for sequence in range(first, last)]
        sequence = which + len(self) if which < 0 else which
        if not 0 <= sequence < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} sequences, there is no {which}")
        return self.get(sequence)

    def _read(self, first: int, count: int) -> np.ndarray:
        if count == 0:
            return np.empty(0, dtype=self.index.dtype)
        if self._mapped is not None:
            return self._mapped[first : first + count].view(np.ndarray)
        wanted, start = count * self.index.dtype.itemsize, first * self.index.dtype.itemsize
        pieces, got = [], 0
        while got < wanted:
            piece = os.pread(self._file, min(wanted - got, MAX_READ_BYTES), start + got)
            if not piece:
                raise DataError(f"{self.prefix}.bin ended at byte {start + got}; it was cut while in use")
            pieces.append(piece)
            got += len(piece)
        return np.frombuffer(b"".join(pieces), dtype=self.index.dtype)


class IndexedDatasetWriter:
    """Writes one `.bin/.idx` pair; use as a context manager and call `finalize` when all documents are in.

    Tokens stream to a temporary file. `finalize` renames `.bin`, then `.idx`; leaving the block without it removes
    everything, so a reader never meets half a data set. An older pair of the same name loses its `.idx` first, so
    that new tokens never stand beside old pointers.
    """

    def __init__(self, prefix: str | os.PathLike, dtype: np.dtype) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._temporary = f"{self.prefix}.bin.tmp-{os.getpid()}"
        self._file: BinaryIO | None = None

    def __enter__(self) -> IndexedDatasetWriter:
        return self

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        Path(self._temporary).unlink(missing_ok=True)

    @property
    def num_sequences(self) -> int:
        return len(self._lengths)

    @property
    def num_documents(self) -> int:
        return len(self._document_indices) - 1

    def add_document(self, tokens: Sequence[int] | np.ndarray, lengths: Sequence[int]) -> None:
        """Appends one document of `lengths` sequences. An empty document adds a boundary and no sequence."""
        self.add_documents(np.asarray(tokens), np.asarray(lengths, dtype=np.int64), np.array([len(lengths)]))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray, sequences_per_document: np.ndarray) -> None:
        """Appends documents laid end to end: all tokens, the length of every sequence, sequences of every document."""
        if lengths.sum() != len(tokens) or sequences_per_document.sum() != len(lengths):
            raise ValueError(f"{len(tokens)} tokens do not fill sequences of {lengths.sum()} tokens in all")
        if len(lengths) and lengths.max() > MAX_SEQUENCE_TOKENS:
            raise ValueError(f"a sequence of {lengths.max()} tokens exceeds the format's limit, {MAX_SEQUENCE_TOKENS}")
        self._opened().write(fitting(tokens, self.dtype).data)
        boundaries = len(self._lengths) + np.cumsum(sequences_per_document, dtype=np.int64)
        self._lengths.frombytes(lengths.astype(np.int32).tobytes())
        self._document_indices.frombytes(boundaries.tobytes())

    def finalize(self) -> None:
        """Makes the pair visible under its name."""
        file = self._opened()
        file.flush()
        os.fsync(file.fileno())
        file.close()
        lengths = np.frombuffer(self._lengths, dtype=np.int32) if self._lengths else np.empty(0, np.int32)
        documents = np.frombuffer(self._document_indices, dtype=np.int64)
        Path(f"{self.prefix}.idx").unlink(missing_ok=True)
        os.replace(self._temporary, f"{self.prefix}.bin")
        SequenceIndex.from_lengths(self.dtype, lengths, documents).write(f"{self.prefix}.idx")

    def _opened(self) -> BinaryIO:
        # Not in the constructor: inside the block, a signal at any moment finds the temporary file's clean-up in place.
        if self._file is None:
            self._file = open(self._temporary, "wb")
        return self._file
