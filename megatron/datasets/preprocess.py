"""Text files to token files: reading, tokenizing in worker processes, writing in order.

The input is cut into blocks of whole lines. Blocks are encoded by any number of processes and written in input order,
so the output depends on the input and the tokenizer only. A record that holds no tokens keeps its place as an empty
document: a boundary in the index and no sequence, as Megatron's tool writes it. A bad line (not UTF-8, not JSON, a
key missing, not text, or refused by the tokenizer) is never written in part: all its keys are left out.
"""

from __future__ import annotations

import functools
import gzip
import json
import multiprocessing
import re
import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np

from megatron.datasets.indexed import IndexedDatasetWriter, fitting, token_dtype
from megatron.datasets.tokenizer import Tokenizer, TokenizerOptions, build_tokenizer

BLOCK_BYTES = 2**19
BLOCKS_PER_WORKER = 3
DEATH_CHECK_S = 1.0
"""How often the parent looks whether all workers live while it waits for one."""
LONE_SURROGATE = re.compile("[\ud800-\udfff]")
SUFFIXES = (".jsonl", ".json", ".txt")


class BadLineError(ValueError):
    """A line that cannot be used, met under `--on-bad-line error`."""


@dataclass(frozen=True)
class EncodingRules:
    """What a worker needs to know; small, and the same for every block."""

    tokenizer: TokenizerOptions
    keys: tuple[str, ...]
    append_eod: bool
    stop_at_bad_line: bool


class Block(NamedTuple):
    """Whole lines of one file. `bytes_on_disk` is what reading them took from the (compressed) file."""

    path: str
    first_line: int
    text: bytes
    bytes_on_disk: int


class KeyTokens(NamedTuple):
    """The documents of one key in a block, as `IndexedDatasetWriter.add_documents` takes them."""

    tokens: np.ndarray
    lengths: np.ndarray
    sequences_per_document: np.ndarray


class EncodedBlock(NamedTuple):
    """A block's documents by key, its records, those without tokens, and its bad lines as 'file:line: reason'."""

    documents: dict[str, KeyTokens]
    text_bytes: int
    num_records: int
    num_empty: int
    bad_lines: list[str]


@dataclass
class Progress:
    """Running totals, for the reporter and the summary."""

    read: int = 0
    written: int = 0
    empty: int = 0
    bad: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bytes_on_disk: int = 0
    bad_lines: list[str] = field(default_factory=list)

    def summary(self) -> str:
        """The closing line: written documents hold tokens; skipped ones are empty or bad."""
        skipped = f"skipped {self.empty + self.bad} (empty {self.empty}, bad {self.bad})"
        return f"documents: read {self.read}, written {self.written}, {skipped}; {self.tokens} tokens"


def check_inputs(paths: Sequence[str], keys: Sequence[str]) -> None:
    """ValueError for inputs that cannot be read, before any work is done."""
    for path in paths:
        if not Path(path).is_file():
            raise ValueError(f"--input {path}: no such file")
        suffix = Path(path.removesuffix(".gz")).suffix
        if suffix not in SUFFIXES:
            raise ValueError(f"--input {path}: the name must end in {', '.join(SUFFIXES)}, or one of them plus .gz")
        if suffix == ".txt" and len(keys) != 1:
            raise ValueError(f"--input {path} is plain text and fills one key, but --json-keys names {' '.join(keys)}")


def read_blocks(path: str) -> Iterator[Block]:
    """Cuts a file into blocks of whole lines, decompressing `.gz`."""
    line, seen = 1, 0
    with open(path, "rb") as raw, gzip.open(raw) if path.endswith(".gz") else raw as file:
        while True:
            try:
                text = file.read(BLOCK_BYTES)
                if text and not text.endswith(b"\n"):
                    text += file.readline()
            except (OSError, EOFError) as error:
                raise ValueError(f"{path} cannot be read beyond line {line}: {error}") from None
            if not text:
                return
            position = raw.tell()
            yield Block(path, line, text, position - seen)
            line, seen = line + text.count(b"\n"), position


