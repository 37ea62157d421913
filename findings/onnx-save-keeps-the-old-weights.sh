#!/bin/sh
# Question: a model is saved again and again to the same files with onnx.save(model, path, save_as_external_data=True,
#   location="weights.bin"), as in a loop that exports checkpoints. How large is weights.bin?
# Guess: as large as the weights. Saving replaces the file, as it replaces the model's.
# Seen (onnx 1.23.2): it grows by all weights with every save. The tensors are appended, and the model's file names the
#   place of the newest. Loading is right, so nothing shows it but the size of the folder, and published folders still
#   contain the weights of former models. The documentation promises an error if the file exists; onnx looks for it in
#   the program's current folder instead of the model's.
# Hurts: exports of "latest": ten checkpoints of a 1B model in fp32 make one file of 40 GB, which is copied and served.
#   Remove the file before saving.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile onnx==1.23.2 numpy==2.4.6
fi
"$PYTHON" - "$dir" <<'PY'
import os
import sys

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

path, data = f"{sys.argv[1]}/model.onnx", f"{sys.argv[1]}/weights.bin"


def model(value):
    """y = x @ weight, with a weight of 1 MB whose entries are all `value`."""
    weight = numpy_helper.from_array(np.full((512, 512), value, np.float32), "weight")
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 512]) for name in "xy")
    graph = helper.make_graph([helper.make_node("MatMul", ["x", "weight"], ["y"])], "g", [x], [y], [weight])
    return helper.make_model(graph)


sizes = []
for step in range(1, 5):
    onnx.save(model(step), path, save_as_external_data=True, location="weights.bin")
    sizes.append(os.path.getsize(data))
    weight = numpy_helper.to_array(onnx.load(path).graph.initializer[0])
    old = [value for value in range(1, step) if np.float32(value).tobytes() * 1000 in open(data, "rb").read()]
    print(f"save {step}: weights.bin has {sizes[-1] / 2**20:.0f} MB; loaded {weight[0, 0]:.0f}, also in it: {old}")
    assert (weight == step).all()
assert sizes[0] == 2**20
assert sizes[3] >= 4 * 2**20, "the behaviour has changed"
PY
