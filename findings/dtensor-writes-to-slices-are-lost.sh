#!/bin/sh
# Question: a model is sharded by FSDP2. Rows of a weight are changed in place: weight[0].zero_() for a padding token,
#   weight[2:5].mul_(0) for pruned neurons, weight[6:].normal_() for new tokens. Are they changed?
# Guess: yes, or an error. A slice of a tensor is a view; weight[0] = 0 does raise for these weights.
# Seen (torch 2.13.0, gloo, two CPU processes): nothing is changed, without a message. A slice along the dimension that is
#   sharded is gathered into a new tensor, and the change goes there. Slices of columns are views, and are changed. Under
#   tensor parallelism with sharded columns, it is the other way round. Masks work: weight.mul_(mask).
# Hurts: pruning and reviving of neurons, new rows of a vocabulary, rows that are kept at zero, and initialisation by rows
#   after fully_shard: weights stay as they were, and a count of zeros over the whole model is the only sign.
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
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
mask = (torch.arange(8) >= 4)[:, None].float().expand(8, 8)
CHANGES = {
    "weight[0].zero_()": lambda weight: weight[0].zero_(),
    "weight[2:5].mul_(0)": lambda weight: weight[2:5].mul_(0),
    "weight[6:].fill_(7)": lambda weight: weight[6:].fill_(7),
    "weight[:, 2:5].mul_(0)": lambda weight: weight[:, 2:5].mul_(0),
}


def build(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    if kind == "FSDP2":
        fully_shard(model, mesh=mesh)
    if kind == "columns sharded":
        parallelize_module(model, mesh, {"0": RowwiseParallel()})
    return model[0].weight


def after(change, kind):
    weight = build(kind)
    with torch.no_grad():
        change(weight)
    return weight.detach() if kind == "one process" else weight.full_tensor().detach()


before = build("one process").detach()
for kind in ("FSDP2", "columns sharded"):
    for name, change in CHANGES.items():
        found, right = after(change, kind), after(change, "one process")
        assert not torch.equal(right, before)
        unchanged = "unchanged" if torch.equal(found, before) else "other"
        result = "as in one process" if torch.equal(found, right) else unchanged
        if dist.get_rank() == 0:
            print(f"{kind}, {name}: {result}")
        of_columns = "[:, " in name
        views = of_columns == (kind == "FSDP2")
        assert result == ("as in one process" if views else "unchanged"), "the behaviour has changed"

weight = build("FSDP2")
try:
    with torch.no_grad():
        weight[0] = 0
    raise AssertionError("the behaviour has changed")
except RuntimeError as error:
    message = str(error).split(":")[0]
if dist.get_rank() == 0:
    print("FSDP2, weight[0] = 0: RuntimeError:", message)
dist.destroy_process_group()
PY
"$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
