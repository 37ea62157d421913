#!/bin/sh
# Question: a run gives its data workers random numbers of their own, generator.spawn(4) in each epoch. A checkpoint
#   holds generator.bit_generator.state. A new process makes default_rng(seed), sets this state and spawns the workers of
#   the next epoch. Do they draw what they would have drawn without the interruption?
# Guess: yes. The state is all that a generator has.
# Seen (numpy 2.4.6): no. They draw the numbers of the first epoch again, all four of them. The generator's own numbers
#   continue as they should, so a test of those passes. spawn counts in the SeedSequence,
#   generator.bit_generator.seed_seq, which is no part of the state. A pickle of the generator has the count.
# Hurts: resumed runs repeat the shuffles, crops, masks or noise of their first epoch, and after every restart again.
#   Store a pickle, or the number of spawned children too (seed_seq.n_children_spawned), or make generators by seed and
#   epoch.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import copy
import pickle

import numpy as np


def epoch(generator):
    """What the run draws itself, and what its four workers draw."""
    return generator.integers(1000).item(), [worker.integers(1000).item() for worker in generator.spawn(4)]


generator = np.random.default_rng(7)
first = epoch(generator)
state = copy.deepcopy(generator.bit_generator.state)
pickled = pickle.dumps(generator)
second = epoch(generator)
resumed = np.random.default_rng(7)
resumed.bit_generator.state = state
seen = epoch(resumed)
print("first epoch: own number and those of the workers", *first)
print("second epoch", *second)
print("second epoch of a run that resumed from the state", *seen)
print("... from a pickle", *epoch(pickle.loads(pickled)))
assert epoch(pickle.loads(pickled)) == second and first[1] != second[1]
assert seen[0] == second[0] and seen[1] == first[1], "the behaviour has changed"
PY
