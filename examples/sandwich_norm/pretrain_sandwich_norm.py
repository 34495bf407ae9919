#!/usr/bin/env python3
"""pretrain_gpt.py with sandwich norms: the same program, one more group of flags and another block.

    torchrun --nproc-per-node 2 examples/sandwich_norm/pretrain_sandwich_norm.py --sandwich-norm both ...

What differs from pretrain_gpt.py: `extra_configs` below, and the block given to `build_stages`.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.sandwich_norm.config import SandwichNormConfig  # noqa: E402  (after the path is set)
from megatron.config.describe import describe  # noqa: E402
from megatron.config.run import parse_or_exit  # noqa: E402
from megatron.training import exit_codes  # noqa: E402
from megatron.training.process import process_of  # noqa: E402
from megatron.training.sinks import check_sinks  # noqa: E402


def main(argv: list[str]) -> int:
    """Run one process of the training job; returns its exit code."""
    process = process_of(os.environ)
    config = parse_or_exit(argv, process.world_size, extra_configs=(SandwichNormConfig,), rank=process.rank)
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
    from examples.sandwich_norm.block import SandwichBlock
    from megatron.models.gpt import build_stages
    from megatron.training.supervise import pretrain

    return pretrain(config, process, partial(build_stages, block=SandwichBlock))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
