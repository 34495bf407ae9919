"""ParamSpec: shards are even slices that tile the logical parameter, and everything else follows from the axes."""

from __future__ import annotations

import numpy as np
import pytest

from megatron.topology.mesh import Coordinates, Mesh
from megatron.topology.param_spec import ParamSpec

QKV = ParamSpec(name="qkv", shape=(4, 5, 8, 32), axes=("tp", None, None, None), fold=3)
GATED_FC1 = ParamSpec(name="fc1", shape=(2, 64, 32), axes=(None, "tp", None), fold=2)
PROJ = ParamSpec(name="proj", shape=(32, 16, 8), axes=(None, "tp", None), fold=1)
NORM = ParamSpec(name="norm", shape=(32,), axes=(None,), partial_over=("tp",), decay=False)
TIED = ParamSpec(
    name="word", shape=(128, 32), axes=("tp", None), partial_over=("embd",), valid=(100, 32), lr_group="embedding"
)
ALL = [QKV, GATED_FC1, PROJ, NORM, TIED]


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("spec", ALL, ids=lambda spec: spec.name)
def test_shards_tile_the_parameter(spec, tp):
    mesh = Mesh(tp=tp, dp=2)
    counts = np.zeros(spec.shape, dtype=int)
    for rank in range(tp):
        box = spec.local_slice(mesh, Coordinates(tp=rank, cp=0, dp=0, pp=0))
        assert tuple(part.size for part in box) == spec.local_shape(mesh)
        counts[tuple(slice(part.offset, part.offset + part.size) for part in box)] += 1
    assert (counts == (1 if "tp" in spec.axes else tp)).all()
    assert spec.numel == counts.size


def test_stored_tensors_are_matrices_or_vectors():
    mesh = Mesh(tp=2)
    assert [spec.stored_shape(mesh) for spec in ALL] == [(80, 32), (64, 32), (32, 64), (32,), (64, 32)]


def test_gradient_axes_say_where_replicas_saw_different_data():
    assert QKV.gradient_axes == ("dp", "cp")
    assert NORM.gradient_axes == ("dp", "cp", "tp")
    assert TIED.gradient_axes == ("dp", "cp", "embd")


def test_replicas_are_those_neither_sharded_nor_partial():
    assert [spec.replicated_axes for spec in ALL] == [()] * 5
    assert ParamSpec(name="bias", shape=(32,), axes=(None,)).replicated_axes == ("tp",)


def test_padding_is_not_part_of_the_valid_shape():
    assert TIED.valid_shape == (100, 32)
    assert QKV.valid_shape == QKV.shape


def test_xavier_bound_is_of_the_whole_matrix_without_padding():
    rows_and_columns = [4 * 5 * 8 + 32, 2 * 64 + 32, 32 + 16 * 8, 100 + 32]
    assert [spec.xavier_bound for spec in (QKV, GATED_FC1, PROJ, TIED)] == [(6 / n) ** 0.5 for n in rows_and_columns]


def test_wrong_specs_are_refused():
    with pytest.raises(ValueError, match="proj: dimension of 16 does not divide over 3 ranks of axis tp"):
        PROJ.local_shape(Mesh(tp=3))
    with pytest.raises(ValueError, match="do not fit shape"):
        ParamSpec(name="x", shape=(2, 3), axes=("tp",))
    with pytest.raises(ValueError, match="does not fit shape"):
        ParamSpec(name="x", shape=(2, 3), axes=("tp", None), valid=(2,))
