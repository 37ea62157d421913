#!/bin/sh
# Needs two GPUs. PYTHON: a Python with torch for CUDA (seen with 2.11.0, CUDA 13.0, two H200).
#
# Question: if one rank has a NaN, does all_reduce(MAX) over ranks show it to all of them?
# Guess: yes. torch.maximum and amax propagate NaN, so a maximum of losses or gradients can serve as the check.
# Seen: no. NCCL's MAX and MIN return the number. (1, NaN) and (NaN, 1) give (1, 1) on both ranks; SUM gives NaN.
# Hurts: anyone who detects a broken rank by a reduced maximum: the infinity norm of gradients, an FP8 amax, a loss.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
cat > "$dir/check.py" <<'PY'
import os

import torch
import torch.distributed as dist

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
mine = torch.tensor([1.0, torch.nan] if rank == 0 else [torch.nan, 1.0], device="cuda")
seen = {}
for name in ("MAX", "MIN", "SUM"):
    reduced = mine.clone()
    dist.all_reduce(reduced, op=getattr(dist.ReduceOp, name))
    seen[name] = reduced.isnan().tolist()
    if rank == 0:
        print(f"{name} of (1, NaN) and (NaN, 1): {reduced.tolist()}")
local = torch.maximum(mine, mine.flip(0))
if rank == 0:
    print(f"torch.maximum on one GPU: {local.tolist()}")
    assert local.isnan().all()
    assert seen == {"MAX": [False] * 2, "MIN": [False] * 2, "SUM": [True] * 2}, "it has changed"
dist.destroy_process_group()
PY
"${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
