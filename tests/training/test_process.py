"""The place in the world comes from torchrun's variables, all of them or none."""

import pytest

from megatron.training.process import Process, process_of


def test_place():
    assert process_of({}) == Process(0, 0, 1)
    assert process_of({"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "8"}) == Process(5, 1, 8)


def test_half_an_environment_is_an_error():
    with pytest.raises(ValueError, match="RANK, WORLD_SIZE set .* but not LOCAL_RANK: start with torchrun"):
        process_of({"RANK": "0", "WORLD_SIZE": "2"})
