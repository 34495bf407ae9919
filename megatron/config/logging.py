"""What a run says about itself: the log, TensorBoard, Weights & Biases, the metrics file, the progress bar."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.rules import above_zero, at_least, changed, raise_if, shown


@dataclass(frozen=True, kw_only=True)
class LoggingConfig:
    log_interval: int = flag(100)
    """Steps between log lines."""
    log_throughput: bool = flag(False)
    """Write throughput per GPU to TensorBoard as well."""
    log_params_norm: bool = flag(False)
    """Log the norm of all parameters."""
    log_num_zeros_in_grad: bool = flag(False)
    """Log how many gradient elements are zero."""
    log_progress: bool = flag(False)
    """Append a line for each start and save to progress.txt in --save."""
    log_memory_interval: int | None = flag(None)
    """Steps between lines on the memory of each rank of the first replica. None: no such lines."""
    timing_log_level: int = flag(0, choices=(0, 1, 2))
    """0: step time only; 1: phases of the step; 2: also each microbatch."""
    timing_log_option: str = flag("minmax", choices=("max", "minmax", "all"))
    """Timings of the slowest rank, of slowest and fastest, or of all."""
    tensorboard_dir: str | None = flag(None)
    """Directory of TensorBoard logs. None: none."""
    tensorboard_log_interval: int = flag(1)
    """Steps between TensorBoard points."""
    tensorboard_queue_size: int = flag(1000)
    """Points that may wait to be written."""
    log_timers_to_tensorboard: bool = flag(False)
    """Write timings to TensorBoard."""
    log_memory_to_tensorboard: bool = flag(False)
    """Write memory use to TensorBoard."""
    log_validation_ppl_to_tensorboard: bool = flag(False)
    """Write validation perplexity to TensorBoard."""
    log_world_size_to_tensorboard: bool = flag(False)
    """Write the number of processes to TensorBoard."""
    log_loss_scale_to_tensorboard: bool = flag(
        True, names=("--no-log-loss-scale-to-tensorboard", "--disable-log-loss-scale-to-tensorboard")
    )
    """Do not write the loss scale to TensorBoard."""
    wandb_project: str | None = flag(None)
    """Weights & Biases project. None: Weights & Biases is not used."""
    wandb_exp_name: str | None = flag(None)
    """Weights & Biases run name. Needed with --wandb-project."""
    wandb_entity: str | None = flag(None)
    """Weights & Biases entity. None: the account's own."""
    wandb_save_dir: str | None = flag(None)
    """Directory of Weights & Biases files. None: wandb in --save."""
    metrics_file: str | None = flag(None, own=True)
    """File that gets one JSON object for each log line and evaluation. None: metrics.jsonl in --save, or no file."""
    progress_bar: str = flag("auto", choices=("auto", "on", "off"), own=True)
    """Progress bar with the time left; auto: when standard error is a terminal."""
    profile: bool = flag(False)
    """Record the steps after --profile-step-start up to --profile-step-end, for Nsight Systems (on a GPU) or, with
    --use-pytorch-profiler, into a trace file in --tensorboard-dir."""
    profile_step_start: int = flag(10)
    """Steps done when recording starts."""
    profile_step_end: int = flag(12)
    """Last step that is recorded."""
    profile_ranks: tuple[int, ...] = flag((), nargs="+")
    """Ranks that record. None given: rank 0."""
    use_pytorch_profiler: bool = flag(False)
    """Record with torch's profiler; its file is read by TensorBoard, Perfetto and chrome://tracing."""
    pytorch_profiler_collect_shapes: bool = flag(False)
    """Record tensor shapes as well."""
    pytorch_profiler_collect_callstack: bool = flag(False)
    """Record Python stacks as well."""
    peak_tflops: float | None = flag(None, own=True)
    """Peak TFLOP/s of one rank, the denominator of MFU. None: from a table of GPUs; on a CPU measured once."""
    logging_level: int | None = flag(None)
    """Level of Python's logging (10 debug, 20 info, 30 warnings). None: info."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = at_least(self, 1, "log_interval", "tensorboard_log_interval", "tensorboard_queue_size")
        lines += at_least(self, 1, "log_memory_interval")
        lines += at_least(self, 0, "logging_level")
        lines += above_zero(self, "peak_tflops")
        lines += at_least(self, 0, "profile_step_start", "profile_step_end") + self._profile_problems()
        if self.wandb_project is not None and not self.wandb_exp_name:
            lines.append(f"--wandb-project {self.wandb_project} needs --wandb-exp-name, the name of the run; give it")
        if self.wandb_project is None:
            lines += [
                f"{shown(self, name)} would be ignored without --wandb-project; add that flag or drop it"
                for name in changed(self, "wandb_exp_name", "wandb_entity", "wandb_save_dir")
            ]
        return lines

    def _profile_problems(self) -> list[str]:
        if not self.profile:
            fields = ("profile_step_start", "profile_step_end", "profile_ranks", "use_pytorch_profiler")
            collected = ("pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack")
            return [
                f"{shown(self, name)} would be ignored without --profile; add that flag or drop it"
                for name in changed(self, *fields, *collected)
            ]
        lines = []
        if self.profile_step_end <= self.profile_step_start:
            lines.append(
                f"{shown(self, 'profile_step_end')} is not after {shown(self, 'profile_step_start')}: no step would be "
                "recorded; raise it"
            )
        if self.use_pytorch_profiler and self.tensorboard_dir is None:
            lines.append("--use-pytorch-profiler writes into --tensorboard-dir; give it")
        if not self.use_pytorch_profiler:
            lines += [
                f"{shown(self, name)} would be ignored without --use-pytorch-profiler; add that flag or drop it"
                for name in changed(self, "pytorch_profiler_collect_shapes", "pytorch_profiler_collect_callstack")
            ]
        return lines
