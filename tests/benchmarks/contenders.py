"""Who is compared in `train_step`: each builds its model and optimizer and returns one training step as a function.

A step is forward, backward, clipping of the global gradient norm to 1.0 and AdamW (beta 0.9, 0.95, weight decay 0.1 on
matrices), on one process. "ours" runs `megatron.training.step.train_step` as `pretrain_gpt.py` does; the others are
written as their users write them, with torch's fused AdamW (faster on a CPU than its default).

bf16 means: ours, bf16 weights with fp32 master weights and gradient sums; autocast, fp32 weights and bf16 products
(nanoGPT's way); pure, everything in bf16, optimizer states too, which trains worse and needs less memory.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import ExitStack, nullcontext
from typing import NamedTuple

import torch
from torch import nn

Step = Callable[[torch.Tensor, torch.Tensor], float]
"""(tokens, labels), int64 [b, s] -> the loss before the update."""


class Sizes(NamedTuple):
    """The model and the batch, the same for everybody."""

    layers: int = 12
    hidden: int = 512
    heads: int = 8
    length: int = 512
    vocab: int = 32768
    batch: int = 4

    @property
    def gated_width(self) -> int:
        """Inner width of the SwiGLU MLP: 8/3 of the hidden size, up to a multiple of 32."""
        return -(-8 * self.hidden // 3 // 32) * 32


class Contender(NamedTuple):
    """One line of the table."""

    family: str
    """gpt or llama: lines of one family compute the same function."""
    is_ours: bool
    dtypes: tuple[str, ...]
    prepare: Callable[[], None]
    """Import what it needs."""
    build: Callable[[Sizes, str], Step]
    keeps_fp32_weights: bool = True
    """Whether updates are added up in fp32; where not, the line is shown and compared apart."""


FAMILY_FLAGS = {
    "gpt": "--no-bias-gelu-fusion",
    "llama": "--position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear "
    "--untie-embeddings-and-output-weights --ffn-hidden-size {sizes.gated_width}",
}
OURS = (
    "--num-layers {sizes.layers} --hidden-size {sizes.hidden} --num-attention-heads {sizes.heads} "
    "--seq-length {sizes.length} --max-position-embeddings {sizes.length} --micro-batch-size {sizes.batch} "
    "--tokenizer-type NullTokenizer --vocab-size {sizes.vocab} --mock-data --train-iters 1000 --lr 1e-4 "
    "--lr-decay-style constant --adam-beta2 0.95 --weight-decay 0.1 --clip-grad 1.0 "
    "--hidden-dropout 0 --attention-dropout 0 --peak-tflops 1 "
)


def import_ours() -> None:
    """Everything a run imports."""
    import megatron.models.gpt
    import megatron.training.supervise  # noqa: F401


def build_ours(family: str, sizes: Sizes, dtype: str) -> Step:
    """The step of a real run: buckets, clipping, Adam on flat fp32 master weights, schedules."""
    from megatron.config.run import RunConfig
    from megatron.distributed.launch import launch
    from megatron.ledger.writer import Ledger
    from megatron.models.gpt import build_stages
    from megatron.training.report import Reporter
    from megatron.training.setup import build_run
    from megatron.training.step import Wishes, train_step
    from megatron.training.supervise import PARAMS_DTYPES, mesh_of

    flags = (OURS + FAMILY_FLAGS[family]).format(sizes=sizes) + (" --bf16" if dtype == "bf16" else "")
    config = RunConfig.from_flags(flags)
    stack = ExitStack()
    ctx = stack.enter_context(launch(mesh=mesh_of(config), params_dtype=PARAMS_DTYPES[config.params_dtype_name]))
    reporter = Reporter(
        is_first=True, logging=config.logging, total_iterations=1000, world_size=1, stream=io.StringIO()
    )
    run = build_run(config, ctx, build_stages, Ledger(None), reporter)
    mask = torch.ones(sizes.batch, sizes.length)
    positions = torch.arange(sizes.length).expand(sizes.batch, -1).contiguous()

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        batch = {"tokens": tokens, "labels": labels, "loss_mask": mask, "position_ids": positions}
        batch["sample_ids"] = torch.arange(sizes.batch)
        result = train_step(run, [batch], Wishes())
        run.scheduler.step(sizes.batch)
        return float(result.row[0])

    stack.pop_all()  # the context lives as long as the process
    return step


def import_torch() -> None:
    """What torch's optimizers import on first use."""
    import torch._dynamo  # noqa: F401


def build_nanogpt(sizes: Sizes, dtype: str) -> Step:
    """nanoGPT's training step."""
    from tests.benchmarks.nanogpt import NanoGPT

    model = NanoGPT(vocab=sizes.vocab, length=sizes.length, layers=sizes.layers, hidden=sizes.hidden, heads=sizes.heads)
    return plain_step(model, model, autocast=dtype == "bf16")


def import_transformers() -> None:
    """The Llama classes and what torch's optimizers import on first use."""
    import torch._dynamo  # noqa: F401
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: F401


def build_transformers(sizes: Sizes, dtype: str, *, is_pure: bool) -> Step:
    """LlamaForCausalLM with torch's attention, trained as a plain loop does; its loss shifts the labels given."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=sizes.vocab,
        hidden_size=sizes.hidden,
        intermediate_size=sizes.gated_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        max_position_embeddings=sizes.length,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config).train()
    if is_pure:
        model = model.to(torch.bfloat16)

    def loss(tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return model(input_ids=tokens, labels=labels, shift_labels=labels).loss

    return plain_step(model, loss, autocast=dtype == "bf16" and not is_pure)


def plain_step(model: nn.Module, loss_of: Callable[..., torch.Tensor], *, autocast: bool) -> Step:
    """One step of `model` with torch's own optimizer and clipping."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step(tokens: torch.Tensor, labels: torch.Tensor) -> float:
        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
            loss = loss_of(tokens, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def _ours(family: str) -> Contender:
    return Contender(family, True, ("fp32", "bf16"), import_ours, lambda sizes, dtype: build_ours(family, sizes, dtype))


def _transformers(is_pure: bool) -> Contender:
    def build(sizes: Sizes, dtype: str) -> Step:
        return build_transformers(sizes, dtype, is_pure=is_pure)

    dtypes = ("bf16",) if is_pure else ("fp32", "bf16")
    return Contender("llama", False, dtypes, import_transformers, build, keeps_fp32_weights=not is_pure)


CONTENDERS: dict[str, Contender] = {
    "ours-gpt": _ours("gpt"),
    "nanogpt": Contender("gpt", False, ("fp32", "bf16"), import_torch, build_nanogpt),
    "ours-llama": _ours("llama"),
    "transformers": _transformers(is_pure=False),
    "transformers-pure": _transformers(is_pure=True),
}


def batches(sizes: Sizes) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """(tokens, labels) without end: four batches of a text with a simple rule, in turn, the same for everybody."""
    draw = torch.Generator().manual_seed(1)
    shape = (4, sizes.batch, 1)
    starts = torch.randint(sizes.vocab, shape, generator=draw)
    steps = torch.randint(1, 9, shape, generator=draw)
    texts = (starts + steps * torch.arange(sizes.length + 1)) % sizes.vocab
    while True:
        for text in texts:
            yield text[:, :-1].contiguous(), text[:, 1:].contiguous()
