"""The program as a user starts it: real processes, real signals, exit codes, and what stands on the screen."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.ledger.events import read
from megatron.ledger.goodput import account
from megatron.training import exit_codes
from tests.training.runs import corpus

ROOT = Path(__file__).resolve().parent.parent
PROGRAM = str(ROOT / "pretrain_gpt.py")
TINY = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --tokenizer-type NullTokenizer --vocab-size 128 "
    "--split 8,1,1 --log-interval 1 --eval-iters 1 --distributed-backend gloo --distributed-timeout-minutes 2 "
    "--peak-tflops 1"
).split()
TIMEOUT_S = 240
CLEAN = {name: value for name, value in os.environ.items() if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE")}


def flags(text: str = "") -> list[str]:
    return [*TINY, "--data-path", corpus(), *text.split()]


def torchrun(ranks: int, *words: str) -> list[str]:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--master-port", free_port()]
    return [*command, *words]


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def run(command: list[str], **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=ROOT, env={**CLEAN, **environment}, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def start_ranks(count: int, words: list[str], directory: Path) -> list[subprocess.Popen]:
    """Ranks without a launcher, each with its own output file, so that every exit code is seen."""
    port, ranks = free_port(), []
    for rank in range(count):
        places = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count)}
        environment = {**CLEAN, **places, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        with open(directory / f"rank{rank}.txt", "w") as output:
            command = [sys.executable, "-u", PROGRAM, *words]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=output))
    return ranks


def wait_for(text: str, path: Path) -> None:
    """Until `path` holds `text`."""
    end = time.monotonic() + TIMEOUT_S
    while text not in path.read_text():
        assert time.monotonic() < end, f"{text!r} never came in:\n{path.read_text()}"
        time.sleep(0.05)


def finish(processes: list[subprocess.Popen]) -> list[int]:
    try:
        return [process.wait(timeout=TIMEOUT_S) for process in processes]
    finally:
        for process in processes:
            process.kill()


def checkpoints(directory: Path) -> list[int]:
    return sorted(int(path.name[5:]) for path in directory.glob("iter_*") if path.name[5:].isdigit())


def losses(path: Path) -> dict[int, float]:
    entries = map(json.loads, path.read_text().splitlines())
    return {entry["iteration"]: entry["loss"] for entry in entries if entry["event"] == "train"}


def test_check_config_prints_what_would_run_without_torch():
    program = (
        "import sys, pretrain_gpt\ntry: pretrain_gpt.main(sys.argv[1:])\n"
        "except SystemExit as end: sys.exit(70 if 'torch' in sys.modules else end.code)"
    )
    words = flags("--train-iters 5 --tensor-model-parallel-size 2 --check-config")
    done = run([sys.executable, "-c", program, *words], RANK="0", LOCAL_RANK="0", WORLD_SIZE="4")
    assert done.returncode == exit_codes.COMPLETE, done.stderr
    assert "4 = tensor 2 x pipeline 1 x data 2" in done.stdout and "--hidden-size 32" in done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_flags_end_every_rank_with_2_and_one_rank_speaks(rank):
    words = flags("--train-iters 5 --hiden-size 3 --num-query-groups 3 --group-query-attention")
    done = run([sys.executable, PROGRAM, *words], RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2")
    assert done.returncode == exit_codes.USAGE
    assert done.stdout == ""
    if rank == 0:
        lines = done.stderr.splitlines()
        assert all(line.startswith("error: ") for line in lines) and len(lines) >= 2
        assert "--hidden-size" in done.stderr and "Traceback" not in done.stderr
    else:
        assert done.stderr == ""


def test_train_save_resume_on_another_layout_and_evaluate(tmp_path):
    save = f"--train-iters 6 --save {tmp_path} --save-interval 3 --eval-interval 3 --tensorboard-dir {tmp_path}/tb"
    first = run(torchrun(2, PROGRAM, *flags(f"{save} --tensor-model-parallel-size 2 --exit-interval 3")))
    assert first.returncode == 0, first.stderr
    assert "finished (exit-interval) at iteration 3" in first.stdout
    second = run(torchrun(2, PROGRAM, *flags(f"{save} --load {tmp_path} --pipeline-model-parallel-size 2")))
    assert second.returncode == 0, second.stderr
    assert "loaded checkpoint of iteration 3" in second.stdout
    assert "validation loss at iteration 6 on test set" in second.stdout
    assert checkpoints(tmp_path) == [3, 6]
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == "6"
    assert len(list((tmp_path / "tb").glob("events.*"))) == 2
    whole = run([sys.executable, PROGRAM, *flags(f"--train-iters 6 --metrics-file {tmp_path}/whole.jsonl")])
    assert whole.returncode == 0, whole.stderr
    assert losses(tmp_path / "metrics.jsonl") == pytest.approx(losses(tmp_path / "whole.jsonl"), rel=1e-5)
    ledger = account(read(tmp_path / "ledger.jsonl"))
    assert ledger.seconds["down"] > 0 and ledger.seconds["lost"] == 0 and ledger.seconds["productive"] > 0


@pytest.mark.parametrize("layout", ["", "--pipeline-model-parallel-size 2"])
def test_a_signal_to_one_worker_stops_all_with_one_checkpoint(tmp_path, layout):
    """Twice to the last rank: the second one changes nothing."""
    words = flags(f"--train-iters 100000 --save {tmp_path} --save-interval 50000 --eval-iters 0 {layout}")
    ranks = start_ranks(2, words, tmp_path)
    wait_for("iteration        2/", tmp_path / "rank0.txt")
    ranks[1].send_signal(signal.SIGTERM)
    time.sleep(0.1)
    ranks[1].send_signal(signal.SIGTERM)
    assert finish(ranks) == [exit_codes.STOPPED_BY_SIGNAL] * 2, (tmp_path / "rank0.txt").read_text()
    (step,) = checkpoints(tmp_path)
    log = (tmp_path / "rank0.txt").read_text()
    assert f"finished (signal) at iteration {step}" in log and log.count("saved checkpoint") == 1
    assert int(re.findall(r"iteration +(\d+)/", log)[-1]) == step
    assert [event.fields for event in read(tmp_path / "ledger.jsonl") if event.ev == "stop"] == [
        {"reason": "signal", "step": step}
    ]


def test_a_signal_to_the_launcher_saves_too(tmp_path):
    words = flags(f"--train-iters 100000 --save {tmp_path} --save-interval 50000 --eval-iters 0")
    with open(tmp_path / "out.txt", "w") as output:
        job = subprocess.Popen(torchrun(2, PROGRAM, *words), cwd=ROOT, env=CLEAN, stdout=output, stderr=output)
    wait_for("iteration        2/", tmp_path / "out.txt")
    job.send_signal(signal.SIGTERM)
    assert finish([job])[0] != 0
    (step,) = checkpoints(tmp_path)
    resumed = run([sys.executable, PROGRAM, *flags(f"--train-iters {step + 2} --load {tmp_path} --eval-iters 0")])
    assert resumed.returncode == 0 and f"iteration {step + 1:8d}/" in resumed.stdout, resumed.stderr


def test_a_wanted_checkpoint_that_is_not_there_stops_all_ranks(tmp_path):
    ranks = start_ranks(2, flags(f"--train-iters 5 --load {tmp_path}/nowhere"), tmp_path)
    assert finish(ranks) == [exit_codes.FAILED] * 2
    text = (tmp_path / "rank0.txt").read_text()
    assert text.count("nowhere: no such directory") == 1 and "Traceback" not in text and "lm loss" not in text


def test_an_error_of_one_rank_is_said_and_ends_the_job():
    """Rank 1 alone cannot read its data; nobody waits for it for ever."""
    line = f"exec {sys.executable} {PROGRAM} {' '.join(TINY)} --train-iters 5 --data-path"
    script = f"if [ $RANK = 1 ]; then {line} /nowhere/text; else {line} {corpus()}; fi"
    done = run(torchrun(2, "--no-python", "sh", "-c", script))
    assert done.returncode != 0
    assert "/nowhere/text" in done.stderr and "[rank 1] error:" in done.stderr