@functools.cache
def tokenizer_of(options: TokenizerOptions) -> Tokenizer:
    """The process's tokenizer; worker processes inherit the one the parent built."""
    return build_tokenizer(options)


def encode_block(rules: EncodingRules, block: Block) -> EncodedBlock:
    """Tokenizes every line of a block. BadLineError at the first bad one if the rules say so."""
    tokenizer = tokenizer_of(rules.tokenizer)
    dtype = token_dtype(tokenizer.vocab_size)
    is_json = not block.path.removesuffix(".gz").endswith(".txt")
    ids: dict[str, list[np.ndarray]] = {key: [] for key in rules.keys}
    lengths: dict[str, list[int]] = {key: [] for key in rules.keys}
    sequences: dict[str, list[int]] = {key: [] for key in rules.keys}
    bad_lines, num_empty = [], 0
    lines = block.text.removesuffix(b"\n").split(b"\n")
    for number, line in enumerate(lines, block.first_line):
        try:
            texts = record_texts(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, rules.keys, is_json)
            encoded = {key: encode_document(tokenizer, texts[key], rules.append_eod) for key in rules.keys}
        except (ValueError, TypeError) as error:
            bad_lines.append(f"{block.path}:{number}: {error}")
            if rules.stop_at_bad_line:
                raise BadLineError(bad_lines[0]) from None
            continue
        num_empty += not any(document_lengths for _, document_lengths in encoded.values())
        for key, (document, document_lengths) in encoded.items():
            try:
                ids[key].append(fitting(np.array(document, dtype=np.int64), dtype))
            except ValueError as error:
                raise ValueError(f"{block.path}:{number}: {error}") from None
            lengths[key].extend(document_lengths)
            sequences[key].append(len(document_lengths))
    documents = {
        key: KeyTokens(
            np.concatenate(ids[key]) if ids[key] else np.empty(0, dtype),
            np.array(lengths[key], dtype=np.int64),
            np.array(sequences[key], dtype=np.int64),
        )
        for key in rules.keys
    }
    return EncodedBlock(documents, len(block.text), len(lines), num_empty, bad_lines)


def record_texts(line: bytes, keys: Sequence[str], is_json: bool) -> dict[str, list[str]]:
    """The sequences of each key of one record; ValueError says what is wrong with the line."""
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"not UTF-8 ({error.reason} at byte {error.start})") from None
    if not is_json:
        return {keys[0]: [text.removesuffix("\r")]}
    if not text.strip():
        raise ValueError("blank line, not a JSON record")
    try:
        record = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON ({error.msg} at column {error.colno})") from None
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
    if not isinstance(record, dict):
        raise ValueError(f"a JSON {type(record).__name__}, not an object")
    texts = {}
    for key in keys:
        if key not in record:
            raise ValueError(f"no key '{key}'; it has {', '.join(sorted(record)) or 'none'}")
        value = record[key] if isinstance(record[key], list) else [record[key]]
        if not all(isinstance(part, str) for part in value):
            raise ValueError(f"key '{key}' is not a text or a list of texts")
        if b"\\u" in line and any(LONE_SURROGATE.search(part) for part in value):
            raise ValueError(f"key '{key}' holds half of a character (an escape \\ud800 to \\udfff without its pair)")
        texts[key] = value
    return texts


def encode_document(tokenizer: Tokenizer, texts: Sequence[str], append_eod: bool) -> tuple[list[int], list[int]]:
    """(ids, sequence lengths) of one document: a sequence for each text with tokens, end-of-document in the last."""
    ids: list[int] = []
    lengths: list[int] = []
    for text in texts:
        sequence = tokenizer.tokenize(text)
        if sequence:
            ids.extend(sequence)
            lengths.append(len(sequence))
    if ids and append_eod:
        ids.append(tokenizer.eod)
        lengths[-1] += 1
    return ids, lengths


