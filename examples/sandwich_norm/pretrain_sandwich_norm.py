#!/usr/bin/env python3
"""pretrain_gpt.py with sandwich norms: the same program, one more group of flags and another block.

    torchrun --nproc-per-node 2 examples/sandwich_norm/pretrain_sandwich_norm.py --sandwich-norm both ...

What differs from pretrain_gpt.py: `extra_configs` below, and the block given to `build_stages`.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from examples.sandwich_norm.config import SandwichNormConfig  # noqa: E402  (after the path is set)
from megatron.training.process import leave  # noqa: E402
from megatron.training.start import configured  # noqa: E402


def main(argv: list[str]) -> int:
    """Run one process of the training job; returns its exit code."""
    config, process = configured(argv, extra_configs=(SandwichNormConfig,))

    # Here and not at the top: importing torch takes seconds, and the checks above need none.
    from examples.sandwich_norm.block import SandwichBlock
    from megatron.models.gpt import build_stages
    from megatron.training.supervise import pretrain

    return pretrain(config, process, partial(build_stages, block=SandwichBlock))


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
