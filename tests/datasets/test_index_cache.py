"""The index cache: same arrays with and without it, no stale hits, no half entries."""

import threading

import numpy as np
import pytest

from megatron.datasets.index_cache import IndexCache


def test_builds_once_and_returns_the_same(tmp_path):
    calls = []

    def build():
        calls.append(1)
        return {"a": np.arange(5), "b": np.zeros((2, 2), np.int32)}

    cache = IndexCache(tmp_path / "deep" / "cache")
    first = cache.load_or_build({"seed": 1}, build)
    second = cache.load_or_build({"seed": 1}, build)
    assert len(calls) == 1
    assert all(np.array_equal(first[name], second[name]) and first[name].dtype == second[name].dtype for name in first)
    cache.load_or_build({"seed": 2}, build)
    assert len(calls) == 2
    assert all(not entry.name.startswith("building") for entry in cache.directory.iterdir())


def test_a_failed_build_leaves_nothing(tmp_path):
    def build():
        raise ValueError("no")

    cache = IndexCache(tmp_path)
    with pytest.raises(ValueError, match="no"):
        cache.load_or_build({}, build)
    assert list(tmp_path.iterdir()) == []


def test_a_crash_while_storing_is_invisible(tmp_path, monkeypatch):
    cache = IndexCache(tmp_path)

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "save", fail)
    with pytest.raises(KeyboardInterrupt):
        cache.load_or_build({}, lambda: {"a": np.arange(3)})
    monkeypatch.undo()
    assert cache.load_or_build({}, lambda: {"a": np.arange(4)})["a"].tolist() == [0, 1, 2, 3]


def test_builders_may_race(tmp_path):
    barrier, results = threading.Barrier(4), []

    def build():
        barrier.wait(10)
        return {"a": np.arange(1000)}

    def worker():
        results.append(IndexCache(tmp_path).load_or_build({"x": 1}, build)["a"].sum())

    threads = [threading.Thread(target=worker) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [499_500] * 4
    assert len(list(tmp_path.iterdir())) == 1


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="--data-cache-path"):
        IndexCache(tmp_path / "file" / "cache")
