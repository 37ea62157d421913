"""Checkpoints that are damaged in any of their files, and what is offered instead."""

import shutil
import time

import pytest

from runs.test_checkpoint import _snapshot
from runs.test_manifest import FILES
from sparsellm.runs import checkpoint, saver
from sparsellm.runs.huggingface.find import find_checkpoint


@pytest.fixture
def folder(tmp_path):
    for step in (2, 4, 6):
        saver.save(tmp_path, _snapshot(step), keep=3)
    shutil.copytree(tmp_path / "step_00000006", tmp_path / "step_00000001_keep")
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_damage_to_any_file_is_named_and_the_one_before_is_offered(folder, name):
    path = folder / "step_00000006" / name
    assert sorted(file.name for file in path.parent.iterdir()) == FILES
    whole = path.read_bytes()
    flipped = [bytearray(whole) for _ in range(3)]
    for content, place in zip(flipped, (0, len(whole) // 3, len(whole) - 2), strict=True):
        content[place] ^= 1
    for content in (None, b"", whole[:-3], *flipped):
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)
        assert find_checkpoint(path.parent) == path.parent
        problem = "is missing" if content is None else "is .*damaged"
        with pytest.raises((ValueError, FileNotFoundError), match=f"{name} {problem}") as caught:
            checkpoint.load(path.parent)
        message = str(caught.value)
        older = folder / "step_00000004"
        assert (
            f"{older} is the newest complete checkpoint before it. Move step_00000006 elsewhere"
            in message
        )
        assert message.endswith(f"--resume {older} --set name=NEW")
    path.write_bytes(whole)
    assert checkpoint.load(path.parent).step == 6


@pytest.mark.parametrize("kind", ["model", "optimizer", "stats"])
@pytest.mark.parametrize("damaged", ["manifest.json", "{kind}.safetensors"])
def test_who_reads_tensors_says_what_to_do(folder, kind, damaged):
    path = folder / "step_00000006" / damaged.format(kind=kind)
    assert checkpoint.read_kind(path.parent, kind)
    for spoil in (lambda: path.write_bytes(path.read_bytes()[:-3]), path.unlink):
        spoil()
        with pytest.raises((ValueError, FileNotFoundError)) as caught:
            checkpoint.read_kind(path.parent, kind)
        assert path.name in str(caught.value)
        assert checkpoint.REMEDY in str(caught.value)


def test_positions_of_ranks_are_not_read_where_the_manifest_is_damaged(folder):
    path = folder / "step_00000006"
    (path / "manifest.json").write_text("{}")
    with pytest.raises(ValueError, match=r"manifest\.json is .*damaged.*an older checkpoint"):
        checkpoint.data_states(path)


def test_of_a_copy_the_step_decides_what_is_offered(folder):
    copy = folder / "step_00000009"
    shutil.copytree(folder / "step_00000004", copy)
    (copy / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match=rf"--resume {folder / 'step_00000004'} --set name=NEW$"):
        checkpoint.load(copy)


def test_a_save_is_finished_once_it_is_published(tmp_path):
    writer = saver.Saver(tmp_path, keep=1)
    assert not writer.finished
    writer.begin(_snapshot(1))
    end = time.monotonic() + 60
    while not writer.finished and time.monotonic() < end:
        time.sleep(0.01)
    assert writer.finished
    assert checkpoint.latest(tmp_path) == tmp_path / "step_00000001"
    assert writer.wait() == tmp_path / "step_00000001"
    assert not writer.finished
    writer.close()
