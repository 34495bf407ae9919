#!/usr/bin/env python3
"""Collect real text that is on every machine: the Python standard library's sources and docstrings, as jsonl.

Documents are the library's modules, the documentation of its compiled modules, its test suite, and, only as far as
those do not reach the wanted size (some systems ship Python without its tests), the sources of installed packages.
Duplicates are dropped and the order is shuffled with a fixed seed, so that the last documents (the validation split)
are like the first.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import pydoc
import random
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tqdm import tqdm

MEGABYTE = 10**6
LARGEST_FILE = MEGABYTE  # generated tables are not text
TEST_FOLDERS = {"test", "tests", "idle_test", "lib2to3_test"}
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}


def source_files(root: Path, is_skipped: set[str]) -> Iterator[Path]:
    """Python files under `root` in a fixed order, folders named in `is_skipped` left out."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in is_skipped)
        yield from (Path(folder) / name for name in sorted(names) if name.endswith(".py"))


def compiled_module_docs() -> Iterator[tuple[str, str]]:
    """(name, documentation) of the standard library's modules that have no Python source."""
    for name in sorted(sys.builtin_module_names):
        module = sys.modules.get(name) or __import__(name)
        yield f"help({name})", pydoc.plain(pydoc.TextDoc().docmodule(module))


def documents() -> Iterator[tuple[str, str | Path]]:
    """(name, text or file), most wanted first."""
    library = Path(sysconfig.get_path("stdlib"))
    tests = [library / name for name in sorted(TEST_FOLDERS)]
    yield from ((str(path), path) for path in source_files(library, SKIPPED_FOLDERS | TEST_FOLDERS))
    yield from compiled_module_docs()
    for folder in tests:
        yield from ((str(path), path) for path in source_files(folder, SKIPPED_FOLDERS))
    packages = Path(sysconfig.get_path("purelib"))
    yield from ((str(path), path) for path in source_files(packages, {"__pycache__"}))


def readable(source: str | Path) -> str | None:
    """The text, or None where it is empty, too large, or not UTF-8."""
    if isinstance(source, str):
        return source
    if not 0 < source.stat().st_size <= LARGEST_FILE:
        return None
    try:
        return source.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def collect(wanted_bytes: int) -> list[dict[str, str]]:
    """Documents until `wanted_bytes` of text are there; ValueError if this machine has less."""
    found: dict[bytes, dict[str, str]] = {}
    size = 0
    with tqdm(total=wanted_bytes, unit="B", unit_scale=True, desc="collecting text", mininterval=0.5) as bar:
        for name, source in documents():
            text = readable(source)
            if text is None or not text.strip():
                continue
            data = text.encode()
            digest = hashlib.sha256(data).digest()
            if digest in found:
                continue
            found[digest] = {"text": text, "source": name}
            size += len(data)
            bar.update(min(len(data), wanted_bytes - bar.n))
            if size >= wanted_bytes:
                return list(found.values())
    raise ValueError(
        f"--megabytes {wanted_bytes / MEGABYTE:g}: this Python and its packages hold {size / MEGABYTE:.1f} MB of text"
    )


def write(rows: list[dict[str, str]], output: Path) -> None:
    """jsonl, complete or not there at all."""
    output.parent.mkdir(parents=True, exist_ok=True)
    unfinished = output.with_name(output.name + ".unfinished")
    with open(unfinished, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
    unfinished.replace(output)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="jsonl file to write, one document a line")
    parser.add_argument("--megabytes", type=float, default=22.0, help="millions of bytes of text to collect")
    parser.add_argument("--seed", type=int, default=1234, help="of the order of documents")
    args = parser.parse_args()
    try:
        rows = collect(int(args.megabytes * MEGABYTE))
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    random.Random(args.seed).shuffle(rows)
    write(rows, args.output)
    size = sum(len(row["text"].encode()) for row in rows)
    print(f"{args.output}: {len(rows):,} documents, {size / MEGABYTE:.1f} MB of text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
