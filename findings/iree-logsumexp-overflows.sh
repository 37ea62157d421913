#!/bin/sh
# Question: IREE compiles a model from its ONNX file. The model returns the logsumexp of its logits: the normaliser of its
#   probabilities, or a router's z-loss, logsumexp(x) ** 2. Logits are 50 to 100. What does it return?
# Guess: 100.3, as torch and onnxruntime do for the same file: every library subtracts the maximum first.
# Seen (iree-base-compiler and -runtime 3.13.0, onnx 1.23.2, onnxscript 0.7.2, torch 2.13.0, CPU): infinity.
#   ReduceLogSumExp is compiled to the logarithm of a sum of exp(x) without the maximum, so it overflows from 88.7 on, and
#   logits of -120 and below give -inf. softmax, log_softmax and cross_entropy of the same logits are right, and so is
#   x[:, 0] - x.log_softmax(1)[:, 0], which is the same number.
# Hurts: scores, energies and losses of models on IREE, with logits of fp32 that are not capped: NaN and infinity appear
#   only for confident inputs, while the probabilities of the same model look right.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0 iree-base-compiler==3.13.0 iree-base-runtime==3.13.0
fi
"$PYTHON" -W ignore - "$dir" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import contextlib
import io
import subprocess
import sys
from importlib.metadata import version

import iree.compiler
import iree.runtime
import onnxruntime
import torch
from torch.nn import functional as F

folder = sys.argv[1]
low = torch.tensor([[80.0, 50.0, 79.0, 3.0]])
high = low + 20
negative = low - 200


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, logits):
        return self.function(logits)


def onnxruntime_and_iree(function, logits):
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(Model(function).eval(), (logits,), f"{folder}/model.onnx")
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
    expected = session.run(None, {session.get_inputs()[0].name: logits.numpy()})[0]
    command = (sys.executable, "-m", "iree.compiler.tools.import_onnx", f"{folder}/model.onnx")
    subprocess.run((*command, "-o", f"{folder}/model.mlir"), check=True, capture_output=True)
    iree.compiler.compile_file(
        f"{folder}/model.mlir",
        output_file=f"{folder}/model.vmfb",
        target_backends=["llvm-cpu"],
        input_type="onnx",
        extra_args=["--iree-llvmcpu-target-cpu=generic"],
    )
    module = iree.runtime.load_vm_flatbuffer_file(f"{folder}/model.vmfb", driver="local-task")
    (name,) = (name for name in module.vm_module.function_names if name[0] != "_" and "$" not in name)
    return expected.item(), module[name](logits.numpy()).to_host().item()


cases = (
    ("logsumexp, logits to 80", lambda x: x.logsumexp(1), low, None),
    ("logsumexp, logits to 100", lambda x: x.logsumexp(1), high, torch.inf),
    ("logsumexp, logits to -120", lambda x: x.logsumexp(1), negative, -torch.inf),
    ("z-loss, logits to 100", lambda x: x.logsumexp(1).square().mean(), high, torch.inf),
    ("cross_entropy, logits to 100", lambda x: F.cross_entropy(x, torch.tensor([1])), high, None),
    ("x0 - log_softmax(x)0, logits to 100", lambda x: x[:, 0] - x.log_softmax(1)[:, 0], high, None),
)
print("iree", version("iree-base-compiler"), "onnxruntime", onnxruntime.__version__)
for name, function, logits, other in cases:
    wanted = function(logits).item()
    expected, seen = onnxruntime_and_iree(function, logits)
    print(f"{name}: torch {wanted:.3f}, onnxruntime {expected:.3f}, IREE {seen:.3f}")
    assert abs(wanted - expected) < 1e-5 * abs(wanted), "onnxruntime's result has changed"
    assert seen == other if other else abs(wanted - seen) < 1e-5 * abs(wanted), "the behaviour has changed"
PY
