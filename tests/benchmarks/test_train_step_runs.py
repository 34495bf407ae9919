"""The benchmark runs to its table; what the numbers are is for a quiet machine to say."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
PROGRAM = Path(__file__).parent / "train_step.py"


def test_every_contender_gets_a_line_and_a_ratio():
    command = [sys.executable, str(PROGRAM), "--quick", "--dtype", "bf16", "--rounds", "1", "--threads", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    for name in ("ours-gpt", "nanogpt", "ours-llama", "transformers", "transformers-pure"):
        (row,) = (words for words in lines if words[:1] == [name] and words[1] != "/")
        loss = float(row[-1])
        assert 5 < loss < 7, f"{name}: loss {loss} is not that of one step on 512 tokens (ln 512 = 6.2)"
    assert len(re.findall(r"speed ratio \d+\.\d\d", done.stdout)) == 4
    assert len(re.findall(r"memory ratio \d+\.\d\d", done.stdout)) == 4
    assert "round 1 of 1" in done.stderr
