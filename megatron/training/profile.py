"""--profile: record a few steps, with torch's profiler into a trace file or, on a GPU, for Nsight Systems.

Steps profile_step_start + 1 to profile_step_end are recorded, counted from 1 over the whole run; a run that resumes
among them records the rest. Only the ranks of --profile-ranks record, so a profiler issues no collective.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from megatron.config.logging import LoggingConfig
from megatron.distributed.context import ParallelContext
from megatron.distributed.device import has_kernels_of_its_own, mark_for_nsight


class StepProfiler:
    """Starts and stops a recording around the steps asked for.

    Args:
        logging: which steps and ranks, and how.
        ctx: this rank; its device says what can be recorded.
        say: prints a line about the file written.

    Raises ValueError where steps would be marked for Nsight Systems on a CPU.
    """

    def __init__(self, logging: LoggingConfig, ctx: ParallelContext, say: Callable[[str], None]):
        if logging.profile and not logging.use_pytorch_profiler and not has_kernels_of_its_own(ctx.device):
            raise ValueError(
                "--profile marks steps for Nsight Systems, which needs a GPU; add --use-pytorch-profiler for a trace "
                "of this CPU run"
            )
        self.logging, self.rank, self.device, self.say = logging, ctx.rank, ctx.device, say
        self.is_on = logging.profile and ctx.rank in (logging.profile_ranks or (0,))
        self._stop: Callable[[int], None] | None = None

    def before_step(self, num_done: int) -> None:
        """Start if the next step, the one after `num_done`, is the first to record."""
        logging = self.logging
        if self.is_on and self._stop is None and logging.profile_step_start <= num_done < logging.profile_step_end:
            self._stop = self._trace(num_done) if logging.use_pytorch_profiler else mark_for_nsight()

    def after_step(self, num_done: int) -> None:
        """Stop if step `num_done` was the last to record."""
        if num_done >= self.logging.profile_step_end:
            self.close(num_done)

    def close(self, num_done: int) -> None:
        """Stop if recording: the run ends."""
        if self._stop is not None:
            stop, self._stop, self.is_on = self._stop, None, False
            stop(num_done)

    def _trace(self, num_done: int) -> Callable[[int], None]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if has_kernels_of_its_own(self.device):
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        profiler = torch.profiler.profile(
            activities=activities,
            record_shapes=self.logging.pytorch_profiler_collect_shapes,
            with_stack=self.logging.pytorch_profiler_collect_callstack,
        )
        profiler.start()

        def stop(last: int) -> None:
            profiler.stop()
            directory = Path(self.logging.tensorboard_dir)
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / f"rank{self.rank}.steps{num_done + 1}-{last}.pt.trace.json.gz"
            profiler.export_chrome_trace(str(path))
            self.say(f"rank {self.rank}: trace of steps {num_done + 1} to {last} in {path}")

        return stop
