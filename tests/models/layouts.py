"""Tiny models in any layout: run one step, put the shards of every gradient together again."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config.run import RunConfig
from megatron.distributed.context import ParallelContext, single_process_context
from megatron.models.gpt import build_stages
from megatron.pipeline_parallel.executor import run_schedule
from megatron.schedules.generators import build_schedule
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import run_ranks

VOCAB, LENGTH = 100, 16
SIZES = (
    "--num-layers 4 --hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 48 --seq-length 16 "
    "--max-position-embeddings 16 "
)
GPT = SIZES + "--make-vocab-size-divisible-by 8 --hidden-dropout {dropout} --attention-dropout {dropout} "
LLAMA = GPT + (
    "--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --qk-layernorm "
    "--untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 "
)


def batch(number: int = 0, samples: int = 2, **extra: torch.Tensor) -> dict[str, torch.Tensor]:
    """A microbatch of random tokens; its samples follow those of the microbatches before it."""
    generator = torch.Generator().manual_seed(number)
    text = torch.randint(0, VOCAB, (samples, LENGTH + 1), generator=generator)
    return {
        "tokens": text[:, :-1],
        "labels": text[:, 1:],
        "loss_mask": (torch.rand(samples, LENGTH, generator=generator) > 0.2).float(),
        "position_ids": torch.arange(LENGTH).expand(samples, -1),
        "sample_ids": torch.arange(samples) + number * samples,
        **extra,
    }


def config_of(flags: str, mesh: Mesh, sequence_parallel: bool = False, chunks: int = 1) -> RunConfig:
    """The configuration of `flags` in a layout."""
    layout = f"--tensor-model-parallel-size {mesh.tp} --pipeline-model-parallel-size {mesh.pp} "
    layout += "--sequence-parallel " if sequence_parallel else ""
    layout += f"--num-virtual-stages-per-pipeline-rank {chunks} " if chunks > 1 else ""
    return RunConfig.from_flags(flags + layout, world_size=mesh.world_size)


def step(ctx: ParallelContext, flags: str, batches: list[dict], chunks: int = 1) -> dict[str, Any]:
    """One forward and backward over all microbatches: loss, tokens, and (spec, weight, gradient) per parameter."""
    config = config_of(flags, ctx.mesh, ctx.sequence_parallel, chunks)
    stages = build_stages(config, ctx, VOCAB)
    schedule = build_schedule(config.pipeline_schedule, ctx.pp.size, len(batches), chunks)
    outputs = run_schedule(schedule, stages, batches, ctx.pp)
    params = list(dict.fromkeys(p for stage in stages for p in stage.parameters()))
    return {
        "loss": sum(float(out.loss_sum) for out in outputs if out is not None) if outputs else 0.0,
        "tokens": sum(float(out.num_tokens) for out in outputs if out is not None) if outputs else 0.0,
        "params": [(p.spec, p.detach().clone(), p.grad) for p in params],
        "coords": ctx.coords,
    }


def whole(ranks: list[dict[str, Any]], mesh: Mesh, which: int) -> dict[str, torch.Tensor]:
    """Every logical parameter put together from all ranks: weights (which = 1) or gradients (which = 2).

    Gradients are summed over the axes that the spec calls partial; every other pair of copies must be equal to the bit.
    """
    found: dict[str, dict[tuple, torch.Tensor]] = {}
    specs = {}
    for rank in ranks:
        for entry in rank["params"]:
            spec, value, coords = entry[0], entry[which], rank["coords"]
            specs[spec.name] = spec
            place = spec.local_slice(mesh, coords)
            part = value.reshape([piece.size for piece in place])
            parts = found.setdefault(spec.name, {})
            is_sum = which == 2 and (
                ("tp" in spec.partial_over and coords.tp) or ("embd" in spec.partial_over and coords.pp)
            )
            if place in parts and is_sum:
                parts[place] = parts[place] + part
            elif place in parts:
                assert torch.equal(parts[place], part), f"copies of {spec.name} differ"
            else:
                parts[place] = part
    values = {}
    for name, parts in found.items():
        values[name] = torch.full(specs[name].shape, float("nan"), dtype=next(iter(parts.values())).dtype)
        for place, part in parts.items():
            values[name][tuple(slice(piece.offset, piece.offset + piece.size) for piece in place)] = part
        values[name] = values[name][tuple(map(slice, specs[name].valid_shape))]
        assert not values[name].isnan().any(), f"part of {name} is on no rank"
    return values


def run_layout(
    flags: str, mesh: Mesh, batches: list[dict], sequence_parallel: bool = False, chunks: int = 1, **options: Any
) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(loss, weights, gradients) of one step in a layout, whole again."""
    ranks = run_ranks(
        mesh.world_size, step, flags, batches, chunks, mesh=mesh, sequence_parallel=sequence_parallel, **options
    )
    losses = {rank["loss"] for rank in ranks if rank["coords"].pp == mesh.pp - 1}
    assert len(losses) == 1, "tensor-parallel ranks disagree about the loss"
    return losses.pop(), whole(ranks, mesh, 1), whole(ranks, mesh, 2)


def run_single(flags: str, batches: list[dict], **options: Any) -> tuple[float, dict, dict]:
    """The same on one process."""
    result = step(single_process_context(**options), flags, batches)
    return result["loss"], whole([result], Mesh(), 1), whole([result], Mesh(), 2)


def logits(flags: str, batch: dict[str, torch.Tensor], seed: int = 1234) -> torch.Tensor:
    """[b, s, vocabulary] of the freshly initialised model on one process, in evaluation mode."""
    (stage,) = build_stages(config_of(flags, Mesh()), single_process_context(init_seed=seed), VOCAB)
    with torch.no_grad():
        return stage.eval().logits(None, batch)
