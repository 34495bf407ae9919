"""When buckets talk: the order of reductions and gathers, written down by a transport that records them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from megatron.data_parallel.hooks import ReductionQueue
from megatron.distributed.context import ParallelContext
from tests.helpers.ranks import run_ranks
from tests.helpers.small_network import RATES, Network, built, inputs


class RecordingWork:
    """Writes down when an operation is waited for."""

    def __init__(self, work, events: list[str], name: str):
        self.work, self.events, self.name = work, events, name

    def wait(self) -> None:
        self.events.append(f"waited {self.name}")
        self.work.wait()


class RecordingTransport:
    """Writes down the start and wait of the collectives that buckets use, by their size."""

    def __init__(self, transport, events: list[str]):
        self.transport, self.events = transport, events

    def __getattr__(self, name: str):
        return getattr(self.transport, name)

    def all_reduce_(self, tensor, op):
        return self._recorded(f"sum {tensor.numel()}", self.transport.all_reduce_(tensor, op))

    def reduce_scatter_into_(self, out, full):
        return self._recorded(f"sum {full.numel()}", self.transport.reduce_scatter_into_(out, full))

    def all_gather_into_(self, out, shard):
        return self._recorded(f"gather {out.numel()}", self.transport.all_gather_into_(out, shard))

    def _recorded(self, name: str, work) -> RecordingWork:
        self.events.append(f"started {name}")
        return RecordingWork(work, self.events, name)


def recording(ctx: ParallelContext) -> tuple[ParallelContext, list[str]]:
    events: list[str] = []
    groups = {
        axes: dataclasses.replace(group, transport=group.transport and RecordingTransport(group.transport, events))
        for axes, group in ctx.groups.items()
    }
    return dataclasses.replace(ctx, groups=groups), events


def numbered(buckets) -> dict[int, str]:
    """Bucket number -> its size in events; sizes are made distinct by the caller."""
    return {number: str(bucket.layout.numel) for number, bucket in enumerate(buckets)}


def watch(network: Network, events: list[str]) -> None:
    """Writes down when each layer runs forward and when its weight's gradient arrives."""
    for number, layer in enumerate(network.layers):
        layer.register_forward_pre_hook(lambda module, args, n=number: events.append(f"forward {n}"))
        layer.weight.register_hook(lambda grad, n=number: events.append(f"backward {n}"))


@pytest.mark.parametrize("sharding", ["no_shard", "optim"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_reductions_start_in_backward_order_as_soon_as_gradients_are_complete(sharding, dtype):
    def check(ctx: ParallelContext) -> None:
        ctx, events = recording(ctx)
        network, buckets, _ = built(ctx, sharding=sharding, overlap_grad_reduce=True, bucket_numel=1)
        watch(network, events)
        layers = [{b.layout.slots[0].spec.name.split(".")[2] for b in [bucket]}.pop() for bucket in buckets]
        assert layers == ["2"] * 3 + ["1"] * 3 + ["0"] * 3
        buckets.zero_grads()
        buckets.start_step(2)
        network(inputs(0, 0, dtype)).backward()
        assert not any("sum" in event for event in events)  # the first microbatch completes nothing
        del events[:]
        network(inputs(0, 1, dtype)).backward()
        sums = [n for n, event in enumerate(events) if event.startswith("started sum")]
        assert len(sums) == len(buckets.buckets)
        assert min(sums[:3]) < events.index("backward 1")  # layer 2 is under way while layer 1 computes
        assert not any("waited" in event for event in events)
        buckets.finish_reduce()
        assert [event for event in events[-9:]] == [f"waited sum {b.layout.numel}" for b in buckets]

    run_ranks(2, check, params_dtype=dtype)


def test_without_overlap_all_reductions_start_at_the_end_in_plan_order():
    def check(ctx: ParallelContext) -> None:
        ctx, events = recording(ctx)
        network, buckets, _ = built(ctx, bucket_numel=1)
        buckets.start_step(1)
        network(inputs(0, 0)).backward()
        assert events == []
        buckets.finish_reduce()
        sizes = [b.layout.numel for b in buckets]
        assert events == [f"started sum {n}" for n in sizes] + [f"waited sum {n}" for n in sizes]

    run_ranks(2, check)


def test_gathers_start_after_the_update_and_are_waited_for_by_their_first_reader():
    def check(ctx: ParallelContext) -> None:
        ctx, events = recording(ctx)
        options = {"sharding": "optim", "overlap_grad_reduce": True, "overlap_param_gather": True}
        network, buckets, optimizer = built(ctx, bucket_numel=1, **options)
        watch(network, events)
        buckets.start_step(1)
        network(inputs(0, 0)).backward()
        buckets.finish_reduce()
        del events[:]
        optimizer.step(True, RATES)
        assert events == [f"started gather {b.layout.numel}" for b in reversed(buckets.buckets)]
        del events[:]
        network(inputs(1, 0))
        of_layer = {n: [b.layout.numel for b in buckets if f".{n}." in b.layout.slots[0].spec.name] for n in range(3)}
        for n in range(3):
            assert events[:4] == [f"waited gather {size}" for size in sorted(of_layer[n], reverse=True)] + [
                f"forward {n}"
            ]
            del events[:4]
        assert events == []
        network(inputs(1, 1))  # nothing left to wait for
        assert not any("gather" in event for event in events)

    run_ranks(2, check)


def test_early_buckets_are_held_back():
    started: list[int] = []

    def bucket(number: int, crosses_stages: bool = False):
        layout = SimpleNamespace(
            crosses_stages=crosses_stages, slots=[SimpleNamespace(spec=SimpleNamespace(name=f"p{number}"))]
        )
        work = SimpleNamespace(wait=lambda: None)
        return SimpleNamespace(layout=layout, grad_views=[None], start_reduce=lambda: (started.append(number), work)[1])

    queue = ReductionQueue([bucket(0), bucket(1), bucket(2), bucket(3, crosses_stages=True)], True, [[1]] * 4)
    queue.arm(2)
    for number in (2, 2, 1, 3, 3):
        queue.arrived(number, 0)
    assert started == []  # 2 and 3 are complete, but 0 is not
    queue.arrived(0, 0), queue.arrived(0, 0)
    assert started == [0]
    queue.arrived(1, 0)
    assert started == [0, 1, 2]  # the one that two stages share waits for the end
    queue.finish()
    assert started == [0, 1, 2, 3]
    queue.arrived(0, 0)  # outside a step nothing is counted
    queue.arm(1)
    queue.finish()  # a parameter without a gradient does not hold the others up
    assert started == [0, 1, 2, 3] * 2


def test_a_gradient_after_its_reduction_is_an_error():
    def check(ctx: ParallelContext) -> None:
        network, buckets, _ = built(ctx, overlap_grad_reduce=True)
        buckets.start_step(1)
        network(inputs(0, 0)).backward()
        with pytest.raises(RuntimeError, match="more gradients than there are microbatches"):
            network(inputs(0, 1)).backward()
        buckets.finish_reduce()

    run_ranks(2, check)
