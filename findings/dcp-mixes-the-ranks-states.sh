#!/bin/sh
# Question: each of four ranks saves its place in the data and its random state with torch.distributed.checkpoint (DCP),
#   `dcp.save({"loader": loader.state_dict(), "rng": torch.get_rng_state()}, …)`. What does dcp.load give rank 2?
# Guess: what rank 2 saved, since every rank passes a state of its own; or an error, since four values have one name.
# Seen (torch 2.13.0, gloo, four CPU processes): all ranks get the same state, and one that no rank had: the shard of rank
#   0, the position of rank 1 and the random state of rank 2. Only sharded tensors are saved by rank. Of all other entries,
#   one rank's is kept, and DCP spreads this work over the ranks, leaf by leaf, so the parts of one dict come from
#   different ranks. There is no message. Keys that name the rank, f"loader_{rank}", keep every rank's state.
# Hurts: resumed runs. All ranks draw the same random numbers, for dropout and for sampled data, and read the same rows,
#   from a place that belongs to no shard: the batch is one rank's rows N times over, and the loss goes on falling.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()


def state_of(rank):
    """What a rank saves: the rank can be read from each entry."""
    rng = torch.Generator().manual_seed(rank).get_state()
    return {"loader": {"shard": f"shard-{rank}.jsonl", "position": 1000 * rank}, "rng": rng}


states = [state_of(rank) for rank in range(ranks)]
dcp.save(states[rank], checkpoint_id=sys.argv[1])
loaded = {"loader": {"shard": "", "position": -1}, "rng": torch.zeros_like(states[rank]["rng"])}
dcp.load(loaded, checkpoint_id=sys.argv[1])
sources = {
    "shard": [state["loader"]["shard"] for state in states].index(loaded["loader"]["shard"]),
    "position": [state["loader"]["position"] for state in states].index(loaded["loader"]["position"]),
    "random state": [torch.equal(state["rng"], loaded["rng"]) for state in states].index(True),
}
every = [None] * ranks
dist.all_gather_object(every, sources)
if rank == 0:
    for receiver, sources in enumerate(every):
        print(f"rank {receiver} loads " + ", ".join(f"the {name} of rank {source}" for name, source in sources.items()))
    assert all(sources == every[0] for sources in every), "the behaviour has changed"
    assert len(set(every[0].values())) > 1, "the behaviour has changed"
dist.barrier()
dist.destroy_process_group()
PY
"$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 4 "$dir/check.py" "$dir/checkpoint"
