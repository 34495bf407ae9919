"""The place in the world comes from torchrun's variables, all of them or none; leaving loses no output."""

import subprocess
import sys

import pytest

from megatron.training.process import Process, process_of


def test_place():
    assert process_of({}) == Process(0, 0, 1)
    assert process_of({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}) == Process(5, 1, 8)


def test_half_an_environment_is_an_error():
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE set .* but not LOCAL_RANK: start with torchrun"):
        process_of({"RANK": "0", "WORLD_SIZE": "2"})


def test_an_impossible_place_is_an_error():
    with pytest.raises(ValueError, match="WORLD_SIZE=two in the environment is not a number"):
        process_of({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "two"})
    with pytest.raises(ValueError, match="RANK=5 .* is not below WORLD_SIZE=2"):
        process_of({"RANK": "5", "LOCAL_RANK": "0", "WORLD_SIZE": "2"})


def test_leaving_keeps_what_was_printed():
    """Written into pipes, so it is still in buffers when the process leaves."""
    code = "import sys; from megatron.training.process import leave; print('o'); print('e', file=sys.stderr); leave(75)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stdout, result.stderr) == (75, "o\n", "e\n")
