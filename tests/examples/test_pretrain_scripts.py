"""The cluster scripts: each passes all checks without a GPU, any flag can be overridden, Slurm's variables are used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXPECTED = {
    "1b": ("processes: 8 = tensor 1 x pipeline 1 x data 8", "microbatches: 16"),
    "7b": ("processes: 64 = tensor 2 x pipeline 1 x data 32", "microbatches: 32"),
    "70b": ("processes: 512 = tensor 8 x pipeline 4 x data 16", "microbatches: 128"),
}


def run(command: list[str], tmp_path: Path, **variables: str) -> subprocess.CompletedProcess:
    """Runs `command` from another folder, in an environment without launcher or Slurm variables but those given."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "MASTER_"))}
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        kept.pop(name, None)
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    folder = str(Path(sys.executable).parent)
    kept |= {
        "PATH": f"{tmp_path}:{folder}:{kept['PATH']}",
        "TOKENIZER_MODEL": str(tokenizer),
        "RUN_DIR": str(tmp_path / "run"),
    }
    return subprocess.run(command, cwd=tmp_path, env=kept | variables, capture_output=True, text=True, timeout=120)


def script(size: str) -> str:
    return str(ROOT / "examples" / f"pretrain_{size}.sh")


def test_every_script_is_checked():
    assert sorted(path.stem for path in (ROOT / "examples").glob("pretrain_*.sh")) == sorted(
        f"pretrain_{size}" for size in EXPECTED
    )


@pytest.mark.parametrize("size", EXPECTED)
def test_check_config_passes_and_says_what_would_run(size, tmp_path):
    result = run(["bash", script(size), "--check-config"], tmp_path)
    assert result.returncode == 0, result.stderr
    for line in EXPECTED[size]:
        assert line in result.stdout
    assert not (tmp_path / "run").exists(), "a check writes nothing"


@pytest.mark.parametrize("size", EXPECTED)
def test_a_flag_at_the_end_wins(size, tmp_path):
    flags = ["--lr", "1e-4", "--seed", "7", "--no-overlap-param-gather", "--check-config"]
    result = run(["bash", script(size), *flags], tmp_path, DATA_PATH="0.7 web 0.3 code")
    assert result.returncode == 0, result.stderr
    words = " ".join(result.stdout.split())
    assert "--lr 0.0001" in words and "--seed 7" in words and "--data-path 0.7 web 0.3 code" in words
    assert "--overlap-param-gather" not in words.replace("--no-overlap-param-gather", "")


def test_cluster_size_comes_from_the_variables_at_the_top(tmp_path):
    result = run(["bash", script("70b"), "--check-config"], tmp_path, NUM_NODES="128")
    assert "processes: 1024 = tensor 8 x pipeline 4 x data 32" in result.stdout
    result = run(["bash", script("7b"), "--check-config"], tmp_path, SLURM_NNODES="2", GPUS_PER_NODE="4")
    assert "processes: 8 = tensor 2 x pipeline 1 x data 4" in result.stdout


def test_a_wrong_combination_stops_with_code_2_and_all_problems(tmp_path):
    result = run(["bash", script("70b"), "--num-layers", "81", "--seq-length", "9000", "--check-config"], tmp_path)
    assert result.returncode == 2
    assert "--num-layers 81" in result.stderr and "--seq-length 9000" in result.stderr


def test_slurm_script_starts_the_example_on_each_node(tmp_path):
    """With stand-ins for scontrol and srun: the first node is the meeting point, flags are passed on."""
    (tmp_path / "scontrol").write_text("#!/bin/sh\necho node7\necho node8\n")
    (tmp_path / "srun").write_text('#!/bin/sh\necho "at $MASTER_ADDR:$MASTER_PORT"\nshift\nSLURM_NODEID=1 exec "$@"\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    slurm = {
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "41007",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    command = ["bash", str(ROOT / "scripts" / "slurm_train.sbatch")]
    result = run([*command, "7b", "--check-config"], tmp_path, **slurm)
    assert result.returncode == 0, result.stderr
    assert "at node7:21007" in result.stdout and "processes: 16" in result.stdout
    assert run([*command, "8b"], tmp_path, **slurm).returncode == 2
