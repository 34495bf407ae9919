#!/usr/bin/env python3
"""Shows what a checkpoint holds: iteration, layout, tensors with shapes and sizes; --verify reads every byte of it.

python tools/inspect_checkpoint.py DIR                    the newest complete checkpoint in DIR (or DIR/iter_0000100)
python tools/inspect_checkpoint.py DIR --list             all of them, the unusable ones with the reason
python tools/inspect_checkpoint.py DIR --verify           exit code 1 and a line per fault when a checksum fails
python tools/inspect_checkpoint.py DIR --tensors 'param/*fc1*'
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from fnmatch import fnmatch
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron.checkpoint.catalog import find_checkpoint, list_steps  # noqa: E402
from megatron.checkpoint.format import CheckpointError  # noqa: E402
from megatron.checkpoint.reader import Checkpoint  # noqa: E402


def make_parser() -> argparse.ArgumentParser:
    """The tool's flags."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("directory", type=Path, help="what --save was, or one iter_* directory in it")
    parser.add_argument("--ckpt-step", type=int, help="iteration to show (default: the newest save)")
    parser.add_argument("--list", action="store_true", help="list the checkpoints of the directory and stop")
    parser.add_argument("--tensors", default="param/*", metavar="PATTERN", help="tensors to list (default: param/*)")
    parser.add_argument("--config", action="store_true", help="print the stored configuration and counters as JSON")
    parser.add_argument("--verify", action="store_true", help="read everything and check every checksum")
    return parser


def size_text(nbytes: int) -> str:
    """Bytes with a decimal prefix."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.2f} {unit}"
    return f"{nbytes} B"


def print_list(directory: Path) -> None:
    """All steps of a directory, the newest save first."""
    listing = list_steps(directory)
    for step in listing.complete:
        layout = step.manifest.layout
        mesh = " ".join(f"{axis}{layout[axis]}" for axis in ("tp", "cp", "dp", "pp") if axis in layout)
        print(f"{step.path.name}  complete  {size_text(step.manifest.nbytes):>10}  {mesh}")
    for path, reason in listing.broken:
        print(f"{path.name}  UNUSABLE  {reason}")


def print_summary(checkpoint: Checkpoint) -> None:
    """Iteration, layout and the size of each kind of tensor."""
    manifest = checkpoint.manifest
    print(f"checkpoint   {checkpoint.path}")
    print(f"iteration    {manifest.iteration} (save {manifest.sequence} of its directory)")
    print(f"written by   {len(manifest.ranks)} ranks, " + " ".join(f"{k}={v}" for k, v in manifest.layout.items()))
    print(f"size         {size_text(manifest.nbytes)}")
    kinds: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    for name, items in checkpoint.items().items():
        totals = kinds[name.partition("/")[0]]
        totals[0] += 1
        totals[1] += sum(item.box.numel for item in items)
        totals[2] += sum(item.nbytes for item in items)
    for kind, (count, numel, nbytes) in sorted(kinds.items()):
        print(f"  {kind:<12} {count:>6} tensors  {numel:>15,} elements  {size_text(nbytes):>10}")


def print_tensors(checkpoint: Checkpoint, pattern: str) -> None:
    """One line for each tensor that matches: name, type, shape, size, in how many parts it is stored."""
    names = sorted((name for name in checkpoint.names() if fnmatch(name, pattern)), key=_numbers_by_value)
    width = max((len(name) for name in names), default=0)
    for name in names:
        items, shape = checkpoint.items()[name], checkpoint.shape(name)
        total = sum(item.nbytes for item in items)
        dtype, extents = items[0].dtype, " x ".join(map(str, shape))
        print(f"{name:<{width}}  {dtype:<9} {extents:<24} {prod(shape):>14,} {size_text(total):>10} in {len(items)}")
    if not names:
        print(f"no tensor matches {pattern!r}")


def _numbers_by_value(name: str) -> list:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in name.split(".")]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the tool; returns its exit code."""
    args = make_parser().parse_args(argv)
    try:
        if args.list:
            print_list(args.directory)
            return 0
        steps = find_checkpoint(args.directory, ckpt_step=args.ckpt_step, required=True, flag="directory")
        with Checkpoint(steps[0]) as checkpoint:
            print_summary(checkpoint)
            if args.config:
                print(json.dumps({"scalars": checkpoint.scalars, "config": checkpoint.config}, indent=1))
            print_tensors(checkpoint, args.tensors)
            if not args.verify:
                return 0
            faults = list(checkpoint.verify())
            for name, fault in faults:
                print(f"FAULT {name}: {fault}")
            print(f"verified: {len(faults)} faults" if faults else "verified: every checksum is right")
            return 1 if faults else 0
    except BrokenPipeError:  # the reader of a pipe has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
