#!/bin/sh
# Question: a model is made on the meta device, sharded by FSDP2 (fully_shard) over two CPU processes (gloo), and
#   initialised as documented: model.to_empty(device="cpu"), then reset_parameters() of its layers. All ranks have set the
#   same seed. Does the whole weight have as many random numbers as without sharding?
# Guess: yes. DTensor gives each rank its own part of the random numbers of one seed.
# Seen (torch 2.13.0, gloo): no. Each rank draws the same numbers for its shard, so the second half of the rows is the
#   first half again; with four ranks, each row stands four times. Mean and std are right. torch.nn.init does the same, and
#   F.dropout of a sharded DTensor drops the same places in each shard. The only message is a warning that "random operators
#   may not have complete support on cpu device mesh". With another seed on each rank, all rows differ.
# Hurts: small runs and tests on CPUs, and comparisons of FSDP2 with one process: tokens i and i + V/2 have one embedding
#   and one row of the head, and neurons come in pairs with the same gates. Initialise the model before it is sharded, or
#   set seeds by rank for the initialisation.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

dist.init_process_group("gloo")
rank = dist.get_rank()
mesh = init_device_mesh("cpu", (2,))


def different_rows(matrix):
    return len(matrix.unique(dim=0))


def initialised(seed):
    """The whole weight of a layer that was sharded before it was initialised."""
    with torch.device("meta"):
        layer = torch.nn.Linear(64, 128, bias=False)
    fully_shard(layer, mesh=mesh)
    layer.to_empty(device="cpu")
    torch.manual_seed(seed)
    layer.reset_parameters()
    assert isinstance(layer.weight, DTensor)
    return layer.weight.full_tensor()


torch.manual_seed(0)
whole = torch.nn.Linear(64, 128, bias=False).weight
sharded, by_rank = initialised(seed=0), initialised(seed=rank)
torch.manual_seed(0)
kept = torch.nn.functional.dropout(distribute_tensor(torch.ones(128, 64), mesh, [Shard(0)])).full_tensor()
if rank == 0:
    for name, weight in (("one process", whole), ("FSDP2, one seed", sharded), ("FSDP2, seeds by rank", by_rank)):
        print(f"{name}: {different_rows(weight)} different rows of {len(weight)}, std {weight.std():.4f}")
    print(f"dropout of a sharded tensor: {different_rows(kept)} different rows of {len(kept)}")
    assert different_rows(whole) == different_rows(by_rank) == 128
    assert abs(sharded.std() / whole.std() - 1) < 0.05
    assert different_rows(sharded) == different_rows(kept) == 64, "the behaviour has changed"
    assert torch.equal(sharded[:64], sharded[64:]), "the behaviour has changed"
dist.barrier()
dist.destroy_process_group()
PY
"$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
