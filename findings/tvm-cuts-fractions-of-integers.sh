#!/bin/sh
# Question: TVM compiles a model from torch.export that mixes integers or masks with fractions: the share of active
#   neurons, (hidden > 0).sum() / 8, positions times a frequency, positions * 0.25, token counts + 0.5, a mask times a
#   weight, and torch.arange(4) / 4. It also has torch.add(x, y, alpha=3). Does it compute what torch computes?
# Guess: yes, or the import is refused.
# Seen (apache-tvm 0.27.0.post1, torch 2.13.0, target "llvm"): none of these, and there is no message. The fraction is cut
#   to the integer type first, and the result is an integer: 3 / 8 is 0, positions * 0.25 is 0, counts + 0.5 adds nothing,
#   counts == 2.5 is true for 2. A mask times 1.5 stays a mask. alpha is ignored, in torch.sub too (x - y). With x.float()
#   before, all but alpha are right.
# Hurts: models for TVM with gates, statistics, positions or scales from integers, and merged adapters that are added with
#   alpha: they compile and give plausible numbers. Compare the outputs, and their types, with torch's before use.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 apache-tvm==0.27.0.post1
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import torch
import tvm
from tvm import relax
from tvm.relax.frontend.torch import from_exported_program

hidden = torch.tensor([[0.5, 1.0, 0.25, -1.0, -2.0, -3.0, 0.0, -1.0]])
counts = torch.tensor([[1, 2, 3, 8]])


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, inputs):
        return self.function(inputs)


def compiled(function, inputs):
    program = torch.export.export(Model(function).eval(), (inputs,))
    executable = tvm.compile(from_exported_program(program), target="llvm")
    outputs = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(inputs.numpy()))
    return torch.from_numpy(outputs[0].numpy().copy())


cases = (
    ("share of active neurons, as float", lambda x: (x > 0).sum(1).float() / 8, hidden, [0.375]),
    ("share of active neurons", lambda x: (x > 0).sum(1) / 8, hidden, [0]),
    ("positions.float() * 0.25", lambda x: x.float() * 0.25, counts, [0.25, 0.5, 0.75, 2.0]),
    ("positions * 0.25", lambda x: x * 0.25, counts, [0, 0, 0, 0]),
    ("counts + 0.5", lambda x: x + 0.5, counts, [1, 2, 3, 8]),
    ("counts == 2.5", lambda x: x == 2.5, counts, [False, True, False, False]),
    ("(counts > 2) * 1.5", lambda x: (x > 2) * 1.5, counts, [False, False, True, True]),
    ("torch.arange(4) / 4", lambda x: torch.arange(4) / 4 + x[0, 0] * 0, hidden, [0, 0, 0, 0]),
    ("torch.add(x, x, alpha=3)", lambda x: torch.add(x, x, alpha=3), counts.float(), [2, 4, 6, 16]),
    ("torch.sub(x, x, alpha=3)", lambda x: torch.sub(x, x, alpha=3), counts.float(), [0, 0, 0, 0]),
)
print("apache-tvm", tvm.__version__)
for name, function, inputs, expected in cases:
    wanted, seen = function(inputs), compiled(function, inputs)
    same = torch.equal(wanted.double(), seen.double())
    print(f"{name}: torch {wanted.flatten().tolist()}, TVM {seen.flatten().tolist()}")
    assert seen.flatten().tolist() == expected, "the behaviour has changed"
    assert same == ("float" in name), "the behaviour has changed"
PY
