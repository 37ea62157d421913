#!/bin/sh
# Question: block-sparse attention: a router chooses key blocks, and BlockMask.from_kv_blocks(number of blocks, their
#   indices) is given to flex_attention, without a mask_mod. Is the result without torch.compile that with it?
# Guess: yes; the eager version is the slow reference for tests.
# Seen (torch 2.13.0): no, without a message. Compiled, a query attends to the keys of its blocks. Eager, it attends to all
#   keys: the eager version reads only the mask_mod, and a BlockMask without one masks nothing. If a mask_mod depends on a
#   tensor that is changed later (the documents of the next batch), the two differ as well: eager follows the tensor at
#   once, while compiled code also keeps to the blocks that were found before.
# Hurts: sparse attention with chosen blocks (MoBA, NSA, top-k blocks) that is debugged, tested or evaluated without
#   torch.compile: it is dense attention, which also sees the future. A compiled model is measured against the wrong one.
#   Put the blocks into the mask_mod too.
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
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

torch.manual_seed(0)
LENGTH, BLOCK = 512, 128
blocks = LENGTH // BLOCK
q, k, v = (torch.randn(1, 2, LENGTH, 32) for _ in range(3))
ways = {"eager": flex_attention, "compiled": torch.compile(flex_attention)}
position = torch.arange(LENGTH)


def expected(mask=None):
    return scaled_dot_product_attention(q, k, v, attn_mask=mask)


def error(found, right):
    return ((found - right).norm() / right.norm()).item()


own_block = position[:, None] // BLOCK == position // BLOCK
numbers = torch.ones(1, 2, blocks, dtype=torch.int32)  # each block of queries has one block of keys: its own
indices = torch.arange(blocks, dtype=torch.int32).view(1, 1, blocks, 1).expand(1, 2, blocks, blocks).contiguous()
chosen = BlockMask.from_kv_blocks(numbers, indices, BLOCK_SIZE=BLOCK)
for name, attention in ways.items():
    output = attention(q, k, v, block_mask=chosen)
    sparse, dense = error(output, expected(own_block)), error(output, expected())
    print(f"blocks without mask_mod, {name}: {sparse:.0%} from block-sparse attention, {dense:.0%} from dense attention")
    right, wrong = (dense, sparse) if name == "eager" else (sparse, dense)
    assert right < 1e-5 and wrong > 0.1, "the behaviour has changed"

documents = position // 128
packed = create_block_mask(lambda b, h, i, j: documents[i] == documents[j], None, None, LENGTH, LENGTH, device="cpu")
documents.copy_(position // 256)
for name, attention in ways.items():
    new = error(attention(q, k, v, block_mask=packed), expected(documents[:, None] == documents))
    print(f"documents changed after create_block_mask, {name}: {new:.0%} from attention within the new documents")
    assert (new < 1e-5) if name == "eager" else (new > 0.1), "the behaviour has changed"
PY
"$PYTHON" -W ignore "$dir/check.py"
