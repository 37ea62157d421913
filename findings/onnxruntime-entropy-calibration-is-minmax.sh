#!/bin/sh
# Question: onnxruntime's quantize_static chooses the ranges of int8 activations from calibration data. One activation
#   among a million is 1,000 times as large as usual. Which range does calibrate_method=CalibrationMethod.Entropy choose?
# Guess: one that cuts the outlier off, below 100. For this, the method compares histograms and minimises their
#   divergence, as TensorRT does.
# Seen (onnxruntime 1.32.0): the whole range, exactly that of MinMax, with or without outliers, so that int8 has a single
#   value for nearly all activations, zero. The method searches among the ranges that have from 128 bins of its histogram
#   to all of them, and the histogram has 128: there is one candidate, the whole. quantize_static does not pass on a
#   number of bins; only create_calibrator takes num_bins. With 2,048, the range ends at 120, with 8,192 at 26.
# Hurts: models quantised by Entropy because their activations have outliers, as those of language models do, and
#   comparisons of MinMax with Entropy, which compare MinMax with itself, at a higher cost. Percentile cuts outliers off.
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile onnxruntime==1.32.0 onnx==1.23.2 numpy==2.4.6
fi
cd "$dir"
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import contextlib
import io
import logging

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.quantization import CalibrationDataReader, CalibrationMethod, QuantType, quantize_static
from onnxruntime.quantization.calibrate import create_calibrator

logging.disable(logging.WARNING)
generator = np.random.default_rng(0)
width, batches = 64, 16
weight = (generator.standard_normal((width, width)) / 8).astype(np.float32)
graph = helper.make_graph(
    [helper.make_node("MatMul", ["x", "weight"], ["y"])],
    "product",
    [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", width])],
    [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["rows", width])],
    [numpy_helper.from_array(weight, "weight")],
)
onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), "model.onnx")


class Reader(CalibrationDataReader):
    def __init__(self, data):
        self.batches = iter(np.split(data, batches))

    def get_next(self):
        batch = next(self.batches, None)
        return batch if batch is None else {"x": batch}


def by_quantize_static(data, method):
    with contextlib.redirect_stdout(io.StringIO()):
        quantize_static("model.onnx", "int8.onnx", Reader(data), calibrate_method=method, activation_type=QuantType.QInt8)
    constants = {each.name: numpy_helper.to_array(each) for each in onnx.load("int8.onnx").graph.initializer}
    scale, zero_point = (float(constants[f"x_{name}"]) for name in ("scale", "zero_point"))
    lowest, highest = ((end - zero_point) * scale for end in (-128, 127))
    print(f"  {method.name}: {lowest:.2f} to {highest:.2f}")
    codes = np.clip(np.round(data / scale) + zero_point, -128, 127)
    return (lowest, highest), np.mean(codes == zero_point)


def by_create_calibrator(data, bins):
    with contextlib.redirect_stdout(io.StringIO()):
        options = {"num_bins": bins, "num_quantized_bins": 128}
        calibrator = create_calibrator(
            "model.onnx",
            augmented_model_path="augmented.onnx",
            calibrate_method=CalibrationMethod.Entropy,
            extra_options=options,
        )
        calibrator.collect_data(Reader(data))
        ends = calibrator.compute_data()["x"].range_value
    print(f"  Entropy with {bins:,} bins: {float(ends[0]):.2f} to {float(ends[1]):.2f}")
    return float(ends[1]) - float(ends[0])


usual = generator.standard_normal((16_384, width)).astype(np.float32)
outlier = usual.copy()
outlier[9_000, 3] = 1_000
for name, data in (("usual activations", usual), ("one outlier of 1,000", outlier)):
    print(f"{name}, range:")
    ranges = {method.name: by_quantize_static(data, method) for method in list(CalibrationMethod)[:3]}
    lengths = {bins: by_create_calibrator(data, bins) for bins in (128, 2_048, 8_192)}
    assert ranges["Entropy"] == ranges["MinMax"], "the behaviour has changed"
zeros = ranges["Entropy"][1]
print(f"activations that become zero: {zeros:.2%} by Entropy, {ranges['Percentile'][1]:.2%} by Percentile")
assert zeros > 0.9 and ranges["Percentile"][0][1] < 10
assert lengths[128] > 1_000 and lengths[2_048] < 150 and lengths[8_192] < 40, "the behaviour has changed"
PY
