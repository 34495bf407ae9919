"""Settings of every test process: one intra-op thread, so that ranks as threads do not fight over cores."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402  (after the thread count is set)

torch.set_num_threads(1)
