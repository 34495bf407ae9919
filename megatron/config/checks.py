"""Rules between concerns: sizes that must divide, settings that exclude each other, lengths that must fit.

Each function looks at one question and returns a line for each problem. They run on values that may already be known to
be wrong (zero, negative, missing), which they leave to the concern's own check.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.config.model import divisors
from megatron.config.rules import whole_at_least_one


def problems(config: Any) -> list[str]:
    """Every broken rule of a RunConfig, a line each."""
    lines: list[str] = []
    for check in (
        _world,
        _tensor_parallel,
        _sequence,
        _experts,
        _pipeline,
        _batches,
        _lengths,
        _warmup,
        _origins,
        _rest,
    ):
        lines.extend(check(config))
    return lines


def notices(values: Mapping[str, Any]) -> list[str]:
    """Lines about given flags that another given flag leaves without effect."""
    lines = []
    if values.get("sequence_parallel") and values.get("tensor_model_parallel_size", 1) == 1:
        lines.append("--sequence-parallel has no effect: --tensor-model-parallel-size is 1")
    if not values.get("fp16"):
        scale = ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        names = ["--" + name.replace("_", "-") for name in scale if name in values]
        if names:
            lines.append(f"{', '.join(names)} without effect: only --fp16 scales the loss")
    return lines


def _world(config: Any) -> list[str]:
    parallel, world = config.parallel, config.world_size
    sizes = (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.context_parallel_size,
    )
    if world < 1 or not whole_at_least_one(*sizes) or world % parallel.model_parallel_size == 0:
        return []
    tensor, pipeline, context = sizes
    needed = parallel.model_parallel_size
    return [
        f"--tensor-model-parallel-size {tensor} x --pipeline-model-parallel-size {pipeline} x --context-parallel-size "
        f"{context} "
        f"= {needed} does not divide the {world} processes of the run; start a multiple of {needed} processes or "
        "lower a size"
    ]


def _tensor_parallel(config: Any) -> list[str]:
    tensor, model = config.parallel.tensor_model_parallel_size, config.model
    if not whole_at_least_one(tensor) or tensor == 1:
        return []
    lines, name = [], f"--tensor-model-parallel-size {tensor}"
    heads, groups, ffn = model.num_attention_heads, model.num_kv_heads, model.ffn_size
    if whole_at_least_one(heads) and heads % tensor:
        lines.append(f"{name} does not divide --num-attention-heads {heads}; use {divisors(heads)}")
    elif whole_at_least_one(heads, groups) and groups % tensor and tensor % groups:
        lines.append(
            f"{name} and --num-query-groups {groups}: one must divide the other, so that a rank has whole groups or "
            "shares one; "
            f"use --tensor-model-parallel-size {divisors(groups)}"
        )
    if whole_at_least_one(ffn) and ffn % tensor:
        default = "" if model.ffn_hidden_size is not None else " (its default here)"
        lines.append(f"{name} does not divide --ffn-hidden-size {ffn}{default}; change one of them")
    padded = model.padded_vocab_size
    if whole_at_least_one(padded) and padded % tensor:
        lines.append(f"{name} does not divide --padded-vocab-size {padded}; use {_near(padded, tensor)}")
    return lines


def _sequence(config: Any) -> list[str]:
    lines, parallel = [], config.parallel
    seq, positions = config.data.seq_length, config.model.max_position_embeddings
    tensor, context = parallel.tensor_model_parallel_size, parallel.context_parallel_size
    if not whole_at_least_one(seq, tensor, context):
        return lines
    if whole_at_least_one(positions) and seq > positions:
        lines.append(
            f"--seq-length {seq} is longer than --max-position-embeddings {positions}; raise "
            f"--max-position-embeddings to {seq}"
        )
    if context > 1:
        multiple = 2 * context * tensor
        if seq % multiple:
            lines.append(
                f"--seq-length {seq} does not divide by 2 x --context-parallel-size {context} x "
                "--tensor-model-parallel-size "
                f"{tensor} = {multiple}; use {_near(seq, multiple)}"
            )
    elif config.sequence_parallel and seq % tensor:
        lines.append(
            f"--seq-length {seq} does not divide by --tensor-model-parallel-size {tensor}, as --sequence-parallel "
            "needs; use "
            f"{_near(seq, tensor)}, or drop --sequence-parallel"
        )
    return lines


def _experts(config: Any) -> list[str]:
    expert, experts = config.parallel.expert_model_parallel_size, config.model.num_experts
    if expert == 1 or not whole_at_least_one(expert):
        return []
    if experts is None:
        return [f"--expert-model-parallel-size {expert} needs --num-experts; drop it for a dense model"]
    if whole_at_least_one(experts) and experts % expert:
        return [
            f"--expert-model-parallel-size {expert} does not divide --num-experts {experts}; use {divisors(experts)}"
        ]
    return []


def _pipeline(config: Any) -> list[str]:
    parallel = config.parallel
    if not whole_at_least_one(config.model.num_layers, parallel.pipeline_model_parallel_size):
        return []
    try:
        num_chunks = config.pipeline_layout.num_chunks
    except ValueError as error:
        return str(error).splitlines()
    chosen, group = parallel.pipeline_schedule, parallel.microbatch_group_size_per_virtual_pipeline_stage
    if num_chunks > 1 and group is not None and group < parallel.pipeline_model_parallel_size:
        return [
            f"--microbatch-group-size-per-virtual-pipeline-stage {group} is below --pipeline-model-parallel-size "
            f"{parallel.pipeline_model_parallel_size}: a stage would wait for itself; use that size or more"
        ]
    if chosen == "interleaved" and num_chunks == 1:
        return [
            "--pipeline-schedule interleaved needs virtual stages; give --num-virtual-stages-per-pipeline-rank 2 or "
            "more, or use "
            "1f1b"
        ]
    if chosen == "1f1b" and num_chunks > 1:
        return [
            f"--pipeline-schedule 1f1b has one stage on each rank and the virtual stages make {num_chunks}; use "
            "interleaved or gpipe, or drop the virtual stages"
        ]
    return []


def _batches(config: Any) -> list[str]:
    training, parallel = config.training, config.parallel
    micro, given = training.micro_batch_size, training.global_batch_size
    if config.world_size < 1 or not whole_at_least_one(micro, given or 1, parallel.model_parallel_size):
        return []
    replicas = config.data_parallel_size
    if replicas < 1 or config.world_size % parallel.model_parallel_size:
        return []  # said by _world
    block = micro * replicas
    parts = f"--micro-batch-size {micro} x data-parallel size {replicas} = {block}"
    if given is not None and given % block:
        return [f"--global-batch-size {given} does not divide by {parts}; use {_near(given, block)}"]
    lines = []
    evaluation = (training.eval_micro_batch_size, training.eval_global_batch_size)
    if evaluation != (None, None) and whole_at_least_one(*(value or 1 for value in evaluation)):
        lines += _evaluation_batch(config, replicas)
    if training.step_batch_size_schedule is not None and whole_at_least_one(config.data.seq_length):
        return lines + _batch_steps(config, block, parts)
    if training.rampup_batch_size is None or min(training.rampup_batch_size) < 1:
        return lines
    start, increment, _ = training.rampup_batch_size
    size = config.batch_schedule.global_batch_size
    name = f"--rampup-batch-size {' '.join(map(str, training.rampup_batch_size))}"
    if start > size or (size - start) % increment:
        return lines + [
            f"{name} does not reach --global-batch-size {size} from {start} in steps of {increment}; change one of them"
        ]
    wrong = [str(step) for step in config.batch_schedule.sizes if step % block]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        lines.append(
            f"{name} passes through batches of {', '.join(wrong[:3])}{more}, which do not divide by {parts}; use a "
            "start and an "
            f"increment that are multiples of {block}"
        )
    return lines


def _evaluation_batch(config: Any, replicas: int) -> list[str]:
    try:
        size, micro = config.eval_batch_size, config.eval_micro_batch_size
    except ValueError:
        return []  # said by _batch_steps
    if size % (micro * replicas) == 0:
        return []
    name = "--eval-global-batch-size" if config.training.eval_global_batch_size else "evaluation's global batch"
    return [
        f"{name} {size} does not divide by --eval-micro-batch-size {micro} x data-parallel size {replicas} = "
        f"{micro * replicas}; use {_near(size, micro * replicas)}"
    ]


def _batch_steps(config: Any, block: int, parts: str) -> list[str]:
    name = f"--step-batch-size-schedule {config.training.step_batch_size_schedule!r}"
    try:
        sizes = config.batch_schedule.sizes
    except ValueError as error:
        return [f"{name}: {error}"]
    return [
        f"{name}: a batch of {size} does not divide by {parts}; use {_near(size, block)}"
        for size in sizes
        if size % block
    ]


def _lengths(config: Any) -> list[str]:
    """As Megatron: everything in iterations, or everything in samples."""
    training, optimizer, lines = config.training, config.optimizer, []
    if training.train_samples is not None:
        length, unit = f"--train-samples {training.train_samples}", "samples"
        strangers = {"lr_decay_iters": None, "lr_warmup_iters": 0, "lr_wsd_decay_iters": None}
    else:
        length, unit = f"--train-iters {training.train_iters}", "iters"
        strangers = {"lr_decay_samples": None, "lr_warmup_samples": 0, "lr_wsd_decay_samples": None}
        if training.rampup_batch_size is not None:
            lines.append(
                f"--rampup-batch-size {' '.join(map(str, training.rampup_batch_size))} needs --train-samples instead "
                f"of {length}: "
                "with a growing batch steps do not say how much is trained on"
            )
        if training.step_batch_size_schedule is not None:
            lines.append(
                f"--step-batch-size-schedule {training.step_batch_size_schedule!r} needs --train-samples instead of "
                f"{length}: with a growing batch steps do not say how much is trained on"
            )
    for field, default in strangers.items():
        if getattr(optimizer, field) != default:
            name = "--" + field.replace("_", "-")
            other = name.rsplit("-", 1)[0] + "-" + unit
            lines.append(f"{name} {getattr(optimizer, field)} does not go with {length}; use {other}")
    return lines


def _warmup(config: Any) -> list[str]:
    training, optimizer = config.training, config.optimizer
    if optimizer.lr is None and not training.skip_train:
        return ["--lr is required"]
    fields = (training.train_samples, training.train_iters, optimizer.lr_decay_iters, optimizer.lr_decay_samples)
    if training.train_samples is not None:
        warmup, name = optimizer.lr_warmup_samples, "--lr-warmup-samples"
        decay, decay_name = optimizer.lr_decay_samples, "--lr-decay-samples"
        length, length_name = training.train_samples, "--train-samples"
    else:
        warmup, name = optimizer.lr_warmup_iters, "--lr-warmup-iters"
        decay, decay_name = optimizer.lr_decay_iters, "--lr-decay-iters"
        length, length_name = training.train_iters, "--train-iters"
    if decay is None:
        decay, decay_name = length, length_name
    if decay is None or any(value is not None and value < 1 for value in fields):
        return []
    lines = []
    if warmup > 0 and warmup >= decay:
        lines.append(
            f"{name} {warmup} is not shorter than {decay_name} {decay}: the learning rate would never decay; shorten "
            "the warm-up "
            "or lengthen the decay"
        )
    unit = "samples" if training.train_samples is not None else "iters"
    wsd = optimizer.lr_wsd_decay_samples if unit == "samples" else optimizer.lr_wsd_decay_iters
    if optimizer.lr_decay_style == "WSD" and wsd is not None and wsd > decay - max(warmup, 0):
        lines.append(
            f"--lr-wsd-decay-{unit} {wsd} is longer than {decay_name} {decay} less the warm-up of {warmup}; shorten it"
        )
    return lines


def _origins(config: Any) -> list[str]:
    """A flag given with its default value is still a wish; one taken from a checkpoint is none."""
    lines = []
    if _is_given(config, "num_query_groups") and config.model.num_query_groups == 1:
        if not config.model.group_query_attention:
            lines.append(
                "--num-query-groups 1 would be ignored without --group-query-attention; add that flag or drop this one"
            )
    if _is_given(config, "fp32_residual_connection") and config.model.fp32_residual_connection:
        if config.params_dtype_name == "fp32":
            lines.append(
                "--fp32-residual-connection would be ignored without --bf16 or --fp16: in fp32 the residual stream is "
                "fp32 already; drop it"
            )
    return lines


def _is_given(config: Any, field: str) -> bool:
    return config.origin(field) in ("typed", "file")


def _rest(config: Any) -> list[str]:
    lines = []
    if config.optimizer.apply_wd_to_qk_layernorm and not config.model.qk_layernorm:
        lines.append(
            "--apply-wd-to-qk-layernorm would be ignored without --qk-layernorm; add that flag or drop this one"
        )
    data = config.data
    if (data.valid_data_path or data.test_data_path) and not (data.train_data_path or config.training.skip_train):
        given = "--valid-data-path" if data.valid_data_path else "--test-data-path"
        lines.append(
            f"{given} without --train-data-path: nothing to train on; add it, or --skip-train to evaluate only"
        )
    if config.logging.log_progress and config.checkpoint.save is None:
        lines.append("--log-progress needs --save, where progress.txt is written; give it or drop --log-progress")
    strangers = [rank for rank in config.logging.profile_ranks if not 0 <= rank < config.world_size]
    if strangers and config.world_size >= 1:
        lines.append(
            f"--profile-ranks {' '.join(map(str, config.logging.profile_ranks))}: no rank {strangers[0]} among "
            f"{config.world_size} processes; use 0 to {config.world_size - 1}"
        )
    if config.world_size < 1:
        lines.append(f"the run has {config.world_size} processes; it needs at least 1")
    return lines


def _near(value: int, multiple: int) -> str:
    below, above = value // multiple * multiple, -(-value // multiple) * multiple
    return f"{below} or {above}" if below else str(above)
