"""The quickstart from corpus to loss plot, cut to four iterations on two megabytes; a second run reuses all of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def quickstart(folder: Path) -> str:
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}
    settings = {
        "QUICKSTART_DIR": str(folder),
        "QUICKSTART_ITERS": "4",
        "QUICKSTART_MEGABYTES": "2",
        "USE_CURRENT_ENVIRONMENT": "1",
        "PYTHON": sys.executable,
    }
    result = subprocess.run(
        ["bash", str(ROOT / "examples" / "quickstart.sh")],
        cwd=folder,
        env=kept | settings,
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@pytest.mark.slow
def test_quickstart_twice(tmp_path):
    first = quickstart(tmp_path)
    assert [int(number) for number in re.findall(r"\[(\d)/9\]", first)] == list(range(1, 10))
    assert "finished (exit-interval) at iteration 2" in first, "stopped halfway"
    assert "loaded checkpoint of iteration 2" in first and "finished (complete) at iteration 4" in first
    assert "tensor 2 x pipeline 1" in first and "tensor 1 x pipeline 2" in first, "resumed on another layout"
    assert re.search(r"validation loss +\d+\.\d+ +\(a unigram model of the same tokens: \d+\.\d+\)", first)
    assert "def read(self, path):" in first
    run = tmp_path / "run"
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run / "tensorboard").glob("events.out.tfevents.*"))
    assert (run / "metrics.jsonl").stat().st_size > 0

    saved = (run / "checkpoints" / "iter_0000004" / "manifest.json").stat().st_mtime_ns
    second = quickstart(tmp_path)
    assert second.count("reusing ") == 5, "corpus, tokenizer, token files, both trainings"
    assert (run / "checkpoints" / "iter_0000004" / "manifest.json").stat().st_mtime_ns == saved
