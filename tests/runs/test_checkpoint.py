"""Checkpoints: atomic, durable, pruned late, and clear about damage."""

import errno
import os
import resource
import shutil
import threading
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from sparsellm.runs import checkpoint, saver, state
from sparsellm.runs.checkpoint import CheckpointError, Snapshot
from sparsellm.runs.files import read_tensors, write_atomically


def _snapshot(step: int, size: int = 8) -> Snapshot:
    return Snapshot(
        step=step,
        model={"w": torch.full((size,), float(step))},
        optimizer={"exp_avg.w": torch.full((size,), step + 0.5)},
        stats={"silent": torch.tensor([2**40 + step])},  # which fp32 would round
        trainer={"step": step, "world_size": 1},
        recipe_yaml=f"name: r{step}\n",
        data={"cursor": step},
        rng={"cpu": torch.get_rng_state()},
    )


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_saved_is_loaded(tmp_path):
    path = saver.save(tmp_path, _snapshot(7), keep=2)
    assert checkpoint.latest(tmp_path) == path
    loaded = checkpoint.load(path, rank=0)
    assert loaded.step == 7
    assert checkpoint.data_states(path) == [{"cursor": 7}]
    assert (path / "recipe.yaml").read_text() == "name: r7\n"
    assert loaded.trainer == {"step": 7, "world_size": 1, "format": checkpoint.FORMAT}
    assert checkpoint.read_stats(path)["silent"].tolist() == [2**40 + 7]
    assert torch.equal(checkpoint.read_kind(path, "model")["w"], torch.full((8,), 7.0))
    assert torch.equal(checkpoint.read_kind(path, "optimizer")["exp_avg.w"], torch.full((8,), 7.5))
    assert torch.equal(loaded.rng["cpu"], torch.get_rng_state())


def test_tensors_may_change_as_soon_as_a_save_has_begun(tmp_path, monkeypatch):
    changed, real = threading.Event(), saver._write_files

    def late(*arguments):
        assert changed.wait(30)
        return real(*arguments)

    monkeypatch.setattr(saver, "_write_files", late)
    writer, snapshot = saver.Saver(tmp_path, keep=1), _snapshot(3)
    kinds = {"model": snapshot.model, "optimizer": snapshot.optimizer, "stats": snapshot.stats}
    kinds["rank_00000"] = snapshot.rng
    before = {kind: {n: t.clone() for n, t in tensors.items()} for kind, tensors in kinds.items()}
    writer.begin(snapshot)
    for tensors in kinds.values():
        for tensor in tensors.values():
            tensor.zero_()
    changed.set()
    path = writer.wait()
    writer.close()
    for kind, tensors in before.items():
        read = read_tensors(path / f"{kind}.safetensors", "")
        assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())


def test_a_copy_beside_them_is_left_alone(tmp_path):
    (tmp_path / "step_00000001_keep").mkdir()
    (tmp_path / "step_best").mkdir()
    for step in (1, 2, 3):
        saver.save(tmp_path, _snapshot(step), keep=1)
    assert _names(tmp_path) == ["latest", "step_00000001_keep", "step_00000003", "step_best"]
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path).name == "step_00000003"


def test_the_step_decides_and_not_the_name_of_a_copy(tmp_path):
    whole = saver.save(tmp_path, _snapshot(9), keep=1)
    copies = [tmp_path / name for name in ("step_99999999", "step_00000012", "step_00000001")]
    for copy in copies:
        shutil.copytree(whole, copy)
    path = saver.save(tmp_path, _snapshot(10), keep=1)
    assert checkpoint.latest(tmp_path) == path
    assert checkpoint.checkpoints_in(tmp_path) == [path]
    assert all(copy.is_dir() for copy in copies)
    saver.save(tmp_path, _snapshot(12), keep=1)  # where a copy of step 9 is
    assert checkpoint.load(tmp_path / "step_00000012").step == 12
    assert checkpoint.load(tmp_path / "step_00000012.stray").step == 9
    shutil.copytree(tmp_path / "step_00000012", tmp_path / "step_00000013")
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path).name == "step_00000012"


def test_while_steps_are_skipped_the_checkpoints_from_before_stay(tmp_path):
    for step in (2, 4):
        saver.save(tmp_path, _snapshot(step), keep=2)
    for step in (6, 8, 10):
        skips = replace(_snapshot(step), trainer={"step": step, "skipped_in_a_row": step - 5})
        saver.save(tmp_path, skips, keep=2)
    names = ["step_00000002", "step_00000004", "step_00000010"]
    assert [p.name for p in checkpoint.checkpoints_in(tmp_path)] == names
    saver.save(tmp_path, _snapshot(12), keep=2)
    names = ["step_00000010", "step_00000012"]
    assert [p.name for p in checkpoint.checkpoints_in(tmp_path)] == names


