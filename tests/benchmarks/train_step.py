#!/usr/bin/env python3
"""Tokens per second and peak memory of one training step: ours, nanoGPT's model, and transformers' Llama.

    python tests/benchmarks/train_step.py            12 layers, 512 wide, 8 heads, sequence 512, vocabulary 32k
    python tests/benchmarks/train_step.py --dtype bf16 --threads 2 --rounds 5
    python tests/benchmarks/train_step.py --threads 1 --clock cpu           on a machine that others use too
    python tests/benchmarks/train_step.py --quick    a smoke test in seconds; its numbers mean nothing

Every contender lives in a process of its own. Rounds are interleaved, so that a machine which is busy for a while slows
all of them; the table shows medians over rounds, and ratios are medians of the ratios within a round. Memory is the
peak of the process, in brackets what of it came after the imports. The last lines compare ours with the fastest of
the others, and with the leanest of those that train the same way, i.e. with fp32 weights behind bf16 products: at
least 1.00 is the aim for speed, below 1.00 for memory. The table has the ratio to everyone.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from tests.benchmarks.contenders import CONTENDERS, Sizes  # noqa: E402  (after the path is set)

QUICK = Sizes(layers=2, hidden=64, heads=2, length=64, vocab=512, batch=2)


class Result(NamedTuple):
    """One contender in one number format."""

    name: str
    tokens_per_s: list[float]
    """A round each."""
    baseline_bytes: int
    peak_bytes: int
    loss: float

    @property
    def speed(self) -> float:
        """Median tokens per second."""
        return median(self.tokens_per_s)

    @property
    def grown_bytes(self) -> int:
        """Peak memory without what the imports took."""
        return self.peak_bytes - self.baseline_bytes


class Worker:
    """The process of one contender."""

    def __init__(self, name: str, dtype: str, sizes: Sizes, threads: int):
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
        command = [sys.executable, str(ROOT / "tests" / "benchmarks" / "worker.py"), name, dtype]
        self.process = subprocess.Popen(
            [*command, json.dumps(sizes), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=ROOT,
        )

    def wait_until_built(self) -> None:
        """Return when the contender can be timed."""
        self.baseline_bytes = int(self._answer()["baseline_bytes"])

    def round(self, steps: int) -> dict[str, float]:
        """Time `steps` steps."""
        self.process.stdin.write(f"{steps}\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> None:
        """Let the process end."""
        self.process.stdin.close()
        self.process.wait(timeout=60)

    def _answer(self) -> dict[str, float]:
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        raise RuntimeError(f"{self.name} ended with exit code {self.process.wait()}; its error is above")


def measure(dtype: str, sizes: Sizes, arguments: argparse.Namespace, progress: Progress) -> list[Result]:
    """All contenders that can do `dtype`, round by round in turn; one warm-up round each is not counted."""
    workers = []
    try:
        for name in (name for name, contender in CONTENDERS.items() if dtype in contender.dtypes):
            workers.append(Worker(name, dtype, sizes, arguments.threads))
        for worker in workers:
            progress.show(f"{dtype}: starting {worker.name}")
            worker.wait_until_built()
        answers: dict[str, list[dict[str, float]]] = {worker.name: [] for worker in workers}
        for number in range(1 + arguments.rounds):
            for worker in workers:
                progress.show(f"{dtype}: round {number} of {arguments.rounds}, {worker.name}")
                answers[worker.name].append(worker.round(arguments.steps if number else 1))
    finally:
        for worker in workers:
            worker.close()
    tokens = arguments.steps * sizes.batch * sizes.length
    return [
        Result(
            worker.name,
            [tokens / answer[arguments.clock] for answer in answers[worker.name][1:]],
            worker.baseline_bytes,
            int(answers[worker.name][-1]["peak_bytes"]),
            answers[worker.name][-1]["loss"],
        )
        for worker in workers
    ]


def speed_ratio(mine: Result, others: Sequence[Result]) -> float:
    """Ours over the fastest of the others, median over rounds."""
    rivals = [max(speeds) for speeds in zip(*(other.tokens_per_s for other in others))]
    return median(own / rival for own, rival in zip(mine.tokens_per_s, rivals))


def table(dtype: str, results: Sequence[Result]) -> list[str]:
    """The results of one number format as lines."""
    lines = [
        f"{dtype:<20}{'tokens/s':>10}{'ours / it':>11}   {'peak MiB (after imports)':<26}{'ours / it':>9}{'loss':>9}",
    ]
    ours = {CONTENDERS[result.name].family: result for result in results if CONTENDERS[result.name].is_ours}
    others = [result for result in results if not CONTENDERS[result.name].is_ours]
    for result in results:
        mine = ours[CONTENDERS[result.name].family]
        memory = f"{result.peak_bytes / 2**20:.0f} ({result.grown_bytes / 2**20:.0f})"
        fatness = mine.peak_bytes / result.peak_bytes
        lines.append(
            f"{result.name:<20}{result.speed:>10.0f}{speed_ratio(mine, [result]):>11.2f}   {memory:<26}{fatness:>9.2f}"
            f"{result.loss:>9.3f}"
        )
    for family, mine in ours.items():
        same = [other for other in others if CONTENDERS[other.name].family == family]
        for what, rivals in (("its own family", same), ("all", others)):
            equals = [rival for rival in rivals if CONTENDERS[rival.name].keeps_fp32_weights]
            leanest = min(equals, key=lambda rival: rival.peak_bytes)
            lines.append(
                f"ours-{family} / best of {what}: speed ratio {speed_ratio(mine, rivals):.2f} (aim: at least 1.00), "
                f"memory ratio {mine.peak_bytes / leanest.peak_bytes:.2f} (aim: below 1.00), "
                f"after imports {mine.grown_bytes / leanest.grown_bytes:.2f}"
            )
    return lines


class Progress:
    """Says on standard error what is being done: one line that is written over on a terminal, else a line each."""

    def __init__(self, is_terminal: bool):
        self.is_terminal, self.start = is_terminal, time.monotonic()

    def show(self, text: str) -> None:
        """Say it."""
        line = f"[{time.monotonic() - self.start:5.0f} s] {text}"
        sys.stderr.write(f"\r\033[K{line}" if self.is_terminal else f"{line}\n")
        sys.stderr.flush()

    def clear(self) -> None:
        """Make room for the table."""
        if self.is_terminal:
            sys.stderr.write("\r\033[K")


def read_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16", "both"), default="both")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="intra-op threads of each contender")
    parser.add_argument("--rounds", type=int, default=3, help="how often each contender is timed")
    parser.add_argument("--steps", type=int, default=1, help="training steps of a round")
    parser.add_argument("--micro-batch-size", type=int, default=Sizes().batch, help="sequences of a step")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="cpu: processor time, for one thread on a machine that others use too; waiting for a core does not count",
    )
    parser.add_argument("--quick", action="store_true", help="a tiny model: does it run?")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    """Measure and print; returns the exit code."""
    arguments = read_arguments(argv)
    sizes = QUICK if arguments.quick else Sizes(batch=arguments.micro_batch_size)
    progress = Progress(sys.stderr.isatty())
    print(
        f"one process, {arguments.threads} threads, {arguments.rounds} rounds of {arguments.steps} steps, "
        f"{arguments.clock} time; {sizes}"
    )
    for dtype in ("fp32", "bf16") if arguments.dtype == "both" else (arguments.dtype,):
        lines = table(dtype, measure(dtype, sizes, arguments, progress))
        progress.clear()
        print("", *lines, sep="\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
