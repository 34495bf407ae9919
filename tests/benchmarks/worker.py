"""One contender in a process of its own, so that its peak memory is its own: `worker.py NAME DTYPE SIZES THREADS`.

Reads the number of steps to time from standard input, a line a round, and answers with a line of JSON. Before the first
it says what importing took; the baseline of memory is the peak so far, imports included.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch  # noqa: E402  (after the path is set)

from tests.benchmarks.contenders import CONTENDERS, Sizes, batches  # noqa: E402


def peak_bytes() -> int:
    """The most memory that this process ever held."""
    status = Path("/proc/self/status")
    if status.exists():  # ru_maxrss counts what the parent held at the fork
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def say(**values: float | str) -> None:
    """Answer the parent."""
    print(json.dumps(values), flush=True)


def main(name: str, dtype: str, sizes_json: str, threads: str) -> None:
    """Build the contender, then time rounds until standard input ends."""
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    contender, sizes = CONTENDERS[name], Sizes(*json.loads(sizes_json))
    contender.prepare()
    baseline = peak_bytes()
    step, text = contender.build(sizes, dtype), batches(sizes)
    say(baseline_bytes=baseline)
    for line in sys.stdin:
        start, start_cpu = time.perf_counter(), time.process_time()
        for _ in range(int(line)):
            loss = step(*next(text))
        wall, cpu = time.perf_counter() - start, time.process_time() - start_cpu
        say(wall=wall, cpu=cpu, loss=loss, peak_bytes=peak_bytes())


if __name__ == "__main__":
    main(*sys.argv[1:])
