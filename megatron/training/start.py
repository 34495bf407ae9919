"""From a command line to a checked configuration, before torch is imported: what every entry does first.

A wrong command line ends every rank with exit code 2 and is printed once; so do --help and --check-config with 0.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.checkpoint.catalog import find_checkpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.describe import describe
from megatron.config.run import RunConfig, parse_or_exit
from megatron.training import exit_codes
from megatron.training.packages import check_packages
from megatron.training.process import Process, process_of


def stored_configuration(checkpoint: CheckpointConfig) -> Mapping[str, Any] | None:
    """What the checkpoint that --load names was configured with, for --use-checkpoint-args; None when there is none."""
    steps = find_checkpoint(checkpoint.load, ckpt_step=checkpoint.ckpt_step, log=lambda line: None)
    return steps[0].manifest.config if steps else None


def configured(argv: Sequence[str], extra_configs: Sequence[type] = ()) -> tuple[RunConfig, Process]:
    """The configuration of a run and this process's place in it; the first rank prints the configuration.

    `extra_configs`: dataclasses of flags that a fork adds. Raises SystemExit with 2 for a wrong command line, with 0
    after --help or --check-config.
    """
    try:
        process = process_of(os.environ)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(exit_codes.USAGE) from None
    config = parse_or_exit(argv, process.world_size, extra_configs, rank=process.rank, read_stored=stored_configuration)
    try:
        check_packages(config)
    except ValueError as error:
        if process.rank == 0:
            print("\n".join(f"error: {line}" for line in str(error).splitlines()), file=sys.stderr)
        raise SystemExit(exit_codes.USAGE) from None
    if process.rank == 0:
        print("\n".join(describe(config)), flush=True)
    if config.training.check_config:
        raise SystemExit(exit_codes.COMPLETE)
    return config, process
