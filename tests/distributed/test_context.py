"""ParallelContext: groups by axes, parameters with their spec, two contexts side by side."""

from __future__ import annotations

import pytest
import torch

from megatron.distributed.collectives import all_reduce
from megatron.distributed.context import single_process_context
from megatron.topology.mesh import Mesh
from megatron.topology.param_spec import Normal, ParamSpec
from tests.helpers.ranks import BACKENDS, run_ranks

SPEC = ParamSpec(name="fc1", shape=(8, 6), axes=("tp", None), init=Normal(0.02))


def describe(ctx):
    names = ("tp", "pp", "dp_cp", "world")
    return {name: getattr(ctx, name).ranks for name in names} | {"place": tuple(ctx.coords)}


@pytest.mark.parametrize("backend", BACKENDS)
def test_groups(backend):
    found = run_ranks(4, describe, mesh=Mesh(tp=2, pp=2), backend=backend)
    assert found[3] == {"tp": (2, 3), "pp": (1, 3), "dp_cp": (3,), "world": (0, 1, 2, 3), "place": (1, 0, 0, 1)}


def middle_stage(ctx):
    try:
        return ctx.group("dp", "cp", "embd").ranks
    except KeyError as error:
        return str(error)


def test_a_middle_stage_has_no_embedding_group():
    first, middle, last = run_ranks(3, middle_stage, mesh=Mesh(pp=3))
    assert first == last == (0, 2)
    assert "is in no group over" in middle


def make_parameter(ctx):
    parameter = ctx.parameter(SPEC)
    assert parameter.spec is SPEC
    return parameter.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_of_a_sharded_run_are_slices_of_one(dtype):
    whole = single_process_context(params_dtype=dtype).parameter(SPEC)
    parts = run_ranks(2, make_parameter, mesh=Mesh(tp=2), params_dtype=dtype)
    assert whole.dtype == dtype and whole.requires_grad
    assert torch.equal(torch.cat(parts), whole)


def test_parameters_on_the_meta_device_have_no_values():
    ctx = single_process_context(device="meta")
    assert ctx.parameter(SPEC).is_meta


def nested(ctx):
    """A second, single-process context in the middle of a parallel run."""
    inner = single_process_context(init_seed=5)
    x = torch.ones(1)
    return all_reduce(x, inner.world).item(), all_reduce(x, ctx.world).item()


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_contexts_live_in_one_process(backend):
    assert run_ranks(2, nested, backend=backend) == [(1.0, 2.0)] * 2