@pytest.mark.parametrize(
    "name",
    [b"/etc", b"..", b".", b"", b"step_0/../..", b"n\0", b"step_" + 999 * b"9", b"\xff"],
)
def test_a_pointer_that_names_no_checkpoint_is_passed_over(tmp_path, name):
    path = saver.save(tmp_path, _snapshot(1), keep=1)
    (tmp_path / "latest").write_bytes(name)
    assert checkpoint.latest(tmp_path) == path


def test_strays_in_a_checkpoint_are_not_read(tmp_path):
    path = saver.save(tmp_path, _snapshot(1), keep=1)
    for name in ("rank_00001.json", "model-00001-of-00002.safetensors", "rank_00001.safetensors"):
        (path / name).write_text("of another run")
    assert checkpoint.data_states(path) == [{"cursor": 1}]
    assert checkpoint.load(path, rank=1, world_size=2).rng == {}
    assert list(checkpoint.read_kind(path, "model")) == ["w"]
    (path / "stats.safetensors").rename(path / "stats-00001-of-00001.safetensors")
    with pytest.raises(FileNotFoundError, match=r"/stats.safetensors is missing"):
        checkpoint.read_kind(path, "stats")


def test_a_small_file_that_cannot_be_replaced_leaves_nothing(tmp_path):
    (tmp_path / "taken").mkdir()
    with pytest.raises(IsADirectoryError, match=rf"Is a directory: '{tmp_path}/taken'$"):
        write_atomically(tmp_path / "taken", "text")
    assert _names(tmp_path) == ["taken"]


def test_a_failure_of_the_last_save_is_a_warning_with_its_reason(tmp_path, monkeypatch, capsys):
    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(saver, "_write_files", full)
    writer = saver.Saver(tmp_path, keep=1)
    writer.begin(_snapshot(1))
    writer.close()
    err = capsys.readouterr().err
    assert "step_00000001 was not written: [Errno 28] No space left on device; there is no" in err
    assert "Free space and start again" in err


@pytest.fixture
def three_ranks(tmp_path, monkeypatch):
    """Savers of three ranks, which are threads of this process."""
    barrier, contributions = threading.Barrier(3, timeout=30), [None] * 3

    def gather(everyone, contribution, group):
        contributions[group.rank] = contribution
        barrier.wait()
        everyone[:] = deepcopy(contributions)
        barrier.wait()

    monkeypatch.setattr(dist, "get_rank", lambda group: group.rank)
    monkeypatch.setattr(dist, "get_world_size", lambda group: len(contributions))
    monkeypatch.setattr(dist, "all_gather_object", gather)
    savers = [saver.Saver(tmp_path, 2, ["0"], SimpleNamespace(rank=rank)) for rank in range(3)]
    yield savers
    for writer in savers:
        writer.close()


def _begin(savers, snapshot):
    for rank, writer in enumerate(savers):
        writer.begin(replace(snapshot, data={"cursor": rank}))


def test_ranks_share_out_what_all_have_and_the_first_publishes_it(tmp_path, three_ranks):
    tensors = {f"w{size}": torch.randn(size, 100) for size in (7, 1, 3, 5, 2, 6)}
    for step in (4, 8):
        _begin(three_ranks, replace(_snapshot(step), model=tensors))
        path = tmp_path / checkpoint.step_name(step)
        assert [writer.wait() for writer in three_ranks] == [path] * 3
    assert checkpoint.latest(tmp_path) == path
    shares = [load_file(path / f"model-0000{rank}-of-00003.safetensors") for rank in (1, 2, 3)]
    assert sorted(name for share in shares for name in share) == sorted(tensors)
    assert [sum(t.nbytes for t in share.values()) for share in shares] == [8 * 400] * 3
    for name, tensor in checkpoint.read_kind(path, "model").items():
        assert torch.equal(tensor, tensors[name])
    assert torch.equal(checkpoint.read_kind(path, "optimizer")["exp_avg.w"], torch.full((8,), 8.5))
    for rank in range(3):
        loaded = checkpoint.load(path, rank, world_size=3)
        assert checkpoint.data_states(path)[rank] == {"cursor": rank}
        assert loaded.manifest.world_size == 3
        assert len(loaded.manifest.ancestors) == 2


