#!/bin/sh
# Needs a GPU. PYTHON: a Python with torch for CUDA (seen with 2.11.0, CUDA 13.0, H200).
#
# Question: does `weight[tokens]` have the same gradient as F.embedding(tokens, weight), for bf16 weights?
# Guess: yes, both look up rows, and both sum in fp32.
# Seen: no. A token that occurs 1,000 times with gradient 1 gets 1000 from F.embedding, but 256 from weight[tokens],
#   index_select and gather: these add in bf16, where 256 + 1 is 256. Compiled code and eager mode give the same result.
# Hurts: embeddings, position tables and routers that are written as indexing, in pure bf16 training. Frequent tokens
#   lose most of their gradient.
set -eu
"${PYTHON:-python3}" - <<'PY'
import torch
import torch.nn.functional as F

tokens = torch.zeros(1000, device="cuda", dtype=torch.long)
lookups = {
    "F.embedding": lambda w: F.embedding(tokens, w),
    "weight[tokens]": lambda w: w[tokens],
    "index_select": lambda w: w.index_select(0, tokens),
    "gather": lambda w: w.gather(0, tokens[:, None].expand(1000, 64)),
}
seen = {}
for name, lookup in lookups.items():
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.zeros(8, 64, device="cuda", dtype=dtype, requires_grad=True)
        lookup(weight).backward(torch.ones(1000, 64, device="cuda", dtype=dtype))
        seen[name, dtype] = weight.grad[0, 0].item()
        print(f"{name}, {dtype}: gradient {seen[name, dtype]:g}")
assert seen["F.embedding", torch.bfloat16] == 1000
for name in lookups:
    assert seen[name, torch.float32] == 1000
    assert name == "F.embedding" or seen[name, torch.bfloat16] == 256, "the behaviour has changed"
PY
