"""Sample orders equal those Megatron-LM 0.20 drew from the same files (tests/golden/data/golden.json).

Megatron shares one loss mask between the samples of a worker, so that padding of the first sample masks every later
one. The recorded samples hold no padding and do not show it; that ours cannot leak is tested in test_masks.py.
"""

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest

from megatron.datasets.blend import Blend, BlendedDataset
from megatron.datasets.build import DataPlan, build_splits
from megatron.datasets.masks import MaskRules

GOLDEN = Path(__file__).parent.parent / "golden" / "data"
RECORD = json.loads((GOLDEN / "golden.json").read_text())


def short_hash(array: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()[:16]


def blend_of(record: list | None) -> Blend | None:
    if record is None:
        return None
    prefixes, weights = record
    return Blend(tuple(str(GOLDEN / name) for name in prefixes), None if weights is None else tuple(weights))


def build_case(case: dict, cache_path: str | None = None):
    config = case["config"]
    masks = MaskRules(
        eod=RECORD["eod"],
        pad=RECORD["pad"],
        eod_mask_loss=config["eod_mask_loss"],
        reset_position_ids=config["reset_position_ids"],
        reset_attention_mask=config["reset_attention_mask"],
    )
    per_split = config.get("blend_per_split")
    plan = DataPlan(
        sequence_length=config["sequence_length"],
        seed=config["random_seed"],
        masks=masks,
        blend=blend_of(config["blend"]),
        split=config["split"],
        blend_per_split=None if per_split is None else tuple(blend_of(blend) for blend in per_split),
        cache_path=cache_path,
    )
    return build_splits(plan, tuple(case["sizes"]))


def assert_array(ours: np.ndarray, record: dict) -> None:
    assert list(ours.shape) == record["shape"]
    head = record["head"]
    assert ours[: len(head)].tolist() == head
    assert short_hash(ours.astype(record["dtype"])) == record["sha"]


def assert_dataset(ours, record: dict) -> None:
    assert len(ours) == record["len"]
    if isinstance(ours, BlendedDataset):
        for name in ("dataset_index", "dataset_sample_index"):
            assert_array(getattr(ours.order, name), record[name])
        assert len(ours.datasets) == len(record["sub"])
        for dataset, sub in zip(ours.datasets, record["sub"]):
            assert_dataset(dataset, sub)
    else:
        for name in ("document_index", "sample_index", "shuffle_index"):
            array = getattr(ours.order, name)
            assert str(array.dtype) == record[name]["dtype"]
            assert_array(array, record[name])
    for sample, expected in zip((0, 1, len(ours) - 1), record["samples"]):
        assert_sample(ours[sample], expected)


def assert_sample(ours: dict, expected: dict) -> None:
    for name in ("tokens", "labels", "loss_mask", "position_ids"):
        assert ours[name][: len(expected[name])].tolist() == expected[name], name
        assert short_hash(ours[name]) == expected["sha"][name], name
    if "attention_mask" in expected:
        ids = ours["document_ids"]
        allowed = np.tril(ids[:, None] == ids[None, :])
        assert int((~allowed).sum()) == expected["attention_mask"]["true"]
        assert short_hash(~allowed[None]) == expected["sha"]["attention_mask"]


@pytest.mark.parametrize("name", sorted(RECORD["cases"]))
def test_equals_megatron(name):
    case = RECORD["cases"][name]
    datasets = build_case(case)
    assert len(datasets) == len(case["splits"])
    for ours, record in zip(datasets, case["splits"]):
        assert_dataset(ours, record)