def test_the_failure_of_one_rank_is_that_of_all_and_names_it(tmp_path, three_ranks, monkeypatch):
    _begin(three_ranks, _snapshot(1))
    assert all(writer.wait() for writer in three_ranks)
    real = saver._write_files

    def full(partial, texts, tensors):
        if "rank_00002.json" in texts:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(partial, texts, tensors)

    monkeypatch.setattr(saver, "_write_files", full)
    _begin(three_ranks, _snapshot(2))
    for writer in three_ranks:
        with pytest.raises(
            CheckpointError,
            match=r"left on device \(rank 2\); .*/step_00000001 is intact. Free space and start ag",
        ):
            writer.wait()
    assert _names(tmp_path) == ["latest", "step_00000001"]


def test_saving_the_same_step_again_sets_the_first_aside(tmp_path):
    saver.save(tmp_path, _snapshot(5), keep=2)
    again = _snapshot(5)
    again.model["w"] += 1
    path = saver.save(tmp_path, again, keep=2)
    assert float(checkpoint.read_kind(path, "model")["w"][0]) == 6
    aside = tmp_path / "step_00000005.stray"
    assert float(checkpoint.read_kind(aside, "model")["w"][0]) == 5
    assert _names(tmp_path) == ["latest", "step_00000005", "step_00000005.stray"]


def test_remains_of_a_killed_save_are_ignored_and_swept(tmp_path):
    saver.save(tmp_path, _snapshot(1), keep=2)
    (tmp_path / ".tmp-step_00000002").mkdir()
    (tmp_path / ".tmp-step_00000002" / "model.safetensors").write_bytes(b"half")
    assert checkpoint.latest(tmp_path).name == "step_00000001"
    saver.save(tmp_path, _snapshot(2), keep=2)
    assert _names(tmp_path) == ["latest", "step_00000001", "step_00000002"]


def test_without_the_pointer_the_newest_complete_one_counts(tmp_path):
    assert checkpoint.latest(tmp_path) is None
    for step in (9, 10):
        saver.save(tmp_path, _snapshot(step), keep=3)
    (tmp_path / "latest").unlink()
    assert checkpoint.latest(tmp_path).name == "step_00000010"


def test_other_shapes_and_names_are_refused():
    model = torch.nn.Linear(4, 3)
    weight = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"lacks bias of the recipe's model"):
        state.restore_model(model, {"weight": weight})
    surplus = dict.fromkeys(("weight", "bias", "a", "b"), weight)
    with pytest.raises(ValueError, match=r"has a and 1 more, unlike the recipe's model"):
        state.restore_model(model, surplus)
    with pytest.raises(ValueError, match=r"weight has shape \(2, 4\), the recipe's model \(3, 4\)"):
        state.restore_model(model, {"weight": torch.zeros(2, 4), "bias": torch.zeros(3)})


