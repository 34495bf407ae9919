"""Which process of the run this is, as torchrun's environment says, and how it ends. Needs no torch."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import NamedTuple, NoReturn


class Process(NamedTuple):
    """A place in the world of processes; the default is a run of one, without a launcher."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1


def process_of(environment: Mapping[str, str]) -> Process:
    """The place that RANK, LOCAL_RANK and WORLD_SIZE give; ValueError when only some of them are set."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
    given = [name for name in names if name in environment]
    if not given:
        return Process()
    if len(given) < len(names):
        missing = [name for name in names if name not in given]
        raise ValueError(
            f"{', '.join(given)} set in the environment but not {', '.join(missing)}: start with torchrun, which sets "
            "all three, or unset them for a run of one process"
        )
    for name in names:
        if not environment[name].isdecimal():
            raise ValueError(f"{name}={environment[name]} in the environment is not a number from 0 up")
    place = Process(*(int(environment[name]) for name in names))
    if place.rank >= max(place.world_size, 1):
        raise ValueError(
            f"RANK={place.rank} in the environment is not below WORLD_SIZE={place.world_size}: ranks count from 0"
        )
    return place


def leave(code: int) -> NoReturn:
    """End this process with `code` once everything it printed is out; the run has closed its files and groups.

    Not by `sys.exit`: while the interpreter takes itself down, threads of torch's own (seen with gloo in 2.13) now and
    then abort the process, and a finished run would be reported as failed.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
