"""A pool of gloo processes that lives as long as the test session: a test pays for a process group, not for processes.

Gloo's sends wait for their receiver, so these ranks show deadlocks that buffered sends hide. The processes come from a
fork server that has imported torch once, run one intra-op thread each, and take one job at a time: a module-level
function, a mesh, arguments. A rank's exception comes back with its traceback; a rank that hangs has its stack printed,
and the pool is killed and started anew.
"""

from __future__ import annotations

import atexit
import faulthandler
import importlib.util
import multiprocessing
import multiprocessing.connection
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from megatron.topology.mesh import Mesh

START_SIZE = 4
GRACE_S = 10.0


class Job(NamedTuple):
    """What one rank is asked to do."""

    module: str
    path: str
    function: str
    arguments: bytes
    rank: int
    mesh: Mesh
    store_path: str
    launch_options: dict[str, Any]


class Failure(NamedTuple):
    """What went wrong on one rank."""

    rank: int
    error: BaseException | None
    description: str


class GlooPool:
    """Worker processes and the pipes to them."""

    def __init__(self):
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.pipes: list[multiprocessing.connection.Connection] = []
        self.scratch = Path(tempfile.mkdtemp(prefix="gloo_pool_"))
        self.num_jobs = 0

    def run(
        self, function: Callable, mesh: Mesh, arguments: tuple, launch_options: dict, timeout_s: float
    ) -> list[Any]:
        """function(ctx, *arguments) on every rank of `mesh`; results in rank order, the first rank's failure raised."""
        self._grow(max(START_SIZE, mesh.world_size))
        self.num_jobs += 1
        store = self.scratch / f"store_{self.num_jobs}"
        module = sys.modules[function.__module__]
        payload = pickle.dumps(arguments)
        for rank in range(mesh.world_size):
            job = Job(
                module.__name__, module.__file__, function.__qualname__, payload, rank, mesh, str(store), launch_options
            )
            self.pipes[rank].send_bytes(pickle.dumps(job))
        answers, failures = self._collect(mesh.world_size, timeout_s)
        if len(answers) + len(failures) < mesh.world_size or any(failure.error is None for failure in failures):
            self.close()
        store.unlink(missing_ok=True)
        if failures:
            _raise(min(failures, key=lambda failure: failure.error is not None))  # a death explains the others
        return [pickle.loads(answers[rank]) for rank in range(mesh.world_size)]

    def close(self) -> None:
        """Ends all processes; the next `run` starts new ones."""
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(timeout=0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self.pipes, self.processes = [], []

    def remove(self) -> None:
        """Ends all processes and deletes the scratch folder."""
        self.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def _grow(self, size: int) -> None:
        if any(not process.is_alive() for process in self.processes):
            self.close()
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
        for rank in range(len(self.processes), size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, str(self._stack_file(rank))), name=f"rank{rank}")
            process.start()
            theirs.close()
            self.pipes.append(mine)
            self.processes.append(process)

    def _stack_file(self, rank: int) -> Path:
        return self.scratch / f"stack_{rank}"

    def _collect(self, world_size: int, timeout_s: float) -> tuple[dict[int, bytes], list[Failure]]:
        """Answers by rank, failures in order of arrival; after the first failure the others get `GRACE_S` to follow."""
        answers: dict[int, bytes] = {}
        failures: list[Failure] = []
        waiting = set(range(world_size))
        deadline = time.monotonic() + timeout_s
        while waiting:
            ready = multiprocessing.connection.wait(
                [self.pipes[rank] for rank in waiting], timeout=max(0.0, deadline - time.monotonic())
            )
            if not ready:
                if not failures:
                    failures.append(self._hung(waiting, timeout_s))
                break
            for rank in [rank for rank in waiting if self.pipes[rank] in ready]:
                waiting.discard(rank)
                try:
                    is_result, body = pickle.loads(self.pipes[rank].recv_bytes())
                except (EOFError, ConnectionError):
                    self.processes[rank].join(timeout=1)
                    failures.append(Failure(rank, None, f"the process died, exit code {self.processes[rank].exitcode}"))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
                    continue
                if is_result:
                    answers[rank] = body
                else:
                    failures.append(_unpacked(rank, *body))
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return answers, failures

    def _hung(self, ranks: set[int], timeout_s: float) -> Failure:
        for rank in ranks:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.3)
        stacks = "\n".join(f"rank {rank}:\n{self._stack_file(rank).read_text()}" for rank in sorted(ranks))
        names = ", ".join(map(str, sorted(ranks)))
        return Failure(
            min(ranks), None, f"no answer from ranks {names} after {timeout_s:g} s; they were here:\n{stacks}"
        )


def raise_from_rank(error: BaseException, rank: int) -> None:
    """Raises `error` itself with the rank at the head of its message."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"[rank {rank}] {error.args[0]}", *error.args[1:])
    raise error


def _raise(failure: Failure) -> None:
    if failure.error is None:
        raise RuntimeError(f"[rank {failure.rank}] {failure.description}")
    failure.error.__cause__ = RuntimeError(f"traceback of rank {failure.rank}:\n{failure.description}")
    raise_from_rank(failure.error, failure.rank)


def _unpacked(rank: int, pickled: bytes | None, description: str) -> Failure:
    error: BaseException = RuntimeError(description.strip().splitlines()[-1])
    if pickled is not None:
        try:
            error = pickle.loads(pickled)
        except Exception as problem:  # an exception class whose constructor wants more than its args
            description += f"\n(the exception itself cannot be rebuilt: {problem})"
    return Failure(rank, error, description)


def _serve(pipe: multiprocessing.connection.Connection, stack_file: str) -> None:
    """Body of a worker process: jobs from the pipe until it closes."""
    import torch

    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    with open(stack_file, "w") as stacks:
        faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
        while True:
            try:
                job = pickle.loads(pipe.recv_bytes())
            except EOFError:
                return
            _work(pipe, job)


def _work(pipe: multiprocessing.connection.Connection, job: Job) -> None:
    """Runs one job. The answer is sent before the groups are closed, so that the first failure arrives first."""
    import torch

    from megatron.distributed.launch import launch

    try:
        function = _load(job)
        arguments = pickle.loads(job.arguments)
        store = torch.distributed.FileStore(job.store_path, job.mesh.world_size)
        torch.manual_seed(job.launch_options["init_seed"])
        with launch(mesh=job.mesh, rank=job.rank, backend="gloo", store=store, **job.launch_options) as ctx:
            try:
                answer = (True, pickle.dumps(function(ctx, *arguments)))
            except BaseException as error:
                answer = (False, _packed(error))
            pipe.send_bytes(pickle.dumps(answer))
    except BaseException as error:
        if "answer" not in locals():
            pipe.send_bytes(pickle.dumps((False, _packed(error))))


def _packed(error: BaseException) -> tuple[bytes | None, str]:
    try:
        pickled = pickle.dumps(error)
    except Exception:  # an exception that carries something unpicklable travels as text
        pickled = None
    return pickled, "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _load(job: Job) -> Callable:
    """The function, from its file if its module is not imported yet: a test module has no importable name."""
    module = sys.modules.get(job.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(job.module, job.path)
        module = sys.modules[job.module] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[job.module]
            raise
    found: Any = module
    for part in job.function.split("."):
        if part == "<locals>":
            raise ValueError(f"{job.function} is a local function; ranks in processes need one at module level")
        found = getattr(found, part)
    return found


_POOL = GlooPool()
atexit.register(_POOL.remove)


def shared_pool() -> GlooPool:
    """The one pool of this test session; its processes start on the first job."""
    return _POOL