def test_full_disk_leaves_the_previous_checkpoint(tmp_path):
    folder = tmp_path / "checkpoints"
    saver.save(folder, _snapshot(1), keep=1)
    # The kernel refuses the write as it does on a full disk; only the error's number differs.
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"step_00000001 is intact\. Free space"):
            saver.save(folder, _snapshot(2, size=1_000_000), keep=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert _names(folder) == ["latest", "step_00000001"]
    assert checkpoint.load(checkpoint.latest(folder), 0).step == 1


def test_files_are_synced_before_the_rename(tmp_path, monkeypatch):
    events = []
    real_fsync, real_rename = os.fsync, Path.rename

    def rename(self, target):
        events.append(("rename", Path(target).name))
        return real_rename(self, target)

    def fsync(descriptor):
        events.append(("fsync", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        real_fsync(descriptor)

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr(os, "fsync", fsync)
    path = saver.save(tmp_path, _snapshot(1), keep=1)
    published = events.index(("rename", path.name))
    synced = {name for kind, name in events[:published] if kind == "fsync"}
    assert synced == {p.name for p in path.iterdir()} | {".tmp-step_00000001"}
    assert ("fsync", tmp_path.name) in events[published:]


def test_optimizer_state_round_trips_to_identical_steps(tmp_path):
    def model_and_optimizer():
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)

    def step(model, optimizer, seed):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    model, optimizer = model_and_optimizer()
    for seed in range(3):
        step(model, optimizer, seed)
    moments = state.optimizer_tensors(model, optimizer)
    snapshot = replace(_snapshot(3), model=state.model_tensors(model), optimizer=moments)
    path = saver.save(tmp_path, snapshot, keep=1)
    step(model, optimizer, 3)

    other, other_optimizer = model_and_optimizer()
    state.restore(other, other_optimizer, path)
    step(other, other_optimizer, 3)
    assert torch.equal(other.weight, model.weight)
    assert torch.equal(other.bias, model.bias)
    incomplete = {key: value for key, value in moments.items() if "bias" not in key}
    path = saver.save(tmp_path, replace(snapshot, optimizer=incomplete), keep=1)
    with pytest.raises(ValueError, match=r"optimizer.safetensors has no state .* such as bias"):
        state.restore(other, other_optimizer, path)


def test_a_rank_saves_its_shards_and_gets_them_back(tmp_path, process_group):
    def sharded():
        torch.manual_seed(0)
        model = torch.nn.Linear(5, 3)
        fully_shard(model, mesh=DeviceMesh("cpu", [0]))
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    model, optimizer = sharded()
    model(torch.ones(1, 5)).sum().backward()
    optimizer.step()
    full_state = state.gather_model(model)
    moments = state.optimizer_tensors(model, optimizer)
    writer = saver.Saver(tmp_path, keep=1, group=dist.group.WORLD)
    writer.begin(replace(_snapshot(1), model=state.model_tensors(model), optimizer=moments))
    path = writer.wait()
    writer.close()
    other, other_optimizer = sharded()
    state.restore(other, other_optimizer, path)
    restored = state.optimizer_tensors(other, other_optimizer)
    assert restored.keys() == moments.keys()
    for name, moment in moments.items():
        pair = (t.full_tensor() if isinstance(t, DTensor) else t for t in (restored[name], moment))
        assert torch.equal(*pair)
    for name, whole in state.gather_model(other).items():
        assert torch.equal(whole, full_state[name])
        assert torch.equal(whole, checkpoint.read_kind(path, "model")[name])


def test_links_and_strays_are_neither_counted_nor_deleted_nor_in_the_way(tmp_path, capsys):
    folder, elsewhere = tmp_path / "checkpoints", tmp_path / "elsewhere"
    linked = saver.save(elsewhere, _snapshot(1), keep=1)
    folder.mkdir()
    (folder / "step_00000001").symlink_to(linked)
    (folder / "step_00000002").mkdir()  # half of a copy
    (folder / "step_00000002" / "model.safetensors").write_bytes(b"half")
    (folder / "step_00000004").symlink_to(linked)  # where a checkpoint is about to be written
    (folder / ".tmp-step_00000009").symlink_to(linked)
    (folder / ".tmp-pruned-step_00000001").symlink_to(linked)
    assert checkpoint.latest(folder) is None
    for step in (2, 3, 4, 5):
        saver.save(folder, _snapshot(step), keep=2)
    assert [p.name for p in checkpoint.checkpoints_in(folder)] == ["step_00000004", "step_00000005"]
    strays = ["step_00000001", "step_00000002.stray", "step_00000004.stray"]
    assert _names(folder) == ["latest", *sorted([*strays, "step_00000004", "step_00000005"])]
    assert (folder / "step_00000002.stray" / "model.safetensors").read_bytes() == b"half"
    assert checkpoint.load(linked).step == 1
    assert "step_00000002 was there already; it is " in capsys.readouterr().err


def test_what_cannot_be_deleted_blocks_neither_saving_nor_pruning(tmp_path, monkeypatch, capsys):
    held = (".tmp-step_00000001", ".tmp-step_00000003", ".tmp-pruned-step_00000001")
    for name in held:
        (tmp_path / name).mkdir()
    real = shutil.rmtree

    def refused(path, **options):
        if path.name in held:
            raise PermissionError(13, "Permission denied", str(path))
        real(path, **options)

    monkeypatch.setattr("shutil.rmtree", refused)
    for step in (1, 2, 3):
        saver.save(tmp_path, _snapshot(step), keep=1)
    assert [p.name for p in checkpoint.checkpoints_in(tmp_path)] == ["step_00000003"]
    assert not list(tmp_path.glob(".tmp-pruned-step_00000002"))
    err = capsys.readouterr().err
    assert "the remains of a killed run could not be deleted" in err
    assert "an old checkpoint could not be deleted" in err


def test_a_folder_that_ranks_do_not_share_is_found_out(tmp_path, monkeypatch):
    saver.save(tmp_path, _snapshot(1), keep=1)
    real = saver._write_files

    def elsewhere(partial, texts, tensors):
        written = real(partial, texts, tensors)
        return written | {"rank_00001.json": written["rank_00000.json"]}  # on a disk of its own

    monkeypatch.setattr(saver, "_write_files", elsewhere)
    with pytest.raises(
        CheckpointError,
        match=r"rank_00001.json, .* that all ranks share; .*/step_00000001 is intact. Fix that",
    ):
        saver.save(tmp_path, _snapshot(2), keep=1)
    assert _names(tmp_path) == ["latest", "step_00000001"]
