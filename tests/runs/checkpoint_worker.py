"""One of four ranks of test_sharded_checkpoint.py: ``torchrun checkpoint_worker.py FOLDER``.

Saves one state from four ranks that have it whole, loads it sharded over four, saves that, loads it
sharded over two and whole on four, and compares every bit. The last save fails on one rank.
"""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from sparsellm.runs import checkpoint, saver, state
from sparsellm.runs.checkpoint import CheckpointError, Snapshot


def build(mesh=None):
    """A model whose rows divide by neither two nor four, and one that has fewer rows than ranks."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.Linear(7, 3))
    if mesh is not None:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def train(model, optimizer, steps):
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def snapshot(step, model, optimizer):
    rank = dist.get_rank()
    return Snapshot(
        step=step,
        model=state.model_tensors(model),
        optimizer=state.optimizer_tensors(model, optimizer),
        stats={"silent": torch.tensor([step])},
        trainer={"step": step, "tokens": 0, "world_size": dist.get_world_size()},
        recipe_yaml="name: r\n",
        data={"cursor": rank},
        rng={"cpu": torch.get_rng_state()},
    )


def save(folder, group, content):
    keeper = saver.Saver(folder, keep=2, group=group)
    tensors = [*content.model.values(), *content.optimizer.values()]
    before = [tensor.clone() for tensor in tensors]
    keeper.begin(content)
    for tensor in tensors:
        tensor.zero_()  # the next step of training changes them too, while they are written
    path = keeper.wait()
    keeper.close()
    for tensor, value in zip(tensors, before, strict=True):
        tensor.copy_(value)
    return path


def wholes(model, optimizer):
    tensors = [*model.parameters()]
    for parameter in model.parameters():
        tensors += [value for _, value in sorted(optimizer.state[parameter].items())]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t.clone() for t in tensors]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    rank = dist.get_rank()
    model, optimizer = build()
    train(model, optimizer, steps=3)
    expected = wholes(model, optimizer)

    def same(actual):
        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    replicated = save(folder / "replicated", group, snapshot(3, model, optimizer))

    four = build(DeviceMesh("cpu", [0, 1, 2, 3]))
    state.restore(*four, replicated)
    same(wholes(*four))
    sharded = save(folder / "sharded", group, snapshot(3, *four))

    whole = build()
    assert checkpoint.data_states(sharded)[rank] == {"cursor": rank}
    state.restore(*whole, sharded)
    same(wholes(*whole))

    hsdp = build(DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("replicate", "shard")))
    state.restore(*hsdp, sharded)
    same(wholes(*hsdp))
    save(folder / "hsdp", group, snapshot(3, *hsdp))

    pair = dist.new_group([0, 1], backend="gloo")
    mesh = DeviceMesh("cpu", [0, 1])
    if rank < 2:
        two = build(mesh)
        state.restore(*two, sharded)
        same(wholes(*two))
        save(folder / "two", pair, snapshot(3, *two))

    if rank == 2:

        def no_space(*arguments):
            raise OSError(28, "No space left on device")

        saver._write_files = no_space
    with pytest.raises(CheckpointError, match=r"No space left on device \(rank 2\); ") as failure:
        save(folder / "sharded", group, snapshot(4, *four))
    assert f"{sharded} is intact. Free space" in str(failure.value)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
