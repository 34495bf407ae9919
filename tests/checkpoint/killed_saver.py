"""A saver that kills itself: `python -m tests.checkpoint.killed_saver DIR SCENARIO` makes one directory per point of
death.

Every call of the operating system that a save makes is a point. For point n, DIR/n holds two complete checkpoints
(iterations 5 and 10); a forked child then saves again (SCENARIO "next": iteration 15; "replace": iteration 10 again)
keeping only the newest, and is killed by SIGKILL at its n-th call (a write is half done by then). The last directory is
that of a child that lived.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

from megatron.checkpoint.retention import Retention
from megatron.checkpoint.save import save_checkpoint
from megatron.distributed.context import single_process_context
from tests.checkpoint.layouts import Layout, rank_pieces

CALLS = ("mkdir", "open", "write", "fsync", "rename", "replace", "unlink", "rmdir")
LAYOUT = Layout(layers=1)


def save(directory: Path, iteration: int, scale: float, retention: Retention | None = None) -> None:
    """Save the test network with all values times `scale`, which `scalars` tells."""
    pieces = rank_pieces(LAYOUT, 0, fill=True)
    for piece in pieces:
        piece.view.mul_(scale)
    options = {"scalars": {"scale": scale}, "config": {}, "retention": retention, "log": lambda _: None}
    save_checkpoint(directory, iteration, single_process_context(), pieces, **options)


def die_at(point: int) -> None:
    """Patch the system calls of this process so that the `point`-th never returns."""
    count = 0

    def deadly(name, real):
        def call(*args, **kwargs):
            nonlocal count
            count += 1
            if count == point:
                if name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return call

    for name in CALLS:
        setattr(os, name, deadly(name, getattr(os, name)))


def main(root: Path, scenario: str) -> None:
    """Run all points of death, the first that is survived included."""
    template = root / "template"
    save(template, 5, 1.0)
    save(template, 10, 2.0)
    for point in range(1, 1000):
        directory = root / str(point)
        shutil.copytree(template, directory)
        child = os.fork()
        if child == 0:
            die_at(point)
            save(directory, 15 if scenario == "next" else 10, 4.0, Retention(keep_last=1))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return
        assert os.WIFSIGNALED(status), f"point {point}: exit status {status}"
    raise AssertionError("a save of one small rank makes fewer calls than this")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
