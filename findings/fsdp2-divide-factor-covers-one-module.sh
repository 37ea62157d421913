#!/bin/sh
# Question: the loss is divided by the number of tokens of all ranks, so gradients are to be added over ranks, not averaged.
#   Does model.set_gradient_divide_factor(1.0) on the root of an FSDP2 model, whose layers are sharded one by one, do that?
# Guess: yes. model.set_requires_gradient_sync() and model.set_reshard_after_backward() on the root hold for all FSDP
#   modules below it (recurse=True).
# Seen (torch 2.13.0, gloo, two CPU processes): it holds only for parameters that belong to no sharded layer. The layers'
#   gradients are still averaged, so with 64 ranks they have 1/64 of their size, and the root's are right. There is
#   no argument recurse, and the docstring does not say it. Calling it for each FSDPModule in model.modules() is right.
# Hurts: token-weighted losses under FSDP2: embeddings, the last norm and the head (often left to the root) get gradients
#   as many times as large as the layers' as there are ranks. The norm and clipping see mostly these; Adam hides the rest.
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
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (ranks,))
torch.manual_seed(0)
inputs = torch.randn(ranks, 6, 16)


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 8))


whole = build()
for own in inputs:
    whole(own).square().mean().backward()  # the sum over ranks
for name, modules in {
    "not called": lambda model: [],
    "called on the root": lambda model: [model],
    "called on each FSDP module": lambda model: [module for module in model.modules() if isinstance(module, FSDPModule)],
}.items():
    model = build()
    # gloo has no operation that scales, for which FSDP2 asks in fp32 and bf16; with fp16 it divides by itself.
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float16)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for module in modules(model):
        module.set_gradient_divide_factor(1.0)
    model(inputs[rank]).square().mean().backward()
    parts = [(model[i].weight.grad.full_tensor().norm() / whole[i].weight.grad.norm()).item() for i in (0, 2, 4)]
    if rank == 0:
        print(f"{name}: of the sum over ranks, the layers' gradients are {parts[0]:.2f} and {parts[1]:.2f}, "
              f"the head's {parts[2]:.2f}")
    expected = {"not called": (0.5, 0.5), "called on the root": (0.5, 1), "called on each FSDP module": (1, 1)}[name]
    assert all(abs(part - want) < 0.01 for part, want in zip(parts, (expected[0], *expected))), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
