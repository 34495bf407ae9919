#!/usr/bin/env python3
"""Pretrain a GPT or Llama style model.

    torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 ...      (--help lists all flags)

One process needs no launcher: python pretrain_gpt.py ... Flags are checked before torch is imported, so a wrong command
line costs no time on the cluster. Exit codes are in megatron/training/exit_codes.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from megatron.checkpoint.catalog import find_checkpoint
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.describe import describe
from megatron.config.run import parse_or_exit
from megatron.training import exit_codes
from megatron.training.process import process_of
from megatron.training.sinks import check_sinks


def stored_configuration(checkpoint: CheckpointConfig) -> Mapping[str, Any] | None:
    """What the checkpoint that --load names was configured with, for --use-checkpoint-args; None when there is none."""
    steps = find_checkpoint(checkpoint.load, ckpt_step=checkpoint.ckpt_step, log=lambda line: None)
    return steps[0].manifest.config if steps else None


def main(argv: list[str]) -> int:
    """Run one process of the training job; returns its exit code."""
    process = process_of(os.environ)
    config = parse_or_exit(argv, process.world_size, rank=process.rank, read_stored=stored_configuration)
    try:
        check_sinks(config.logging)
    except ValueError as error:
        if process.rank == 0:
            print(f"error: {error}", file=sys.stderr)
        return exit_codes.USAGE
    if process.rank == 0:
        print("\n".join(describe(config)), flush=True)
    if config.training.check_config:
        return exit_codes.COMPLETE

    # Here and not at the top: importing torch takes seconds, and everything above needs none.
    from megatron.models.gpt import build_stages
    from megatron.training.supervise import pretrain

    return pretrain(config, process, build_stages)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
