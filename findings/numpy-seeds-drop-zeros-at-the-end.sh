#!/bin/sh
# Question: np.random.default_rng([seed, index]) is the usual way to give processes, epochs or steps random numbers of
#   their own. Is default_rng([seed, 0]) independent of default_rng(seed)?
# Guess: yes. SeedSequence hashes its entropy, and a list of two numbers is not one number.
# Seen (numpy 2.4.6): they draw the same numbers. SeedSequence fills its entropy with zeros up to four words of 32 bits, so
#   zeros at the end do not count: 5, [5, 0] and [5, 0, 0] are one seed, and [5, 1] is 5 + 2^32. Streams of
#   SeedSequence(seed).spawn() differ from all of them, and so do lists with the index first, [index, seed], or
#   index + 1 at the end.
# Hurts: weights drawn by default_rng(seed) and data, noise or dropout drawn by default_rng([seed, 0]), for rank, step or
#   split 0: they are the same numbers. Here inputs are a teacher's weights themselves.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile numpy==2.4.6
fi
"$PYTHON" -W error - <<'PY'
import numpy as np

seed = 5
weights = np.random.default_rng(seed).standard_normal(10_000)
streams = {str(entropy): np.random.default_rng(entropy) for entropy in ([5, 0], [5, 0, 0, 0], [5, 1], [5, 0, 1], [0, 5])}
streams["5 + 2**32"] = np.random.default_rng(5 + 2**32)
streams["spawn"] = np.random.default_rng(np.random.SeedSequence(seed).spawn(1)[0])
numbers = {name: stream.standard_normal(10_000) for name, stream in streams.items()}
for name, values in numbers.items():
    print(f"default_rng(5) and {name}: correlation {np.corrcoef(weights, values)[0, 1]:.2f}")
assert all(abs(np.corrcoef(weights, numbers[name])[0, 1]) < 0.05 for name in ("[5, 1]", "[5, 0, 1]", "[0, 5]", "spawn"))
for name in ("[5, 0]", "[5, 0, 0, 0]"):
    assert np.array_equal(weights, numbers[name]), "the behaviour has changed"
assert np.array_equal(numbers["[5, 1]"], numbers["5 + 2**32"]), "the behaviour has changed"
PY
