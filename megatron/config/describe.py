"""The effective configuration as lines: every value that is not a default with its origin, and what follows."""

from __future__ import annotations

from typing import Any

from megatron.config.flags import concern_title, options


def describe(config: Any) -> list[str]:
    """Lines to print at the start of a run: the values of a RunConfig that somebody chose, then the derived ones."""
    lines = ["configuration (values that are not defaults, and where they come from)"]
    for concern in config.concerns:
        rows = [
            (option.spell(getattr(concern, option.field)), config.origin(option.field))
            for option in options(type(concern))
            if getattr(concern, option.field) != option.default
        ]
        if rows:
            lines.append(f"  {concern_title(type(concern))}")
            width = min(max(len(text) for text, _ in rows), 60)
            lines.extend(f"    {text:<{width}}  {_ORIGINS[origin]}" for text, origin in rows)
    return lines + ["  derived", *(f"    {name}: {value}" for name, value in derived(config).items())]


# A value that differs from the default although nobody gave it was filled in by the program that asked for it.
_ORIGINS = {"typed": "typed", "file": "file", "stored": "stored in the checkpoint", "default": "filled in"}


def derived(config: Any) -> dict[str, str]:
    """Name -> what follows from the flags, for the start-up print."""
    model, parallel, schedule = config.model, config.parallel, config.batch_schedule
    sizes = schedule.sizes
    batch = str(sizes[-1]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
    values = {
        "processes": f"{config.world_size} = tensor {parallel.tensor_model_parallel_size} x pipeline "
        f"{parallel.pipeline_model_parallel_size} x data {config.data_parallel_size}",
        "pipeline schedule": config.pipeline_schedule,
        "sequence parallel": "yes" if config.sequence_parallel else "no",
        "optimizer states": "sharded" if config.data_parallel_sharding == "optim" else "whole on every replica",
        "precision": config.params_dtype_name,
        "attention": f"{model.num_attention_heads} heads of {config.head_dim}, {config.num_kv_heads} KV heads",
        "MLP": f"{config.ffn_size} wide, {model.activation}",
        "global batch": f"{batch} sequences of {config.data.seq_length} tokens",
        "microbatches": str(config.num_microbatches(sizes[-1])),
        "length": f"{config.train_iterations} steps, {config.train_samples_total} sequences, "
        f"{config.train_samples_total * config.data.seq_length} tokens",
    }
    return values
