"""RunConfig: all concerns of a run, what follows from them, and `parse`, which reads and checks them.

Nothing here imports torch. Derived values are properties under names of their own; nothing is written back to a field.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from megatron.config import checks
from megatron.config.batch_schedule import BatchSchedule, batch_steps
from megatron.config.checkpoint import CheckpointConfig
from megatron.config.command_line import help_page, read_words
from megatron.config.config_file import words_of_file
from megatron.config.data import DataConfig
from megatron.config.flags import ConfigError, options, unchecked
from megatron.config.logging import LoggingConfig
from megatron.config.model import ModelConfig
from megatron.config.optimizer import OptimizerConfig
from megatron.config.parallel import ParallelConfig
from megatron.config.pipeline_layout import PipelineLayout, pipeline_layout
from megatron.config.precision import PrecisionConfig
from megatron.config.recompute import RecomputeConfig
from megatron.config.resilience import ResilienceConfig
from megatron.config.stored import function_mismatches, take_stored
from megatron.config.training import TrainingConfig

CONCERNS: dict[str, type] = {
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "training": TrainingConfig,
    "recompute": RecomputeConfig,
    "optimizer": OptimizerConfig,
    "precision": PrecisionConfig,
    "data": DataConfig,
    "checkpoint": CheckpointConfig,
    "logging": LoggingConfig,
    "resilience": ResilienceConfig,
}


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    model: ModelConfig
    parallel: ParallelConfig
    training: TrainingConfig
    recompute: RecomputeConfig
    optimizer: OptimizerConfig
    precision: PrecisionConfig
    data: DataConfig
    checkpoint: CheckpointConfig
    logging: LoggingConfig
    resilience: ResilienceConfig
    extras: tuple[Any, ...] = ()
    """Instances of the classes that a fork added."""
    world_size: int = 1
    """Processes of the run."""
    origins: Mapping[str, str] = field(default_factory=dict, compare=False)
    """Field -> typed, file or stored, for every field that was given."""
    notices: tuple[str, ...] = field(default=(), compare=False)
    """Lines to print at the start: flags without effect, settings that another one switches off."""

    @classmethod
    def from_flags(cls, flags: str, world_size: int = 1, extra_configs: Sequence[type] = ()) -> RunConfig:
        """A checked configuration from a line of flags, for notebooks, tools and tests.

        What a run must have and the line leaves out is filled in: one sequence of 32 mock tokens and one step.
        """
        return parse(shlex.split(flags), world_size, extra_configs, fill_in=_small_run)

    def origin(self, name: str) -> str:
        """Where the value of field `name` came from: typed, file, stored or default."""
        return self.origins.get(name, "default")

    def extra(self, concern: type) -> Any:
        """The instance of a fork's class."""
        return next(extra for extra in self.extras if type(extra) is concern)

    @property
    def concerns(self) -> tuple[Any, ...]:
        """All concerns, the forks' last."""
        return (*(getattr(self, name) for name in CONCERNS), *self.extras)

    # ---- the model's sizes

    @property
    def ffn_size(self) -> int:
        """Inner width of the MLP."""
        return self.model.ffn_size

    @property
    def head_dim(self) -> int:
        """Width of an attention head."""
        return self.model.head_dim

    @property
    def num_kv_heads(self) -> int:
        """Key and value heads."""
        return self.model.num_kv_heads

    def padded_vocab(self, vocab_size: int) -> int:
        """Rows of the embedding for a tokenizer of `vocab_size` tokens."""
        tensor = self.parallel.tensor_model_parallel_size
        if self.model.padded_vocab_size is not None:
            padded = self.model.padded_vocab_size
            if padded < vocab_size or padded % tensor:
                raise ValueError(
                    f"--padded-vocab-size {padded} must be at least the vocabulary of {vocab_size} tokens and divide "
                    "by "
                    f"--tensor-model-parallel-size {tensor}; use {-(-vocab_size // tensor) * tensor} or more"
                )
            return padded
        multiple = self.model.make_vocab_size_divisible_by * tensor if self.model.pad_vocab_size else tensor
        if not self.model.pad_vocab_size and vocab_size % tensor:
            raise ValueError(
                f"--no-pad-vocab-size with a vocabulary of {vocab_size} tokens, which does not divide by "
                f"--tensor-model-parallel-size {tensor}; drop --no-pad-vocab-size"
            )
        return -(-vocab_size // multiple) * multiple

    def vocab_room(self, vocab_size: int) -> int:
        """Rows of the embedding that every layout has: those of one tensor-parallel rank's padding."""
        if self.model.padded_vocab_size is not None:
            return self.model.padded_vocab_size
        multiple = self.model.make_vocab_size_divisible_by if self.model.pad_vocab_size else 1
        return -(-vocab_size // multiple) * multiple

    @property
    def params_dtype_name(self) -> str:
        """fp32, bf16 or fp16."""
        return "bf16" if self.precision.bf16 else "fp16" if self.precision.fp16 else "fp32"

    # ---- layout

    @property
    def data_parallel_size(self) -> int:
        """Replicas of the model."""
        return self.world_size // self.parallel.model_parallel_size

    @property
    def mesh_order(self) -> str:
        """Axes from fastest to slowest, as `topology.Mesh` takes them."""
        return "tp-cp-pp-dp" if self.parallel.use_tp_pp_dp_mapping else "tp-cp-dp-pp"

    @property
    def sequence_parallel(self) -> bool:
        """Whether activations are sharded along the sequence; never with one tensor-parallel rank."""
        return self.parallel.sequence_parallel and self.parallel.tensor_model_parallel_size > 1

    @property
    def data_parallel_sharding(self) -> str:
        """no_shard or optim."""
        return self.parallel.sharding

    def ddp_bucket_elements(self, num_parameters: int) -> int | None:
        """Elements of a gradient bucket on a rank that holds so many parameters; None: one bucket for everything."""
        if self.parallel.ddp_num_buckets is not None:
            return -(-num_parameters // self.parallel.ddp_num_buckets)
        if self.parallel.ddp_bucket_size is not None:
            return self.parallel.ddp_bucket_size
        return max(40_000_000, 1_000_000 * self.data_parallel_size) if self.parallel.overlap_grad_reduce else None

    @cached_property
    def pipeline_layout(self) -> PipelineLayout:
        """Which layers each stage and chunk holds."""
        return layout_of(self.model, self.parallel)

    @property
    def pipeline_schedule(self) -> str:
        """gpipe, 1f1b or interleaved."""
        if self.parallel.pipeline_schedule is not None:
            return self.parallel.pipeline_schedule
        return "interleaved" if self.pipeline_layout.num_chunks > 1 else "1f1b"

    # ---- batches and lengths

    @property
    def batch_schedule(self) -> BatchSchedule:
        """Global batch size over the run."""
        size = self.training.global_batch_size or self.training.micro_batch_size * self.data_parallel_size
        if self.training.step_batch_size_schedule is not None:
            steps = batch_steps(self.training.step_batch_size_schedule, self.data.seq_length)
            return BatchSchedule(global_batch_size=steps[-1][1], steps=steps)
        if self.training.rampup_batch_size is None:
            return BatchSchedule(global_batch_size=size)
        start, increment, samples = self.training.rampup_batch_size
        return BatchSchedule(global_batch_size=size, start=start, increment=increment, ramp_samples=samples)

    @property
    def eval_batch_size(self) -> int:
        """Global batch of an evaluation."""
        return self.training.eval_global_batch_size or self.batch_schedule.global_batch_size

    @property
    def eval_micro_batch_size(self) -> int:
        """Microbatch of an evaluation."""
        return self.training.eval_micro_batch_size or self.training.micro_batch_size

    def batch_size_at(self, consumed_samples: int) -> int:
        """Global batch of the step that starts after `consumed_samples`."""
        return self.batch_schedule.size_at(consumed_samples)

    def num_microbatches(self, batch_size: int) -> int:
        """Microbatches of one replica for a global batch of `batch_size`."""
        return batch_size // (self.training.micro_batch_size * self.data_parallel_size)

    @property
    def train_iterations(self) -> int:
        """Optimizer steps of the whole run."""
        if self.training.train_samples is not None:
            return self.batch_schedule.iterations_for(self.training.train_samples)
        return self.training.train_iters or 0

    @property
    def train_samples_total(self) -> int:
        """Samples of the whole run."""
        return self.batch_schedule.samples_after(self.train_iterations)


def layout_of(model: ModelConfig, parallel: ParallelConfig) -> PipelineLayout:
    """The pipeline layout that the flags ask for; ValueError when it does not fit."""
    return pipeline_layout(
        num_layers=model.num_layers,
        pipeline_model_parallel_size=parallel.pipeline_model_parallel_size,
        num_layers_per_virtual_pipeline_stage=parallel.num_layers_per_virtual_pipeline_stage,
        num_virtual_stages_per_pipeline_rank=parallel.num_virtual_stages_per_pipeline_rank,
        decoder_first_pipeline_num_layers=parallel.decoder_first_pipeline_num_layers,
        decoder_last_pipeline_num_layers=parallel.decoder_last_pipeline_num_layers,
        account_for_embedding_in_pipeline_split=parallel.account_for_embedding_in_pipeline_split,
        account_for_loss_in_pipeline_split=parallel.account_for_loss_in_pipeline_split,
        pipeline_model_parallel_layout=parallel.pipeline_model_parallel_layout,
    )


def parse(
    argv: Sequence[str],
    world_size: int,
    extra_configs: Sequence[type] = (),
    *,
    read_stored: Callable[[CheckpointConfig], Mapping[str, Any] | None] | None = None,
    fill_in: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None,
) -> RunConfig:
    """The configuration that `argv` asks for, checked; ConfigError holds every problem found.

    extra_configs: dataclasses of `flag` fields that a fork adds. read_stored: called under --use-checkpoint-args,
    returns what `to_dict` stored in the checkpoint that --load names, or None when there is none; ValueError and
    OSError become problems. fill_in: given fields -> fields with values in place of their defaults.
    """
    concerns = (*CONCERNS.values(), *extra_configs)
    typed = read_words(argv, concerns)
    problems, notices = list(typed.problems), list(typed.notices)
    file_values: dict[str, Any] = {}
    if typed.values.get("config"):
        try:
            from_file = read_words(words_of_file(typed.values["config"], concerns), concerns)
            file_values = from_file.values
            problems.extend(f"{typed.values['config']}: {problem}" for problem in from_file.problems)
            notices.extend(f"{typed.values['config']}: {notice}" for notice in from_file.notices)
        except ConfigError as error:
            problems.extend(error.problems)
    given = {**file_values, **typed.values}
    origins = {**dict.fromkeys(file_values, "file"), **dict.fromkeys(typed.values, "typed")}
    if given.get("use_checkpoint_args") and read_stored is None:
        problems.append("--use-checkpoint-args: this program does not read configurations from checkpoints; drop it")
    elif given.get("use_checkpoint_args") and given.get("load"):
        taken = _take_stored(unchecked(CheckpointConfig, given), given, read_stored, problems)
        if taken is None:  # without the model every further line would be about what the checkpoint should have said
            raise ConfigError(problems)
        origins = {**dict.fromkeys(taken, "stored"), **origins}
        given = {**taken, **given}
    values = {**(fill_in(given) if fill_in is not None else {}), **given}
    extras = [_build_extra(concern, values, problems) for concern in extra_configs]
    config = RunConfig(
        **{name: unchecked(concern, values) for name, concern in CONCERNS.items()},
        extras=tuple(extra for extra in extras if extra is not None),
        world_size=world_size,
        origins=origins,
        notices=tuple([*notices, *checks.notices(values)]),
    )
    problems.extend(problem for name in CONCERNS for problem in getattr(config, name).problems())
    problems.extend(checks.problems(config))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return config


def _small_run(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `RunConfig.from_flags` fills in."""
    fill: dict[str, Any] = {"micro_batch_size": 1, "seq_length": 32, "lr": 1e-3}
    fill["max_position_embeddings"] = given.get("seq_length", 32)
    if not given.keys() & {"train_iters", "train_samples"}:
        fill["train_iters"] = 1
    if not any(name.endswith(("data_path", "data_args_path")) for name in given):
        fill["mock_data"] = True
    if "tokenizer_type" not in given:
        fill.update(tokenizer_type="NullTokenizer", vocab_size=128)
    return fill


def _take_stored(checkpoint: CheckpointConfig, given: dict[str, Any], read_stored, problems: list[str]) -> dict | None:
    """Fields to take from the checkpoint under --use-checkpoint-args; None when it cannot be read."""
    try:
        stored = read_stored(checkpoint)
    except (ValueError, OSError) as error:
        problems.append(f"--use-checkpoint-args: {' '.join(str(error).split())}")
        return None
    if stored is None:
        problems.append(
            f"--use-checkpoint-args --load {checkpoint.load}: there is no checkpoint to take the configuration from; "
            "correct --load or drop --use-checkpoint-args"
        )
        return None
    taken = take_stored(stored, given, checkpoint.use_tokenizer_model_from_checkpoint_args)
    merged = {**taken, **given}
    problems.extend(
        f"{line}; drop the typed flag, or drop --use-checkpoint-args to start another model"
        for line in function_mismatches(unchecked(ModelConfig, merged), stored)
    )
    return taken


def _build_extra(concern: type, values: Mapping[str, Any], problems: list[str]) -> Any:
    """An instance of a fork's class; what its __post_init__ refuses becomes a problem."""
    try:
        return concern(**{o.field: values[o.field] for o in options(concern) if o.field in values})
    except ValueError as error:
        problems.extend(str(error).splitlines())
        return None


def parse_or_exit(argv: Sequence[str], world_size: int, extra_configs: Sequence[type] = (), *, rank: int = 0, **rest):
    """`parse` for programs: rank 0 prints help, problems and notices; a problem exits with 2 on every rank."""
    if {"-h", "--help"} & set(argv):
        if rank == 0:
            print(help_page((*CONCERNS.values(), *extra_configs)))
        raise SystemExit(0)
    try:
        config = parse(argv, world_size, extra_configs, **rest)
    except ConfigError as error:
        if rank == 0:
            print("\n".join(f"error: {problem}" for problem in error.problems), file=sys.stderr, flush=True)
        raise SystemExit(2) from None
    if rank == 0 and config.notices:
        print("\n".join(config.notices), flush=True)
    return config
