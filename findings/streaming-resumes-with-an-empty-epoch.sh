#!/bin/sh
# Question: a run with MosaicML's StreamingDataset saves loader.state_dict() at the end of each epoch, after the loop
#   over the loader. A new process loads the state with load_state_dict and loops over the loader. What does it read?
# Guess: the next epoch, as the run would have without the interruption.
# Seen (mosaicml-streaming 0.13.0): nothing. The state is that the epoch's 100 samples have been read, and the first loop
#   continues that epoch at sample 100: it ends at once. The second loop is the next epoch. In the middle of an epoch,
#   the state resumes exactly.
# Hurts: runs that train for a number of epochs and resume after one: `for epoch in range(start, epochs)` trains one
#   epoch less for every such restart. Do not count a loop that gives no batch.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile mosaicml-streaming==0.13.0 transformers==4.57.6 torch==2.14.1 \
    torchvision==0.29.1
fi
cat > "$dir/resume.py" <<'PY'
import sys

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset
from streaming.base.util import clean_stale_shared_memory


def make():
    clean_stale_shared_memory()
    dataset = StreamingDataset(local=sys.argv[1], batch_size=4, shuffle=True, num_canonical_nodes=1)
    return StreamingDataLoader(dataset, batch_size=4)


def epoch(loader):
    return [int(i) for batch in loader for i in batch["i"]]


def resume(state):
    loader = make()
    loader.load_state_dict(state)
    return [epoch(loader) for _ in range(2)]


def main():
    with MDSWriter(out=sys.argv[1], columns={"i": "int"}) as writer:
        for i in range(100):
            writer.write({"i": i})
    loader = make()
    batches = iter(loader)
    read = [int(i) for _ in range(10) for i in next(batches)["i"]]
    middle = loader.state_dict()
    read += [int(i) for batch in batches for i in batch["i"]]
    end = loader.state_dict()
    following = epoch(loader)
    from_middle, from_end = resume(middle), resume(end)
    print(f"state in the first epoch {middle}\nstate at its end {end}")
    print("samples of the first two loops: resumed in the epoch", [len(samples) for samples in from_middle])
    print("resumed at its end", [len(samples) for samples in from_end])
    assert from_middle[0] == read[40:] and from_middle[1] == following
    assert from_end[0] == [] and from_end[1] == following, "the behaviour has changed"


if __name__ == "__main__":
    main()
PY
"$PYTHON" -W ignore "$dir/resume.py" "$dir/data"
