#!/bin/sh
# Question: a convolution (the short one of Mamba and other recurrent layers, or patches of an image) gets a DTensor that is
#   sharded along the sequence, or one that is still partial sums of a row-wise parallel layer. What is its output?
# Guess: right, after communication, as for other functions of DTensors, or an error.
# Seen (torch 2.13.0, gloo, two CPU processes): each rank convolves its own shard, and the output claims to be replicated.
#   So a sequence of 16 becomes one of 8, which has other numbers on each rank, and full_tensor() does not communicate. Of
#   partial sums, each rank's output is that of its own part. conv1d and conv2d, any padding. Sharded along the batch it is
#   right; sharded along the channels it is an error. Pull request 186129 of PyTorch, on sharded channels, names the cause:
#   a placement for which there is no rule is taken for a replicated one.
# Hurts: hybrid models under sequence or tensor parallelism, and vision models: ranks compute different models from
#   there on, in silence where lengths still fit (partial sums). Redistribute to Replicate() before the convolution.
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
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.nn import functional as F

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
torch.manual_seed(0)
CASES = {
    "depthwise conv1d": (F.conv1d, torch.randn(2, 6, 16), torch.randn(6, 1, 3), {"padding": 1, "groups": 6}),
    "conv2d of patches": (F.conv2d, torch.randn(2, 3, 16, 16), torch.randn(5, 3, 4, 4), {"stride": 4}),
}
for name, (convolve, x, weight, options) in CASES.items():
    right = convolve(x, weight, **options)
    inputs = {
        "replicated": distribute_tensor(x, mesh, [Replicate()]),
        "sharded along the batch": distribute_tensor(x, mesh, [Shard(0)]),
        "sharded along the sequence": distribute_tensor(x, mesh, [Shard(2)]),
        "partial sums": DTensor.from_local(x / 2, mesh, [Partial()]),
    }
    for kind, spread in inputs.items():
        out = convolve(spread, distribute_tensor(weight, mesh, [Replicate()]), **options)
        whole = out.full_tensor()
        same = whole.shape == right.shape and torch.allclose(whole, right, atol=1e-5)
        everyone = [torch.empty_like(whole) for _ in range(2)]
        dist.all_gather(everyone, whole)
        agree = torch.equal(*everyone)
        if dist.get_rank() == 0:
            print(f"{name}, {kind}: output {tuple(whole.shape)} of {tuple(right.shape)}, {out.placements[0]}, "
                  f"{'right' if same else 'wrong'}, the ranks {'agree' if agree else 'differ'}")
        if kind in ("replicated", "sharded along the batch"):
            assert same and agree
        else:
            assert out.placements[0] == Replicate() and not same, "the behaviour has changed"
            assert agree == (kind == "partial sums"), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
