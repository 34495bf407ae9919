"""Layers are never lost or misnumbered: every accepted split holds each layer once, every other one is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.config.pipeline_layout import Chunk, pipeline_layout


def counts(layout):
    return [[chunk.num_layers for chunk in stage] for stage in layout.chunks]


def assert_complete(layout, num_layers):
    order = [layer for chunk in layout.virtual_stages for layer in chunk.layers]
    assert order == list(range(num_layers)) and layout.num_layers == num_layers
    assert [chunk.has_embedding for chunk in layout.virtual_stages].index(True) == 0
    assert sum(chunk.has_embedding for chunk in layout.virtual_stages) == 1
    assert layout.virtual_stages[-1].has_head and sum(chunk.has_head for chunk in layout.virtual_stages) == 1
    for layer, (stage, chunk) in enumerate(layout.location_of_layer):
        assert layer in layout.chunks[stage][chunk].layers
    assert layout.layers_per_stage == tuple(sum(row) for row in counts(layout))


@pytest.mark.parametrize(
    "arguments, words",
    [
        (
            dict(num_layers=10, num_layers_per_virtual_pipeline_stage=2),
            ["10", " 2", "stage 1 or 5", "--num-layers 8 or 12"],
        ),
        (
            dict(num_layers=7),
            ["--num-layers 7", "size 2", "--num-layers 6 or 8", "--decoder-last-pipeline-num-layers 3"],
        ),
        (dict(num_layers=8, num_layers_per_virtual_pipeline_stage=3), ["--num-layers 8", "stage 3", "stage 1, 2 or 4"]),
        (dict(num_layers=8, num_virtual_stages_per_pipeline_rank=3), ["rank 3", "stage 0", "rank 1, 2 or 4"]),
        (dict(num_layers=30, pipeline_model_parallel_size=4), ["30", "28 or 32", "the remaining 2 would be lost"]),
        (dict(num_layers=80, pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=16), ["64 or 128"]),
        (dict(num_layers=7, decoder_first_pipeline_num_layers=7), ["leave 0 of --num-layers 7", "layers 6"]),
        (
            dict(num_layers=7, decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=3),
            ["leave 1 of", "--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 4"],
        ),
        (dict(num_layers=4, pipeline_model_parallel_size=1, decoder_last_pipeline_num_layers=1), ["2 or more"]),
        (dict(num_layers=4, pipeline_model_parallel_size=1, num_virtual_stages_per_pipeline_rank=2), ["interleave"]),
        (
            dict(num_layers=8, num_layers_per_virtual_pipeline_stage=2, num_virtual_stages_per_pipeline_rank=2),
            ["only one of them"],
        ),
        (
            dict(num_layers=8, decoder_first_pipeline_num_layers=2, account_for_loss_in_pipeline_split=True),
            ["give one of them"],
        ),
        (
            dict(num_layers=8, decoder_first_pipeline_num_layers=2, num_layers_per_virtual_pipeline_stage=2),
            ["--num-virtual-stages-per-pipeline-rank instead"],
        ),
        (dict(num_layers=8, pipeline_model_parallel_layout="Et*4|t*4L", decoder_first_pipeline_num_layers=2), ["drop"]),
        (dict(num_layers=8, decoder_first_pipeline_num_layers=0), ["must be at least 1"]),
        (dict(num_layers=0), ["--num-layers 0 must be at least 1"]),
    ],
)
def test_refused(arguments, words):
    with pytest.raises(ValueError) as caught:
        pipeline_layout(**{"pipeline_model_parallel_size": 2, **arguments})
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "arguments, expected",
    [
        (dict(num_layers=12, num_layers_per_virtual_pipeline_stage=3), [[3, 3], [3, 3]]),
        (dict(num_layers=4, pipeline_model_parallel_size=1), [[4]]),
        (dict(num_layers=8, num_layers_per_virtual_pipeline_stage=4), [[4], [4]]),
        (dict(num_layers=7, decoder_first_pipeline_num_layers=4), [[4], [3]]),
        (dict(num_layers=7, decoder_first_pipeline_num_layers=3, decoder_last_pipeline_num_layers=4), [[3], [4]]),
        (dict(num_layers=10, pipeline_model_parallel_size=4, decoder_last_pipeline_num_layers=1), [[3], [3], [3], [1]]),
        (
            dict(
                num_layers=14,
                pipeline_model_parallel_size=3,
                decoder_first_pipeline_num_layers=4,
                decoder_last_pipeline_num_layers=4,
                num_virtual_stages_per_pipeline_rank=2,
            ),
            [[2, 2], [3, 3], [2, 2]],
        ),
        (
            dict(num_layers=6, account_for_embedding_in_pipeline_split=True, account_for_loss_in_pipeline_split=True),
            [[3], [3]],
        ),
        (dict(num_layers=7, account_for_embedding_in_pipeline_split=True), [[3], [4]]),
        (
            dict(
                num_layers=6,
                account_for_embedding_in_pipeline_split=True,
                account_for_loss_in_pipeline_split=True,
                num_virtual_stages_per_pipeline_rank=2,
            ),
            [[1, 2], [2, 1]],
        ),
        (
            dict(num_layers=3, pipeline_model_parallel_size=4, pipeline_model_parallel_layout="E|(t|)*2,tL"),
            [[0], [1], [1], [1]],
        ),
        (
            dict(num_layers=3, pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Et|t*2||L"),
            [[1, 0], [2, 0]],
        ),
        (dict(num_layers=8, pipeline_model_parallel_layout="E t*2|(t|)*0(t*3)*2L"), [[2], [6]]),
        (
            dict(num_layers=8, pipeline_model_parallel_layout="E((t|)*2t|)*2ttL", pipeline_model_parallel_size=7),
            [[1]] * 6 + [[2]],
        ),
    ],
)
def test_accepted(arguments, expected):
    layout = pipeline_layout(**{"pipeline_model_parallel_size": 2, **arguments})
    assert counts(layout) == expected
    assert_complete(layout, arguments["num_layers"])


@pytest.mark.parametrize(
    "text, words",
    [
        ("E|(t|)*3,m|m||L", ["not yet"]),
        ("Et|t|L", ["3 stages", "2 or 4 stages", "1 or 3"]),
        ("t|tL", ["one E"]),
        ("Et|Et L", ["one E"]),
        ("Et|t", ["one L"]),
        ("Et|t(L", ["without its ')'"]),
        ("Et)|tL", ["without its '('"]),
        ("Et*|tL", ["without a number"]),
        ("Ex|tL", ["'x'", "known are"]),
        ("Et|tL", ["2 t", "--num-layers is 8", "use --num-layers 2"]),
        ("EtL|t*7", ["one L"]),
    ],
)
def test_layout_string_refused(text, words):
    with pytest.raises(ValueError) as caught:
        pipeline_layout(8, 2, pipeline_model_parallel_layout=text)
    for word in ["--pipeline-model-parallel-layout", *words]:
        assert word in str(caught.value)


def test_global_layer_numbers_and_print():
    layout = pipeline_layout(8, 2, num_layers_per_virtual_pipeline_stage=2)
    assert layout.chunks == (
        (Chunk(0, 2, True, False), Chunk(4, 6, False, False)),
        (Chunk(2, 4, False, False), Chunk(6, 8, False, True)),
    )
    assert layout.stage_of_layer == (0, 0, 1, 1, 0, 0, 1, 1)
    assert layout.chunk_of_layer == (0, 0, 0, 0, 1, 1, 1, 1)
    assert str(layout) == "stage 0: embedding, layers 0-1 | layers 4-5\nstage 1: layers 2-3 | layers 6-7, head"


@settings(deadline=None, max_examples=300)
@given(
    num_layers=st.integers(1, 40),
    stages=st.integers(1, 6),
    virtual=st.sampled_from([(None, None), (1, None), (2, None), (None, 1), (None, 2), (None, 3), (2, 2)]),
    ends=st.sampled_from([(None, None), (1, None), (None, 3), (2, 4), (4, 4)]),
    account=st.tuples(st.booleans(), st.booleans()),
)
def test_no_split_ever_loses_a_layer(num_layers, stages, virtual, ends, account):
    try:
        layout = pipeline_layout(num_layers, stages, *virtual, *ends, *account)
    except ValueError as refusal:
        assert "--" in str(refusal)
    else:
        assert_complete(layout, num_layers)
