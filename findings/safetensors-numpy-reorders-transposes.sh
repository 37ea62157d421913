#!/bin/sh
# Question: a script converts weights with numpy and saves {"weight": kernel.T} with safetensors.numpy.save_file. What
#   does load_file return?
# Guess: the transposed array. numpy knows how the array lies in memory; torch's save_file refuses such tensors.
# Seen (safetensors 0.8.0): an array of the right shape with values in the wrong order: the memory as it lies, read row by
#   row. Slices of columns (kernel[:, :2]) and arrays in Fortran order are saved wrong as well, and save() does the
#   same. There is no message. Version 0.7.0 saves all of them right. This has been reported to safetensors' authors.
# Hurts: converters between frameworks: a JAX kernel is the transpose of a torch weight. Square matrices pass every check
#   of shapes. Call np.ascontiguousarray first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile safetensors==0.8.0 numpy==2.4.6
fi
"$PYTHON" - "$dir" <<'PY'
import sys

import numpy as np
from safetensors.numpy import load, load_file, save, save_file

kernel = np.arange(6, dtype=np.float32).reshape(2, 3)
arrays = {
    "kernel": kernel,
    "np.ascontiguousarray(kernel.T)": np.ascontiguousarray(kernel.T),
    "kernel.T": kernel.T,
    "kernel[:, :2]": kernel[:, :2],
    "np.asfortranarray(kernel)": np.asfortranarray(kernel),
}
right = []
for name, array in arrays.items():
    save_file({"weight": array}, f"{sys.argv[1]}/file.safetensors")
    loaded = load_file(f"{sys.argv[1]}/file.safetensors")["weight"]
    print(f"{name}: saved {array.tolist()}, loaded {loaded.tolist()}")
    assert loaded.shape == array.shape and np.array_equal(loaded, load(save({"weight": array}))["weight"])
    right.append(np.array_equal(loaded, array))
assert right[:2] == [True, True]
assert right[2:] == [False, False, False], "the behaviour has changed"
PY
