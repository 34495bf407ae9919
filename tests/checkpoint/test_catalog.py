"""What a --load means: which steps are usable, in which order, and what is an error (with path and reason)."""

import subprocess
import sys

import pytest

from megatron.checkpoint.catalog import find_checkpoint, list_steps, open_step, read_tracker
from megatron.checkpoint.format import MANIFEST, TRACKER, CheckpointDamaged, CheckpointNotFound, step_name
from tests.checkpoint.killed_saver import save


@pytest.fixture
def directory(tmp_path):
    for iteration in (2, 4):
        save(tmp_path, iteration, 1.0)
    return tmp_path


def iterations(*args, **kwargs):
    return [step.iteration for step in find_checkpoint(*args, **kwargs)]


def test_newest_first(directory):
    lines = []
    assert iterations(directory, log=lines.append) == [4, 2] and lines == []
    assert iterations(directory, ckpt_step=2) == [2]
    assert iterations(directory / step_name(2)) == [2]
    assert read_tracker(directory) == 4


def test_a_missing_path(tmp_path):
    with pytest.raises(CheckpointNotFound, match="--load .*typo: no such directory"):
        find_checkpoint(tmp_path / "typo")
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotFound, match="--pretrained-checkpoint .*file: not a directory"):
        find_checkpoint(tmp_path / "file", flag="--pretrained-checkpoint")


def test_an_empty_directory(tmp_path):
    lines = []
    assert find_checkpoint(tmp_path, log=lines.append) == []
    assert len(lines) == 1 and "NO CHECKPOINT" in lines[0] and str(tmp_path) in lines[0]
    with pytest.raises(CheckpointNotFound, match="holds no checkpoint, and one is required"):
        find_checkpoint(tmp_path, required=True)


@pytest.mark.parametrize("others", [True, False])
def test_a_tracker_that_names_an_absent_step(tmp_path, others):
    if others:
        save(tmp_path, 2, 1.0)
    (tmp_path / TRACKER).write_text("6\n")
    with pytest.raises(CheckpointNotFound, match=f"names iteration 6, but .*{step_name(6)} is not there"):
        find_checkpoint(tmp_path)


def test_an_explicit_step_that_is_absent_or_damaged(directory):
    with pytest.raises(CheckpointNotFound, match=r"--ckpt-step 3: no .*iter_0000003; complete steps.*\[2, 4\]"):
        find_checkpoint(directory, ckpt_step=3)
    with pytest.raises(CheckpointNotFound, match="--ckpt-step 4: .*holds iteration 2"):
        find_checkpoint(directory / step_name(2), ckpt_step=4)
    (directory / step_name(4) / MANIFEST).unlink()
    with pytest.raises(CheckpointDamaged, match=f"{step_name(4)}: no {MANIFEST}"):
        find_checkpoint(directory, ckpt_step=4)


def test_a_hand_edited_tracker_is_a_hint_and_said(directory):
    (directory / TRACKER).write_text("2\n")
    lines = []
    assert iterations(directory, log=lines.append) == [4, 2]
    assert len(lines) == 1 and "--ckpt-step 2" in lines[0]
    (directory / TRACKER).write_text("")  # a torn tracker of another program is no reason to stop
    assert iterations(directory) == [4, 2]


def test_half_written_and_deleted_steps_are_invisible(directory):
    (directory / "iter_0000004").rename(directory / "iter_0000006.tmp-abcd")
    (directory / ".trash").mkdir(exist_ok=True)
    (directory / "iter_0000002").rename(directory / ".trash" / "iter_0000002-ab")
    (directory / TRACKER).unlink()
    assert find_checkpoint(directory, log=lambda _: None) == []


def test_a_step_caught_in_a_swap_is_found_under_its_old_name(directory):
    (directory / step_name(4)).rename(directory / f"{step_name(4)}.old-abcd")
    assert iterations(directory) == [4, 2] and iterations(directory, ckpt_step=4) == [4]


@pytest.mark.parametrize(
    "names, kind",
    [
        (("config.json", "model.safetensors"), "Hugging Face"),
        (("config.json", "pytorch_model.bin"), "Hugging Face"),
        (("iter_0000005/mp_rank_00/model_optim_rng.pt", TRACKER), "Megatron-LM"),
        (("iter_0000005/.metadata", "iter_0000005/common.pt"), "Megatron-LM"),
        (("release/mp_rank_00/model_optim_rng.pt",), "Megatron-LM"),
    ],
)
def test_models_of_other_programs_are_recognised(tmp_path, names, kind):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("5")
    with pytest.raises(CheckpointNotFound, match=f"{kind}"):
        find_checkpoint(tmp_path)


def test_damaged_steps_are_listed_with_the_reason_and_skipped(directory):
    (directory / step_name(4) / "rank_00000.data").write_bytes(b"short")
    lines = []
    assert iterations(directory, log=lines.append) == [2]
    assert "rank_00000.data: 5 bytes, the manifest says" in lines[0] and "lost: " in lines[0] and "WARNING" in lines[0]
    assert [path.name for path, _ in list_steps(directory).broken] == [step_name(4)]


def test_a_newer_format_is_refused(directory):
    path = directory / step_name(4) / MANIFEST
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(CheckpointDamaged, match="format version 2 is newer"):
        open_step(directory / step_name(4))


def test_the_catalog_needs_no_torch(directory):
    code = (
        "import sys; from megatron.checkpoint.catalog import find_checkpoint; find_checkpoint(sys.argv[1]); "
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(directory)], check=True)


def test_a_start_from_scratch_beside_a_checkpoint_names_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("2")
    lines = []
    assert find_checkpoint(tmp_path, log=lines.append) == []
    assert lines == [
        f"NO CHECKPOINT in --load {tmp_path} ({tmp_path}/run holds one: was that meant?): STARTING FROM SCRATCH with "
        "newly initialised weights"
    ]
