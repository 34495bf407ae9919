"""Manifests: exact round trip, any changed byte noticed."""

import pytest

from megatron.checkpoint.boxes import Box
from megatron.checkpoint.format import Item, Manifest, RankFiles, step_name, write_durably

FILES = RankFiles(rank=0, data="rank_00000.data", data_bytes=10, index="rank_00000.json", index_bytes=5, index_crc=7)
SCALARS = {"lr": 0.1 + 0.2, "steps": (1, 2), "text": "Größe", "none": None, "big": 2**63}


def test_round_trip():
    manifest = Manifest(iteration=12, sequence=3, ranks=(FILES,), scalars=SCALARS, config={"a": True})
    back = Manifest.loads(manifest.dumps())
    assert back.ranks == manifest.ranks and (back.iteration, back.sequence) == (12, 3)
    assert back.scalars == {**SCALARS, "steps": [1, 2]} and back.nbytes == 15


def test_any_changed_byte_is_noticed():
    text = Manifest(iteration=12, sequence=3, ranks=(FILES,), scalars=SCALARS).dumps()
    for at in range(0, len(text), 3):
        changed = bytearray(text)
        changed[at] ^= 0x01
        try:
            back = Manifest.loads(bytes(changed))
        except (ValueError, TypeError, KeyError):
            continue
        assert back == Manifest.loads(text)  # white space


def test_items_round_trip():
    item = Item(
        name="param/w", dtype="bfloat16", shape=(4, 2), box=Box((0, 1), (4, 1)), at=64, nbytes=16, crc=(1, 2), block=8
    )
    assert Item.from_json(item.to_json(), "f") == Item(**{**item.__dict__, "file": "f"})


def test_step_names_are_megatrons():
    assert step_name(123) == "iter_0000123"


def test_durable_writes_replace(tmp_path):
    for content in (b"1\n", b"2\n"):
        write_durably(tmp_path / "tracker", content)
        assert [entry.read_bytes() for entry in tmp_path.iterdir()] == [content]


def test_a_manifest_of_something_else_is_a_value_error():
    for text in (b"", b"[]", b"{}", b'{"version": "x"'):
        with pytest.raises(ValueError):
            Manifest.loads(text)
