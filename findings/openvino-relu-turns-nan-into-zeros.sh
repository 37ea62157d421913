#!/bin/sh
# Question: a feedforward layer with ReLU runs in OpenVINO on the CPU. A weight of its first matrix is NaN, or an input is.
#   What is its output?
# Guess: NaN, as in torch, numpy and onnxruntime, so that a check of the output shows the fault.
# Seen (openvino 2026.4.1, x86 CPU, fp32): finite numbers. ReLU, maximum(x, 0) and clamp give 0 for NaN, so a neuron with a
#   NaN weight is as if it was pruned, bit for bit, and a token with a NaN gives zeros. exp(NaN) is infinite. GELU, Swish,
#   sigmoid and softmax give NaN. Nothing warns.
# Hurts: exports of ReLU and ReLU^2 models: broken weights or an overflow before the layer change the output without a
#   trace, scores are a little lower, and tests that look for NaN pass. The zeros count as sparsity.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile openvino==2026.4.1 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import numpy as np
import openvino
from openvino import opset13 as ops

generator = np.random.default_rng(0)
up, down = (generator.standard_normal(shape).astype(np.float32) for shape in ((64, 16), (16, 64)))
tokens = generator.standard_normal((4, 16)).astype(np.float32)
activations = {
    "ReLU": ops.relu,
    "ReLU^2": lambda hidden: ops.multiply(ops.relu(hidden), ops.relu(hidden)),
    "maximum": lambda hidden: ops.maximum(hidden, np.float32(0)),
    "clamp": lambda hidden: ops.clamp(hidden, 0.0, 1e9),
    "GELU": lambda hidden: ops.gelu(hidden, "erf"),
    "Swish": ops.swish,
    "none": lambda hidden: hidden,
}
core = openvino.Core()


def ffn(activation, weight, x):
    inputs = ops.parameter([-1, 16], np.float32)
    hidden = activation(ops.matmul(inputs, ops.constant(weight), False, True))
    model = openvino.Model([ops.matmul(hidden, ops.constant(down), False, True)], [inputs], "ffn")
    return core.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x])[0]


broken, pruned, bad_token = up.copy(), up.copy(), tokens.copy()
broken[3, 5], pruned[3], bad_token[1, 2] = np.nan, 0, np.nan
for name, activation in activations.items():
    output, by_token = ffn(activation, broken, tokens), ffn(activation, up, bad_token)[1]
    like_pruned = np.array_equal(output, ffn(activation, pruned, tokens))
    print(f"{name}: {np.isnan(output).sum()} of {output.size} outputs are NaN for a NaN weight, as without the neuron: "
          f"{like_pruned}; for a token with NaN: {by_token[:3]}")
    if name in ("GELU", "Swish", "none"):
        assert np.isnan(output).all() and np.isnan(by_token).all()
    else:
        assert like_pruned and not by_token.any(), "the behaviour has changed"
numpy = np.maximum(tokens @ broken.T, 0) @ down.T
print(f"numpy, ReLU: {np.isnan(numpy).sum()} of {numpy.size} outputs are NaN")
assert np.isnan(numpy).all()
PY
