"""Run one rank's ops of a pipeline schedule: the only place that calls a stage, forward or backward.

Every schedule runs here, one stage without messages and evaluation included. The executor keeps, per (microbatch,
chunk), the input of the stage and the graph behind its output; the output itself is dropped as soon as it is sent, and
all of it after the backward. Receives are posted where the schedule says, which is before the ops that come ahead of
their use, and waited for at their use; a send is waited for when the next one to the same rank is posted. The schedule
was checked with sends and receives that block, so no later waiting can deadlock.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron.distributed.collectives import Group
from megatron.distributed.p2p import exchange
from megatron.distributed.transport import Work
from megatron.pipeline_parallel.stage import Batch, LossOutput, Stage
from megatron.schedules.ops import (
    BACKWARD,
    FORWARD,
    RECV_B,
    RECV_F,
    SEND_B,
    SEND_F,
    Location,
    Op,
    Schedule,
    ScheduleError,
)
from megatron.schedules.render import op_grid

GradScale = Callable[[int], float | torch.Tensor]
"""Index of the microbatch -> factor on its loss in backward (a tensor is not read on the host)."""
Record = Callable[[str, float, float], None]
"""(op, start, end) in seconds of `time.perf_counter`, as the host sees them."""


class PipelineError(RuntimeError):
    """An op of a schedule failed; the message holds the grid with it marked, `__cause__` the error itself."""


@dataclass
class _Saved:
    """What the backward of one (microbatch, chunk) needs."""

    hidden: torch.Tensor | None
    """Input of the stage, a leaf whose .grad is what the stage before waits for; None on the first stage."""
    output: GradientEdge
    loss: torch.Tensor | None
    """On the last stage, to shape the gradient it starts from."""


def run_schedule(
    schedule: Schedule,
    stages: Sequence[Stage],
    microbatches: Sequence[Batch],
    group: Group,
    *,
    grad_scale: GradScale = lambda microbatch: 1.0,
    forward_only: bool = False,
    on_forward: Callable[[Op], None] | None = None,
    on_backward: Callable[[Op], None] | None = None,
    record: Record | None = None,
) -> list[LossOutput]:
    """Run this rank's part of `schedule` over all microbatches.

    Args:
        schedule: from `schedules.build_schedule`, with as many stages as `group` has members.
        stages: the model chunks of this rank, in the schedule's order.
        microbatches: all of them, on every pipeline rank.
        group: the pipeline group (`ctx.pp`).
        grad_scale: the backward of microbatch i starts from grad_scale(i) as the gradient of its `loss_sum`.
        forward_only: for evaluation; takes a schedule without backwards, keeps no graph.
        on_forward, on_backward: called after each op of that kind.
        record: called after every op with its name and host times.

    Returns:
        The outputs of the last stage in microbatch order, detached, on the rank that holds it; elsewhere [].

    Raises:
        ValueError: the schedule does not fit the stages, the group, the microbatches or `forward_only`.
        PipelineError: an op raised.
    """
    _check_fit(schedule, stages, microbatches, group, forward_only)
    run = _Run(schedule, stages, microbatches, group, grad_scale)
    hooks = {FORWARD: on_forward, BACKWARD: on_backward}
    with torch.set_grad_enabled(not forward_only):
        for index, op in enumerate(schedule.ranks[group.rank]):
            start = time.perf_counter()
            try:
                run.do[op.kind](op)
                hook = hooks.get(op.kind)
                if hook is not None:
                    hook(op)
            except Exception as error:
                grid = op_grid(schedule, mark=(group.rank, index))
                reason = f"{type(error).__name__}: {error}"
                raise PipelineError(f"pipeline rank {group.rank} failed at {op}: {reason}\n{grid}") from error
            if record is not None:
                record(str(op), start, time.perf_counter())
        run.finish()
    return [run.outputs[microbatch] for microbatch in sorted(run.outputs)]


def _check_fit(
    schedule: Schedule, stages: Sequence[Stage], microbatches: Sequence[Batch], group: Group, forward_only: bool
) -> None:
    """Raise ValueError unless the schedule is for these stages, ranks, microbatches and this purpose."""
    sizes = (
        ("pipeline ranks", schedule.num_stages, group.size),
        ("chunks", schedule.num_chunks, len(stages)),
        ("microbatches", schedule.num_microbatches, len(microbatches)),
    )
    for what, planned, given in sizes:
        if planned != given:
            raise ValueError(f"the schedule is for {planned} {what}, but there are {given}")
    if forward_only != schedule.is_forward_only:
        raise ValueError(
            f"forward_only is {forward_only}, but the schedule {'has no' if schedule.is_forward_only else 'has'} "
            f"backwards; build 'forward-only' for evaluation and another for training"
        )
    kinds = {op.kind for op in schedule.ranks[group.rank]}
    unknown = kinds - {FORWARD, BACKWARD, SEND_F, RECV_F, SEND_B, RECV_B}
    if unknown:
        raise ScheduleError(f"ops of kind {', '.join(sorted(unknown))} can be planned but not yet run; use F and B")


class _Run:
    """The tensors and messages in flight of one call of `run_schedule`, and what to do for each kind of op."""

    def __init__(
        self,
        schedule: Schedule,
        stages: Sequence[Stage],
        microbatches: Sequence[Batch],
        group: Group,
        grad_scale: GradScale,
    ):
        self.schedule, self.stages, self.microbatches = schedule, stages, microbatches
        self.group, self.grad_scale = group, grad_scale
        self.do: dict[str, Callable[[Op], None]] = {
            FORWARD: self.forward,
            BACKWARD: self.backward,
            SEND_F: self.send,
            SEND_B: self.send,
            RECV_F: self.receive,
            RECV_B: self.receive,
        }
        self.saved: dict[tuple[int, int], _Saved] = {}
        self.outputs: dict[int, LossOutput] = {}
        # Results by what they are for: (F or B, microbatch, chunk of this rank that uses or sends them).
        self.inbox: dict[tuple[str, int, int], tuple[torch.Tensor, Work | None]] = {}
        self.outbox: dict[tuple[str, int, int], torch.Tensor] = {}
        self.sending: dict[int, tuple[torch.Tensor, Work]] = {}

    def forward(self, op: Op) -> None:
        """Stage forward; the result goes to the outbox, to another chunk here, or is the loss."""
        stage, batch = self.stages[op.chunk], self.microbatches[op.microbatch]
        is_training = torch.is_grad_enabled()
        hidden = None
        if self.schedule.previous_location(self.group.rank, op.chunk) is not None:
            hidden = self._take(FORWARD, op).requires_grad_(is_training)
        output = stage.forward(hidden, batch)
        following = self.schedule.next_location(self.group.rank, op.chunk)
        root = output.loss_sum if following is None else output
        if is_training:
            loss = root.detach() if following is None else None
            self.saved[op.microbatch, op.chunk] = _Saved(hidden, get_gradient_edge(root), loss)
        if following is None:
            self.outputs[op.microbatch] = output._replace(loss_sum=root.detach())
        else:
            self._give(FORWARD, op, following, root.detach())

    def backward(self, op: Op) -> None:
        """Backward of what `forward` saved, from the loss or from the received gradient."""
        saved = self.saved.pop((op.microbatch, op.chunk))
        if saved.loss is None:
            grad = self._take(BACKWARD, op)
        else:
            scale = self.grad_scale(op.microbatch)
            is_tensor = isinstance(scale, torch.Tensor)
            grad = scale.to(saved.loss) if is_tensor else saved.loss.new_full((), scale)
            grad = grad.reshape(saved.loss.shape)
        torch.autograd.backward((saved.output,), (grad,))
        preceding = self.schedule.previous_location(self.group.rank, op.chunk)
        if preceding is not None:
            self._give(BACKWARD, op, preceding, saved.hidden.grad)

    def send(self, op: Op) -> None:
        """Post the send of a result; first let the one before it to the same rank finish, so that few are held."""
        tensor = self.outbox.pop((FORWARD if op.kind == SEND_F else BACKWARD, op.microbatch, op.chunk)).contiguous()
        self._finish_send(op.peer)
        (work,) = exchange(self.group, sends=[(op.peer, tensor)])
        self.sending[op.peer] = (tensor, work)

    def receive(self, op: Op) -> None:
        """Post a receive into a new buffer; whoever uses it waits."""
        stage, batch = self.stages[op.chunk], self.microbatches[op.microbatch]
        device = next(iter(batch.values())).device
        buffer = torch.empty(stage.hidden_shape(batch), dtype=stage.hidden_dtype, device=device)
        (work,) = exchange(self.group, receives=[(op.peer, buffer)])
        self.inbox[FORWARD if op.kind == RECV_F else BACKWARD, op.microbatch, op.chunk] = (buffer, work)

    def finish(self) -> None:
        """Wait for the last sends. Every other tensor must have been used."""
        for peer in list(self.sending):
            self._finish_send(peer)
        assert not self.saved and not self.inbox and not self.outbox, "the schedule left results unused"

    def _take(self, flow: str, op: Op) -> torch.Tensor:
        tensor, work = self.inbox.pop((flow, op.microbatch, op.chunk))
        if work is not None:
            work.wait()
        return tensor

    def _give(self, flow: str, op: Op, to: Location, tensor: torch.Tensor) -> None:
        if to.rank == self.group.rank:
            self.inbox[flow, op.microbatch, to.chunk] = (tensor, None)
        else:
            self.outbox[flow, op.microbatch, op.chunk] = tensor

    def _finish_send(self, peer: int) -> None:
        if peer in self.sending:
            _, work = self.sending.pop(peer)
            work.wait()
