#!/usr/bin/env python3
"""Pretrain a GPT or Llama style model.

    torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 24 --hidden-size 2048 ...      (--help lists all flags)

One process needs no launcher: python pretrain_gpt.py ... Flags are checked before torch is imported, so a wrong command
line costs no time on the cluster. Exit codes are in megatron/training/exit_codes.py.
"""

from __future__ import annotations

import sys

from megatron.training.process import leave
from megatron.training.start import configured


def main(argv: list[str]) -> int:
    """Run one process of the training job; returns its exit code."""
    config, process = configured(argv)

    # Here and not at the top: importing torch takes seconds, and the checks above need none.
    from megatron.models.gpt import build_stages
    from megatron.training.supervise import pretrain

    return pretrain(config, process, build_stages)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
