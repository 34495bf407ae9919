"""How the work is cut over processes: sizes, schedules, what is sharded and what is overlapped."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags import flag
from megatron.config.rules import at_least, at_most_one, raise_if, shown


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tensor_model_parallel_size: int = flag(1)
    """Processes that share each matrix."""
    pipeline_model_parallel_size: int = flag(1)
    """Processes that share the layers, one stage each."""
    context_parallel_size: int = flag(1)
    """Processes that share each sequence. Above 1 not yet supported."""
    expert_model_parallel_size: int = flag(1)
    """Processes that share the experts. Above 1 not yet supported."""
    sequence_parallel: bool = flag(False)
    """Keep activations outside the matrices sharded along the sequence over the tensor-parallel group. Without effect
    when the tensor-parallel size is 1."""
    pipeline_schedule: str | None = flag(None, choices=("gpipe", "1f1b", "interleaved"), own=True)
    """Order of forward and backward passes. None: 1f1b, or interleaved when there are virtual stages."""
    num_layers_per_virtual_pipeline_stage: int | None = flag(None)
    """Layers of each virtual stage (interleaved schedule or gpipe). None: no virtual stages by this flag."""
    num_virtual_stages_per_pipeline_rank: int | None = flag(None)
    """Virtual stages on each pipeline rank (interleaved schedule or gpipe). None: one."""
    microbatch_group_size_per_virtual_pipeline_stage: int | None = flag(None)
    """Microbatches that pass a virtual stage before the next one takes over. None: the pipeline-parallel size."""
    decoder_first_pipeline_num_layers: int | None = flag(None)
    """Layers of the first stage; the stages between share the rest evenly. None: even."""
    decoder_last_pipeline_num_layers: int | None = flag(None)
    """Layers of the last stage; the stages between share the rest evenly. None: even."""
    account_for_embedding_in_pipeline_split: bool = flag(False)
    """Count the embedding as one layer when layers are dealt to stages."""
    account_for_loss_in_pipeline_split: bool = flag(False)
    """Count the output layer and loss as one layer when layers are dealt to stages."""
    pipeline_model_parallel_layout: str | None = flag(None)
    """The stages spelled out: E embedding, t layer, L loss, | next stage, (..)*n or t*n repeats, as in
    Et*3|(tt|)*2L."""
    use_tp_pp_dp_mapping: bool = flag(False)
    """Rank order tensor, pipeline, data instead of tensor, data, pipeline (fastest first)."""
    use_distributed_optimizer: bool = flag(False)
    """Shard optimizer states over data-parallel ranks (ZeRO-1)."""
    data_parallel_sharding_strategy: str | None = flag(
        None, choices=("no_shard", "optim", "optim_grads", "optim_grads_params")
    )
    """What data-parallel ranks shard: nothing or optimizer states (= --use-distributed-optimizer). None: as that flag
    says. Gradients and parameters are not yet supported."""
    overlap_grad_reduce: bool = flag(False)
    """Reduce each bucket of gradients while the backward pass goes on."""
    overlap_param_gather: bool = flag(False)
    """Gather updated parameters bucket by bucket while the next forward pass goes on. Needs the distributed optimizer
    and --overlap-grad-reduce."""
    ddp_bucket_size: int | None = flag(None)
    """Elements of one gradient bucket. None: max(40,000,000, 1,000,000 x data-parallel size) with overlapped
    reduction, else one bucket."""
    ddp_num_buckets: int | None = flag(None)
    """Cut the gradients of a rank into about so many buckets. None: by --ddp-bucket-size."""
    distributed_backend: str | None = flag(None, choices=("nccl", "gloo"))
    """Communication library. None: nccl where every process has a GPU, else gloo."""
    distributed_timeout_minutes: int = flag(10)
    """Minutes after which a collective that does not complete is an error."""

    def __post_init__(self) -> None:
        raise_if(self.problems())

    @property
    def model_parallel_size(self) -> int:
        """Processes of one replica of the model."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size * self.context_parallel_size

    @property
    def has_virtual_stages(self) -> bool:
        """Whether a flag asks for virtual stages (a layout string may as well)."""
        return (
            self.num_layers_per_virtual_pipeline_stage is not None
            or self.num_virtual_stages_per_pipeline_rank is not None
        )

    @property
    def sharding(self) -> str:
        """no_shard or optim, by whichever of the two flags says so."""
        if self.data_parallel_sharding_strategy is not None:
            return self.data_parallel_sharding_strategy
        return "optim" if self.use_distributed_optimizer else "no_shard"

    def problems(self) -> list[str]:
        """What is wrong with this concern by itself, a line each."""
        lines = at_least(
            self,
            1,
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "num_layers_per_virtual_pipeline_stage",
            "num_virtual_stages_per_pipeline_rank",
            "microbatch_group_size_per_virtual_pipeline_stage",
            "ddp_bucket_size",
            "ddp_num_buckets",
            "distributed_timeout_minutes",
        )
        for name, what in (("context_parallel_size", "context"), ("expert_model_parallel_size", "expert")):
            if getattr(self, name) > 1:
                lines.append(f"{shown(self, name)}: {what} parallelism is not yet supported; use 1")
        lines += at_most_one(self, "both set how large a bucket is", "ddp_bucket_size", "ddp_num_buckets")
        strategy = self.data_parallel_sharding_strategy
        if strategy in ("optim_grads", "optim_grads_params"):
            lines.append(
                f"--data-parallel-sharding-strategy {strategy}: sharded gradients and parameters are "
                "not yet supported; use "
                "optim or no_shard"
            )
        if strategy == "no_shard" and self.use_distributed_optimizer:
            lines.append(
                "--data-parallel-sharding-strategy no_shard and --use-distributed-optimizer contradict each other; "
                "keep one"
            )
        if self.overlap_param_gather and (self.sharding != "optim" or not self.overlap_grad_reduce):
            lines.append(
                "--overlap-param-gather needs --use-distributed-optimizer and --overlap-grad-reduce: without shards "
                "there is "
                "nothing to gather; add them or drop it"
            )
        virtual = self.has_virtual_stages or self.pipeline_model_parallel_layout is not None
        if self.microbatch_group_size_per_virtual_pipeline_stage is not None and not virtual:
            lines.append(
                f"{shown(self, 'microbatch_group_size_per_virtual_pipeline_stage')} would be ignored without virtual "
                "stages; add "
                "--num-virtual-stages-per-pipeline-rank or drop it"
            )
        return lines
