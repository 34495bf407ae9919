"""A GPT as pipeline stages: each a run of blocks, maybe with the embedding before them and the head behind them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import nn

from megatron.config.pipeline_layout import Chunk
from megatron.config.run import RunConfig
from megatron.distributed.context import ParallelContext
from megatron.models.block import TransformerBlock
from megatron.models.embedding import Embedding, residual_dtype
from megatron.models.loss import Head, LossOutput, summed_loss
from megatron.models.recompute import layer_runs, run
from megatron.models.sequence_info import SequenceInfo
from megatron.ops.rope import RotaryAngles, rotary_angles, rotary_frequencies

Batch = Mapping[str, torch.Tensor]
"""One microbatch on the stage's device: tokens, labels, position_ids int64 [b, s]; loss_mask fp32 [b, s];
sample_ids int64 [b], the number of each sample in the run; document_ids int32 [b, s] only if attention must stay inside
documents."""


class BlockFactory(Protocol):
    """What builds a block: the class `TransformerBlock`, or one with its constructor and `forward`."""

    def __call__(self, config: RunConfig, ctx: ParallelContext, layer_number: int) -> nn.Module: ...


class GPTStage(nn.Module):
    """The layers of one chunk of one pipeline rank; satisfies `pipeline_parallel.stage.Stage`."""

    def __init__(
        self,
        config: RunConfig,
        ctx: ParallelContext,
        vocab_size: int,
        chunk: Chunk,
        block: BlockFactory = TransformerBlock,
        embedding_weight: nn.Parameter | None = None,
    ):
        """`embedding_weight`: the word embedding held by another chunk of this rank, for a tied head."""
        super().__init__()
        model = config.model
        self.is_first, self.is_last = chunk.has_embedding, chunk.has_head
        self.hidden_dtype = residual_dtype(model, ctx)
        self.hidden_size = model.hidden_size
        self.seed = ctx.init_seed
        self.sequence_parts = ctx.tp.size if ctx.sequence_parallel else 1
        self.sequence_part = ctx.tp.rank if ctx.sequence_parallel else 0
        self.rotary_interleaved = model.rotary_interleaved
        self.rotary_interpolation = float(model.rotary_seq_len_interpolation_factor or 1)
        self.frequencies = _frequencies(config, ctx.device)
        self.embedding = Embedding(config, ctx, vocab_size) if chunk.has_embedding else None
        self.layers = nn.ModuleList(block(config, ctx, number) for number in chunk.layers)
        self.layer_runs = layer_runs(config.recompute, len(self.layers))
        if self.embedding is not None:
            embedding_weight = self.embedding.word_embeddings.weight
        self.head = Head(config, ctx, vocab_size, embedding_weight) if chunk.has_head else None

    def hidden_shape(self, batch: Batch) -> tuple[int, int, int]:
        """(s, b, h) of the residual stream on this rank; s is a part under sequence parallelism."""
        samples, length = batch["tokens"].shape
        return length // self.sequence_parts, samples, self.hidden_size

    def forward(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor | LossOutput:
        """Hidden states of this chunk, or on the last stage the summed loss; `hidden` is None on the first."""
        hidden = self._decode(hidden, batch)
        if self.head is None:
            return hidden
        return summed_loss(self.head(hidden, batch["labels"].t()), batch["loss_mask"])

    def logits(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        """Hidden states of this chunk, or on the last stage the logits [b, s, vocabulary], whole on every tp rank;
        needs no
        labels and no loss_mask in `batch`."""
        hidden = self._decode(hidden, batch)
        return hidden if self.head is None else self.head(hidden, None).transpose(0, 1)

    def _decode(self, hidden: torch.Tensor | None, batch: Batch) -> torch.Tensor:
        info = self._sequence_info(batch)
        if self.embedding is not None:
            hidden = self.embedding(batch["tokens"], batch["position_ids"], info)
        for layer_run in self.layer_runs:
            layers = [self.layers[number] for number in layer_run.layers]
            hidden = run(_through, layers, hidden, info, is_recomputed=layer_run.is_recomputed)
        return hidden

    def _sequence_info(self, batch: Batch) -> SequenceInfo:
        length, device = batch["tokens"].shape[1], batch["tokens"].device
        mine = length // self.sequence_parts
        first = self.sequence_part * mine
        return SequenceInfo(
            seed=self.seed,
            sample_ids_B=batch["sample_ids"],
            positions_S=torch.arange(first, first + mine, device=device),
            rotary=self._rotary(batch["position_ids"].t()),
            document_ids_BS=batch.get("document_ids"),
        )

    def _rotary(self, positions_SB: torch.Tensor) -> RotaryAngles | None:
        if self.frequencies is None:
            return None
        return rotary_angles(
            positions_SB,
            self.frequencies,
            interleaved=self.rotary_interleaved,
            interpolation=self.rotary_interpolation,
        )


def _through(layers: Sequence[nn.Module], hidden: torch.Tensor, info: SequenceInfo) -> torch.Tensor:
    for layer in layers:
        hidden = layer(hidden, info)
    return hidden


def _frequencies(config: RunConfig, device: torch.device) -> torch.Tensor | None:
    model = config.model
    if model.position_embedding_type != "rope":
        return None
    factor = model.rope_scaling_factor if model.use_rope_scaling else None
    return rotary_frequencies(
        config.head_dim, base=model.rotary_base, percent=model.rotary_percent, llama3_factor=factor
    ).to(device)


def build_stages(
    config: RunConfig, ctx: ParallelContext, vocab_size: int, block: BlockFactory = TransformerBlock
) -> list[GPTStage]:
    """The stages of this rank, one per chunk, with initial weights that are the same in every layout.

    Args:
        vocab_size: real tokens; the embedding has `config.padded_vocab(vocab_size)` rows.
        block: builds one layer; a research variant gives its own class.
    """
    stages: list[GPTStage] = []
    embedding_weight = None
    for chunk in config.pipeline_layout.chunks[ctx.coords.pp]:
        stage = GPTStage(config, ctx, vocab_size, chunk, block, embedding_weight)
        if stage.embedding is not None:
            embedding_weight = stage.embedding.word_embeddings.weight
        stages.append(stage)
    return stages
