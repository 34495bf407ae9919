"""What may go: never the newest, never a multiple of the interval."""

from types import SimpleNamespace

import pytest

from megatron.checkpoint.retention import Retention, discard, prepare_save_directory


@pytest.mark.parametrize(
    "options, gone",
    [
        ({}, []),
        ({"interval": 4}, [6, 2]),
        ({"keep_last": 2}, [6, 4, 2]),
        ({"keep_last": 0}, [8, 6, 4, 2]),
        ({"keep_last": 2, "interval": 4}, [6, 2]),
        ({"interval": 100}, [8, 6, 4, 2]),
    ],
)
def test_superseded(options, gone):
    steps = tuple(SimpleNamespace(iteration=iteration) for iteration in (10, 8, 6, 4, 2))
    assert [step.iteration for step in Retention(**options).superseded(steps)] == gone


def test_discard_goes_through_the_trash(tmp_path):
    (tmp_path / "iter_0000001").mkdir()
    (tmp_path / "iter_0000001" / "file").write_text("x")
    discard(tmp_path / "iter_0000001")
    assert [entry.name for entry in tmp_path.iterdir()] == [".trash"] and not list((tmp_path / ".trash").iterdir())


def test_prepare_makes_the_directory_and_clears_leftovers_only(tmp_path):
    directory = tmp_path / "new" / "dir"
    prepare_save_directory(directory)
    for name in ("iter_0000003.tmp-ab12", "iter_0000002.old-ab12", "iter_0000001", "logs", "my.tmp-1"):
        (directory / name).mkdir()
    lines = []
    prepare_save_directory(directory, lines.append)
    assert sorted(entry.name for entry in directory.iterdir()) == ["iter_0000001", "iter_0000002", "logs", "my.tmp-1"]
    assert len(lines) == 2
