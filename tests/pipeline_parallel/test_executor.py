"""Any schedule on any number of ranks gives the outputs and gradients of the plain sequential model, bit for bit.

The stages are hand-made linear layers. Threads are the ranks for the many cases; gloo processes, whose sends block
until they are received, for those that would show a deadlock.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from megatron.config.pipeline_layout import pipeline_layout
from megatron.pipeline_parallel.executor import PipelineError, run_schedule
from megatron.schedules.generators import build_schedule
from megatron.schedules.ops import ScheduleError, parse_schedule
from megatron.schedules.passes import add_comm
from megatron.topology.mesh import Mesh
from tests.helpers.ranks import run_ranks

WIDTH = 5


class Output(NamedTuple):
    loss_sum: torch.Tensor
    num_tokens: int


class LinearStage(torch.nn.Module):
    """Layers of the sequential model with the same global numbers have the same weights."""

    hidden_dtype = torch.float32

    def __init__(self, chunk):
        super().__init__()
        self.is_first, self.is_last = chunk.has_embedding, chunk.has_head
        self.layers = torch.nn.ModuleDict({str(layer): seeded_linear(layer) for layer in chunk.layers})
        if self.is_first:
            self.layers["embedding"] = seeded_linear(1000)

    def hidden_shape(self, batch):
        return (batch["x"].shape[0], WIDTH)

    def forward(self, hidden, batch):
        assert (hidden is None) == self.is_first
        if hidden is None:
            hidden = self.layers["embedding"](batch["x"])
        for name, layer in self.layers.items():
            if name != "embedding":
                hidden = layer(torch.tanh(hidden))
        return Output(((hidden - batch["target"]) ** 2).sum(), hidden.shape[0]) if self.is_last else hidden


def seeded_linear(seed):
    linear = torch.nn.Linear(WIDTH, WIDTH)
    with torch.no_grad():
        for index, parameter in enumerate(linear.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2 * seed + index)))
    return linear


def make_microbatches(count):
    generator = torch.Generator().manual_seed(7)
    shapes = [(2 + index % 3, WIDTH) for index in range(count)]  # lengths differ: shapes come from the batch
    return [{name: torch.randn(shape, generator=generator) for name in ("x", "target")} for shape in shapes]


def scale_of(microbatch):
    return torch.tensor(0.5) if microbatch % 2 else 1 / 3


def build_stages(ctx, layout):
    return [LinearStage(chunk) for chunk in layout.chunks[ctx.coords.pp]]


def train(ctx, layout, name, count, text=None):
    """Losses and gradients by global layer name after one run of the schedule."""
    stages = build_stages(ctx, layout)
    schedule = build_schedule(name, layout.num_stages, count, layout.num_chunks)
    if text is not None:
        schedule = add_comm(parse_schedule(text))
    outputs = run_schedule(schedule, stages, make_microbatches(count), ctx.pp, grad_scale=scale_of)
    grads = {
        f"{layer}.{name}": parameter.grad
        for stage in stages
        for layer, linear in stage.layers.items()
        for name, parameter in linear.named_parameters()
    }
    return [output.loss_sum for output in outputs], [output.num_tokens for output in outputs], grads


def evaluate(ctx, layout, count):
    stages = build_stages(ctx, layout)
    schedule = build_schedule("forward-only", layout.num_stages, count, layout.num_chunks)
    outputs = run_schedule(schedule, stages, make_microbatches(count), ctx.pp, forward_only=True)
    assert all(parameter.grad is None for stage in stages for parameter in stage.parameters())
    return [output.loss_sum for output in outputs]


def sequential(num_layers, count):
    """The plain model in one loop."""
    (chunk,) = pipeline_layout(num_layers, 1).virtual_stages
    model = LinearStage(chunk)
    losses = []
    for index, batch in enumerate(make_microbatches(count)):
        output = model(None, batch)
        (output.loss_sum * torch.as_tensor(scale_of(index), dtype=torch.float32)).backward()
        losses.append(output.loss_sum.detach())
    named = {f"{layer}.{name}": p.grad for layer, lin in model.layers.items() for name, p in lin.named_parameters()}
    return losses, named


def assert_same_as_sequential(results, num_layers, count):
    losses, grads = sequential(num_layers, count)
    merged = {name: grad for _, _, part in results for name, grad in part.items()}
    assert merged.keys() == grads.keys() and sum(len(part) for _, _, part in results) == len(grads)
    for name, grad in grads.items():
        assert torch.equal(merged[name], grad), name
    assert all(part == [] for part, _, _ in results[:-1])
    assert torch.equal(torch.stack(results[-1][0]), torch.stack(losses))
    assert results[-1][1] == [len(batch["x"]) for batch in make_microbatches(count)]


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_same_as_sequential(stages, chunks, count, name):
    if stages == 1:
        layout = pipeline_layout(3, 1)
    else:
        layout = pipeline_layout(8, stages, num_virtual_stages_per_pipeline_rank=chunks)
    results = run_ranks(stages, train, layout, name, count, mesh=Mesh(pp=stages))
    assert_same_as_sequential(results, layout.num_layers, count)


@pytest.mark.parametrize("stages, chunks, count, name", [(2, 1, 3, "1f1b"), (2, 2, 5, "1f1b"), (4, 2, 5, "1f1b")])
def test_same_as_sequential_with_sends_that_block(stages, chunks, count, name):
    layout = pipeline_layout(8, stages, num_virtual_stages_per_pipeline_rank=chunks)
    results = run_ranks(stages, train, layout, name, count, mesh=Mesh(pp=stages), backend="gloo")
    assert_same_as_sequential(results, layout.num_layers, count)


@pytest.mark.parametrize(
    "text, stages, num_layers", [("E|t|t*2L", 3, 3), ("Et||t|tL", 4, 3), ("Et|t||L", 2, 2), ("E||t*3|L", 2, 3)]
)
def test_stages_without_layers_pass_hidden_states_through(text, stages, num_layers):
    layout = pipeline_layout(num_layers, stages, pipeline_model_parallel_layout=text)
    results = run_ranks(stages, train, layout, "1f1b", 5, mesh=Mesh(pp=stages))
    assert_same_as_sequential(results, num_layers, 5)


def test_a_hand_written_schedule_runs():
    layout = pipeline_layout(4, 2)
    text = "F0 F1 F2 B0 B1 B2\nF0 B0 F1 F2 B1 B2\n"
    results = run_ranks(2, train, layout, "1f1b", 3, text, mesh=Mesh(pp=2))
    assert_same_as_sequential(results, 4, 3)


@pytest.mark.parametrize("backend", ["threads", "gloo"])
@pytest.mark.parametrize("stages, chunks, count", [(2, 1, 1), (2, 2, 3), (4, 1, 1), (4, 2, 1)])
def test_evaluation_gives_the_losses_and_no_gradients(stages, chunks, count, backend):
    layout = pipeline_layout(8, stages, num_virtual_stages_per_pipeline_rank=chunks)
    results = run_ranks(stages, evaluate, layout, count, mesh=Mesh(pp=stages), backend=backend)
    assert torch.equal(torch.stack(results[-1]), torch.stack(sequential(8, count)[0]))
    assert all(part == [] for part in results[:-1])


class BreakingStage(LinearStage):
    """Fails at the microbatch of four rows."""

    def forward(self, hidden, batch):
        if self.is_last and len(batch["x"]) == 4:
            raise FloatingPointError("broken on purpose")
        return super().forward(hidden, batch)


def run_breaking(ctx, layout):
    stages = [BreakingStage(chunk) for chunk in layout.chunks[ctx.coords.pp]]
    schedule = build_schedule("1f1b", 2, 5)
    run_schedule(schedule, stages, make_microbatches(5), ctx.pp)


def test_a_failing_op_is_shown_in_the_grid():
    with pytest.raises(PipelineError) as caught:
        run_ranks(2, run_breaking, pipeline_layout(4, 2), mesh=Mesh(pp=2))
    message = str(caught.value)
    assert "pipeline rank 1 failed at F2.0: FloatingPointError: broken on purpose" in message
    assert ">>F2.0<<" in message and "rank 0: " in message
    assert isinstance(caught.value.__cause__, FloatingPointError)


class WatchedStage(LinearStage):
    """Remembers the storage of every output, without keeping it alive."""

    def forward(self, hidden, batch):
        output = super().forward(hidden, batch)
        if not self.is_last:
            self.sent.append(StorageWeakRef(output.untyped_storage()))
        return output


def count_held_outputs(ctx, layout):
    (stage,) = [WatchedStage(chunk) for chunk in layout.chunks[ctx.coords.pp]]
    stage.sent = []
    held, events = [], []
    run_schedule(
        build_schedule("gpipe", 2, 6),
        [stage],
        make_microbatches(6),
        ctx.pp,
        on_forward=lambda op: events.append(str(op)),
        on_backward=lambda op: held.append(sum(not ref.expired() for ref in stage.sent)),
        record=lambda name, start, end: events.append((name, end >= start)),
    )
    return held, events


def test_outputs_are_freed_once_sent_and_hooks_are_called():
    (held, events), _ = run_ranks(2, count_held_outputs, pipeline_layout(4, 2), mesh=Mesh(pp=2))
    assert held == [1] * 6  # all six forwards are done, and only the last output is held, until its send is waited for
    assert events[:4] == ["F0.0", ("F0.0", True), ("SEND_F0.0>1", True), "F1.0"]


def run_misfit(ctx, kind):
    stages = build_stages(ctx, pipeline_layout(2, 1))
    batches = make_microbatches(2)
    if kind == "microbatches":
        run_schedule(build_schedule("1f1b", 1, 3), stages, batches, ctx.pp)
    elif kind == "chunks":
        run_schedule(build_schedule("1f1b", 1, 2, 2), stages, batches, ctx.pp)
    elif kind == "pipeline ranks":
        run_schedule(build_schedule("1f1b", 2, 2), stages, batches, ctx.pp)
    elif kind == "forward_only is True":
        run_schedule(build_schedule("1f1b", 1, 2), stages, batches, ctx.pp, forward_only=True)
    elif kind == "forward_only is False":
        run_schedule(build_schedule("forward-only", 1, 2), stages, batches, ctx.pp)
    else:
        run_schedule(parse_schedule("F0 I0 W0 F1 I1 W1"), stages, batches, ctx.pp)


@pytest.mark.parametrize(
    "kind", ["microbatches", "chunks", "pipeline ranks", "forward_only is True", "forward_only is False", "kind I, W"]
)
def test_a_schedule_that_does_not_fit_is_refused(kind):
    with pytest.raises((ValueError, ScheduleError), match=kind):
        run_ranks(1, run_misfit, kind, mesh=Mesh(pp=1))