def leave_interrupts_to_parent() -> None:
    """Ctrl-C reaches the whole process group; only the parent should act on it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _result(future: Future, pool: ProcessPoolExecutor) -> EncodedBlock:
    """The future's result; BrokenProcessPool soon after a worker of the pool is gone, whatever it was doing then."""
    while not wait([future], timeout=DEATH_CHECK_S).done:
        if any(process.exitcode is not None for process in list((pool._processes or {}).values())):
            _abandon(pool)
    return future.result()


def _abandon(pool: ProcessPoolExecutor) -> None:
    """Let the pool's own thread see that a worker is gone: it may wait for the rest of a message from or to it.

    The executor itself does so for messages to a worker from Python 3.11.5 on (github.com/python/cpython/issues/94777)
    and for those from a worker not at all: they end when nobody holds the other end of the pipe.
    """
    for process in multiprocessing.active_children():
        process.kill()
    pool._call_queue._reader.close()
    pool._result_queue._writer.close()


def encoded_blocks(
    rules: EncodingRules, blocks: Iterator[Block], num_workers: int
) -> Iterator[tuple[Block, EncodedBlock]]:
    """Blocks with their encoding, in input order. An error, or a worker that dies, ends this
    as soon as the blocks in work are done."""
    if num_workers <= 1:
        for block in blocks:
            yield block, encode_block(rules, block)
        return
    method = "fork" if "fork" in multiprocessing.get_all_start_methods() else "spawn"
    context = multiprocessing.get_context(method)
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=leave_interrupts_to_parent)
    waiting: deque[tuple[Block, Future]] = deque()
    try:
        for block in blocks:
            waiting.append((block._replace(text=b""), pool.submit(encode_block, rules, block)))
            if len(waiting) >= num_workers * BLOCKS_PER_WORKER:
                yield waiting[0][0], _result(waiting[0][1], pool)
                waiting.popleft()
        while waiting:
            yield waiting[0][0], _result(waiting[0][1], pool)
            waiting.popleft()
    except BrokenProcessPool:
        _abandon(pool)
        place = f" at or after {waiting[0][0].path}:{waiting[0][0].first_line}" if waiting else ""
        raise ValueError(
            f"a worker process died{place} (killed, or out of memory); nothing was written. Use fewer --workers if"
            " memory was short"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def preprocess(
    inputs: Sequence[str],
    output_prefix: str,
    rules: EncodingRules,
    num_workers: int = 1,
    report: Callable[[Progress], None] | None = None,
) -> Progress:
    """Writes `{output_prefix}_{key}_document.bin` and `.idx` for every key and returns the totals.

    `report(progress)` is called after every block. ValueError (BadLineError for a bad line) leaves no file behind.
    """
    check_inputs(inputs, rules.keys)
    tokenizer = tokenizer_of(rules.tokenizer)
    Path(output_prefix).absolute().parent.mkdir(parents=True, exist_ok=True)
    progress = Progress()
    blocks = (block for path in inputs for block in read_blocks(path))
    with ExitStack() as stack:
        dtype = token_dtype(tokenizer.vocab_size)
        writers = {
            key: stack.enter_context(IndexedDatasetWriter(f"{output_prefix}_{key}_document", dtype))
            for key in rules.keys
        }
        stream = encoded_blocks(rules, blocks, num_workers)
        stack.callback(stream.close)
        for block, encoded in stream:
            for key, documents in encoded.documents.items():
                writers[key].add_documents(*documents)
                progress.tokens += len(documents.tokens)
            progress.read += encoded.num_records
            progress.empty += encoded.num_empty
            progress.bad += len(encoded.bad_lines)
            progress.written = progress.read - progress.empty - progress.bad
            progress.text_bytes += encoded.text_bytes
            progress.bytes_on_disk += block.bytes_on_disk
            progress.bad_lines = encoded.bad_lines
            if report is not None:
                report(progress)
        for key, writer in writers.items():
            if writer.num_sequences == 0:
                raise ValueError(
                    f"no record of {', '.join(inputs)} has any token under key '{key}' ({progress.summary()});"
                    " nothing was written"
                )
        for writer in writers.values():
            writer.finalize()
    return progress
