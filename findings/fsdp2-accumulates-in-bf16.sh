#!/bin/sh
# Needs two GPUs. PYTHON: a Python with torch for CUDA (seen with 2.11.0, CUDA 13.0, two H200).
#
# Question: under FSDP2 with MixedPrecisionPolicy(param_dtype=torch.bfloat16), are the gradients of several
#   micro-batches summed in fp32, like the dtype of parameters and `.grad`?
# Guess: yes, whether every micro-batch reduces or only the last.
# Seen: only if every micro-batch reduces. With set_requires_gradient_sync(False), the unsharded gradients accumulate in
#   bf16: 300 micro-batches of gradient 1 give 256. `.grad` is fp32 in both cases. reduce_dtype=torch.float32 gives 300.
# Hurts: anyone who accumulates gradients without synchronising, to save communication. Micro-batches with small
#   gradients late in the accumulation are lost to rounding.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
cat > "$dir/check.py" <<'PY'
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

rank = int(os.environ["RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
seen = {}
for reduce_dtype in (None, torch.float32):
    for every in (True, False):
        layer = torch.nn.Linear(64, 64, bias=False, device="cuda")
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
        for micro_batch in range(300):
            layer.set_requires_gradient_sync(every or micro_batch == 299)
            layer(torch.ones(1, 64, device="cuda")).sum().backward()
        grad = layer.weight.grad.to_local()
        assert grad.dtype == torch.float32
        seen[str(reduce_dtype), every] = grad.flatten()[0].item()
if rank == 0:
    for (reduce_dtype, every), value in seen.items():
        print(f"reduce_dtype {reduce_dtype}, reduced {'each time' if every else 'once'}: {value:g}")
    expected = {("None", True): 300, ("None", False): 256}
    expected |= {("torch.float32", True): 300, ("torch.float32", False): 300}
    assert seen == expected, "the behaviour has changed"
dist.destroy_process_group()
PY
"${PYTHON:-python3}" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
