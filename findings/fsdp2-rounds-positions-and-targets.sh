#!/bin/sh
# Question: FSDP2 with MixedPrecisionPolicy(param_dtype=torch.bfloat16). The model's forward takes, beside tokens, numbers
#   in fp32: time steps, positions, regression targets, loss weights. Do they arrive as they are?
# Guess: yes. The policy is for parameters; under autocast and DDP these inputs are left alone.
# Seen (torch 2.13.0, gloo, two CPU processes): no, without a message. cast_forward_inputs is True by default, and each
#   module that is wrapped rounds all floating-point tensors among its arguments to bf16, also those in a dict. Above 256, neighbouring integers become equal: 257 is 256, 999 is 1000. The lowest number of fp32, as in
#   additive masks, becomes -inf, and a row that is all masked has NaN. Integers are left alone.
# Hurts: diffusion time steps, float positions and lengths, value targets and loss weights that the model computes its loss
#   from: they are 0.4% off, and different ones coincide. Set cast_forward_inputs=False on the root, or pass integers.
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
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
steps = torch.arange(1000.0)
lowest = torch.full((2, 4), torch.finfo(torch.float32).min)  # an additive mask whose rows mask everything


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, extra):
        self.seen, self.softmax = extra["steps"], (self.layer(x) + extra["mask"]).softmax(-1)
        return self.layer(x)


def build(kind):
    model = Model()
    if kind == "DDP, autocast":
        return model, DistributedDataParallel(model)
    policy = MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=kind == "FSDP2")
    return model, fully_shard(model, mesh=mesh, mp_policy=policy)


for kind in ("DDP, autocast", "FSDP2", "FSDP2, cast_forward_inputs=False"):
    model, wrapped = build(kind)
    x = torch.randn(2, 4).to(torch.float32 if kind == "DDP, autocast" else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "DDP, autocast"):
        wrapped(x, extra={"steps": steps, "mask": lowest})
    different, nan = len(model.seen.unique()), model.softmax.isnan().any().item()
    if dist.get_rank() == 0:
        print(f"{kind}: {different} different steps of {len(steps)}, 999 is {model.seen[999].item():g}; NaN: {nan}")
    assert (different < 600 and nan) if kind == "FSDP2" else (different == 1000 and not nan), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
