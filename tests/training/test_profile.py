"""Recorded steps: which, by whom, and where they end up."""

from __future__ import annotations

import gzip
import json

import pytest

from megatron.distributed.context import single_process_context
from megatron.training.profile import StepProfiler
from tests.training.runs import TINY, RunConfig, run_all, run_one

TRACE = "--profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end 3 --tensorboard-dir"


def names_in(path) -> set[str]:
    with gzip.open(path, "rt") as file:
        return {event.get("name") for event in json.load(file)["traceEvents"]}


def test_the_ranks_asked_for_record_and_losses_stay_the_same(tmp_path):
    flags = "--train-iters 4 --pipeline-model-parallel-size 2"
    recorded = run_all(f"{flags} {TRACE} {tmp_path} --profile-ranks 1", world=2)
    assert recorded[0].losses == run_all(flags, world=2)[0].losses
    (trace,) = tmp_path.glob("*.pt.trace.json.gz")
    assert trace.name == "rank1.steps2-3.pt.trace.json.gz"
    assert "aten::mm" in names_in(trace) or "aten::addmm" in names_in(trace) or "aten::embedding" in names_in(trace)


def test_a_run_that_ends_or_resumes_among_the_steps_records_what_there_is(tmp_path):
    flags = "--train-iters 4"
    run_one(f"{flags} {TRACE} {tmp_path}/a --save {tmp_path}/s --save-interval 2 --exit-interval 2")
    assert [path.name for path in (tmp_path / "a").glob("*.gz")] == ["rank0.steps2-2.pt.trace.json.gz"]
    run_one(f"{flags} {TRACE} {tmp_path}/b --load {tmp_path}/s")
    assert [path.name for path in (tmp_path / "b").glob("*.gz")] == ["rank0.steps3-3.pt.trace.json.gz"]


def test_marks_for_nsight_need_a_gpu():
    with pytest.raises(ValueError, match="needs a GPU; add --use-pytorch-profiler"):
        StepProfiler(RunConfig.from_flags(f"{TINY} --profile").logging, single_process_context(), print)
