#!/bin/sh
# Question: a folder has model.xml and model.bin, and OpenVINO's model cache is on (CACHE_DIR). The model is trained further
#   and exported again: the architecture and so the .xml are the same, byte for byte, and only the new .bin is copied over
#   the old one, as rsync and Hub downloads into a folder do. Which weights does compile_model("model.xml") use?
# Guess: the new ones; the key of the cache has the weights in it, or the time and size of both files.
# Seen (openvino 2026.4.1, CPU): the old ones, for good, without a message. The key has the path and the time of the .xml in
#   whole seconds, and neither the contents nor the .bin. So a model that is written again within a second is stale too,
#   even with other shapes. ONNX files with external data behave alike. core.read_model before compile_model is right: its
#   key is made of the weights.
# Hurts: evaluations, sweeps and servers that update a model in place: they go on with the weights of the first.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile openvino==2026.4.1 numpy==2.4.6 onnx==1.23.2
fi
"$PYTHON" - "$dir" <<'PY'
import os
import shutil
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import openvino
from onnx import TensorProto, helper, numpy_helper
from openvino import opset13 as ops

folder = Path(sys.argv[1])
generator = np.random.default_rng(0)
up, down = (generator.standard_normal(shape).astype(np.float32) for shape in ((256, 64), (64, 256)))
tokens = generator.standard_normal((4, 64)).astype(np.float32)
old, new = ((weight, np.maximum(tokens @ up.T, 0) @ weight.T) for weight in (down, -2 * down))


def save_openvino(weight, path, width=256):
    inputs = ops.parameter([-1, 64], np.float32)
    inputs.set_friendly_name("tokens")
    hidden = ops.relu(ops.matmul(inputs, ops.constant(up[:width], name="up"), False, True, name="a"), name="hidden")
    output = ops.matmul(hidden, ops.constant(weight[:, :width], name="down"), False, True, name="b")
    model = openvino.Model([ops.result(output, name="output")], [inputs], "ffn")
    openvino.save_model(model, path, compress_to_fp16=False)


def save_onnx(weight, path):
    nodes = [("MatMul", ["tokens", "up"], ["a"]), ("Relu", ["a"], ["h"]), ("MatMul", ["h", "down"], ["b"])]
    weights = [numpy_helper.from_array(matrix.T.copy(), name) for name, matrix in (("up", up), ("down", weight))]
    ends = [[helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64])] for name in ("tokens", "b")]
    graph = helper.make_graph([helper.make_node(*node) for node in nodes], "ffn", *ends, weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    onnx.save(model, path, save_as_external_data=True, location="model.data", size_threshold=0)


def run(path, cache, read_first=False):
    core = openvino.Core()  # as in a new process
    if cache:
        core.set_property({"CACHE_DIR": str(cache)})
    model = core.read_model(path) if read_first else path
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([tokens])[0]


def close(first, second):
    return bool(np.abs(first - second).max() < 1e-4 * np.abs(second).max())


for name, save, file, data in (
    ("OpenVINO", save_openvino, "model.xml", "model.bin"),
    ("ONNX with external data", save_onnx, "model.onnx", "model.data"),
):
    for read_first in (False, True):
        here, there, cache = (folder / f"{file}{read_first}{part}" for part in ("", "new", "cache"))
        here.mkdir(), there.mkdir()
        save(old[0], here / file)
        save(new[0], there / file)
        assert (here / file).read_bytes() == (there / file).read_bytes()
        assert close(run(here / file, cache, read_first), old[1])
        time.sleep(3)
        shutil.copy(there / data, here / data)
        assert close(run(here / file, None), new[1])
        output = run(here / file, cache, read_first)
        way = "read_model, compile_model" if read_first else "compile_model(path)"
        print(f"{name}, {way}: {data} is new; old weights: {close(output, old[1])}, new weights: {close(output, new[1])}")
        assert close(output, new[1] if read_first else old[1]), "the behaviour has changed"

# A model of another width that is written within the same second:
path, cache = folder / "again.xml", folder / "again-cache"
save_openvino(down, path)
written = path.stat().st_mtime_ns
assert close(run(path, cache), old[1])
save_openvino(down, path, width=128)
os.utime(path, ns=(written, written // 10**9 * 10**9))
right = np.maximum(tokens @ up[:128].T, 0) @ down[:, :128].T
assert close(run(path, None), right)
output = run(path, cache)
print(f"half of the neurons, within a second: old model {close(output, old[1])}, new model {close(output, right)}")
assert close(output, old[1]), "the behaviour has changed"
PY
