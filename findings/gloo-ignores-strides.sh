#!/bin/sh
# Question: rank 0 has a matrix, and rank 1 one of the same shape that is a transpose in memory, as `kernel.T` is. Does
#   dist.broadcast (gloo) give rank 1 the values of rank 0?
# Guess: yes, or it refuses such a tensor.
# Seen (torch 2.13.0): rank 1 gets the values in the wrong order, without a message: the memory of rank 0, read as a
#   transpose. all_reduce adds entries of different places, and its sums differ between the ranks. all_gather and
#   all_gather_into_tensor are right.
# Hurts: own loops that send the weights of rank 0 to the others, average models (local SGD, DiLoCo) or gradients, after
#   one rank has loaded a checkpoint of another framework and transposed it: the ranks train different models, and the
#   norms of their weights agree. Call .contiguous() on every rank.
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
values = torch.arange(6.0).reshape(2, 3)


def matrix(scale=1):
    """Values of a (2, 3) matrix; on rank 1, a transpose in memory."""
    return values * scale if rank == 0 else (values * scale).t().contiguous().t()


sent = matrix(scale=1 if rank == 0 else 0)
dist.broadcast(sent, src=0)
summed = matrix()
dist.all_reduce(summed)
gathered = [torch.zeros(2, 3) for _ in range(2)]
dist.all_gather(gathered, matrix())
mine = {"broadcast": sent.tolist(), "all_reduce": summed.tolist(), "all_gather": gathered[1].tolist()}
ranks = [None, None]
dist.all_gather_object(ranks, mine)
if rank == 0:
    for name in mine:
        print(f"{name}: rank 0 {ranks[0][name]}, rank 1 {ranks[1][name]}")
    assert ranks[0]["all_gather"] == ranks[1]["all_gather"] == values.tolist()
    assert ranks[0]["broadcast"] == values.tolist()
    assert ranks[1]["broadcast"] == [[0, 2, 4], [1, 3, 5]], "the behaviour has changed"
    assert ranks[0]["all_reduce"] != (2 * values).tolist(), "the behaviour has changed"
    assert ranks[0]["all_reduce"] != ranks[1]["all_reduce"], "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
