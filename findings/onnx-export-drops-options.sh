#!/bin/sh
# Question: torch.onnx.export (dynamo=True, the default) exports models that pool tokens by scatter_reduce("mean"), have a
#   loss with label_smoothing, or an average pooling with divisor_override. Does onnxruntime compute what torch computes?
# Guess: yes, or the export is refused, as it is for index_reduce("mean").
# Seen (torch 2.13.0, onnxscript 0.7.2, onnxruntime 1.32.0): no, and the export says that it was successful.
#   scatter_reduce("mean") becomes a scatter that overwrites: of the tokens of a word, or the rows of a group, the last
#   one is the result (its other reductions are right). label_smoothing is dropped: the loss, and what is trained from the
#   graph, is the plain cross-entropy. divisor_override is dropped too. Only verify=True compares the outputs, and then a
#   warning says that they differ: the file is written all the same.
# Hurts: exported encoders that average the pieces of a word or the nodes of a graph, and graphs that have their loss.
#   Scores fall, and nothing points at the export. A sum by scatter_reduce, divided by a count, is exported rightly.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 onnx==1.23.2 onnxscript==0.7.2 \
    onnxruntime==1.32.0
fi
"$PYTHON" -W ignore - "$dir/model.onnx" 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import contextlib
import io
import sys

import onnxruntime
import torch
from torch.nn import functional as F

torch.manual_seed(0)
pieces = torch.randn(6, 4)  # of two words, four and two
words = torch.tensor([0, 0, 0, 0, 1, 1])[:, None].expand(6, 4)
logits, targets = torch.randn(8, 16), torch.randint(0, 16, (8,))
image = torch.randn(1, 1, 4, 4)


class Pool(torch.nn.Module):
    def __init__(self, reduce):
        super().__init__()
        self.reduce = reduce

    def forward(self, pieces):
        return pieces.new_zeros(2, 4).scatter_reduce(0, words, pieces, self.reduce, include_self=False)


class MeanByCount(torch.nn.Module):
    def forward(self, pieces):
        count = pieces.new_zeros(2, 4).scatter_reduce(0, words, torch.ones_like(pieces), "sum")
        return pieces.new_zeros(2, 4).scatter_reduce(0, words, pieces, "sum") / count


class Loss(torch.nn.Module):
    def forward(self, logits):
        return F.cross_entropy(logits, targets, label_smoothing=0.1)


class Average(torch.nn.Module):
    def forward(self, image):
        return F.avg_pool2d(image, 2, divisor_override=1)


def exported(model, inputs):
    with contextlib.redirect_stdout(io.StringIO()):
        torch.onnx.export(model.eval(), (inputs,), sys.argv[1])
    session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: inputs.numpy()})[0])


def compare(name, model, inputs, instead=None):
    """Whether onnxruntime's result is torch's; if not, whether it is `instead`."""
    wanted, seen = model(inputs), exported(model, inputs)
    same = torch.allclose(wanted, seen, atol=1e-5)
    verdict = "equal" if same else "different"
    print(f"{name}: torch {wanted.flatten()[0]:.4f}, onnxruntime {seen.flatten()[0]:.4f}: {verdict}")
    assert same == (instead is None), "the behaviour has changed"
    assert same or torch.allclose(instead, seen, atol=1e-5), "the behaviour has changed"


for reduce in ("sum", "prod", "amax", "amin"):
    compare(f"scatter_reduce {reduce}", Pool(reduce), pieces)
compare("scatter_reduce mean (onnxruntime: the last row)", Pool("mean"), pieces, pieces[[3, 5]])
compare("sum divided by count", MeanByCount(), pieces)
compare("label_smoothing 0.1 (onnxruntime: plain loss)", Loss(), logits, F.cross_entropy(logits, targets))
compare("divisor_override 1 (onnxruntime: divides by 4)", Average(), image, F.avg_pool2d(image, 2))
PY
