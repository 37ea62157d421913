#!/bin/sh
# Question: four ranks hold 1, 2, 3 and 4 and call dist.reduce(value, dst=0) (gloo) to log their sum on rank 0. What do the
#   ranks hold afterwards?
# Guess: 10 on rank 0, and 2, 3 and 4, as before, on the others: only rank 0 receives the result.
# Seen (torch 2.13.0, gloo, four CPU processes): 10, 9, 7 and 4: the sum of a part of the ranks stays in the tensor of each
#   rank that it passed. With dst=1, ranks 0 and 1 both hold 10. There is no message.
# Hurts: code that goes on with the tensor: a rank's own loss or number of tokens is now that of several ranks, and a
#   running total that is reduced at every log counts some ranks several times from the second log on: 1,100 and 2,200
#   tokens instead of 800 and 1,200. Reduce a clone, on every rank.
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

dist.init_process_group("gloo")
rank = dist.get_rank()
seen = {}
for dst in (0, 1):
    value = torch.tensor([rank + 1.0])
    dist.reduce(value, dst=dst)
    ranks = [None] * 4
    dist.all_gather_object(ranks, value.item())
    seen[dst] = ranks
# Rank 0 reduces a clone, since its tensor takes the sum; the others, which receive nothing, reduce their own.
tokens, logged = torch.zeros(1), []
for _step in range(3):
    tokens += 100
    total = tokens.clone() if rank == 0 else tokens
    dist.reduce(total, dst=0)
    logged.append(total.item())
if rank == 0:
    for dst, values in seen.items():
        print(f"after reduce to rank {dst}, the ranks hold {values}")
    print(f"tokens logged by rank 0: {logged}; rightly [400.0, 800.0, 1200.0]")
    assert seen[0][0] == seen[1][1] == 10
    assert seen[0] == [10, 9, 7, 4] and seen[1] == [10, 10, 7, 4], "the behaviour has changed"
    assert logged == [400, 1100, 2200], "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 4 "$dir/check.py"
