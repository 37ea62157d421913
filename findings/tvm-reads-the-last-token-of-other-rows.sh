#!/bin/sh
# Question: TVM compiles a language model from torch.export. Its last step takes the hidden state of the last token,
#   hidden[:, -1], for the next token's logits. Which token of each row is that?
# Guess: the last one of the row, as in torch.
# Seen (apache-tvm 0.27.0.post1, torch 2.13.0, target "llvm"): the last one of the row before, and for the first row no
#   token at all. A negative index, in hidden[:, -1], hidden[..., -1], select(1, -1) or hidden[:, torch.tensor([-1])], is
#   not counted from the end of its dimension, and there is no message. A slice, hidden[:, -1:], and an index that is not
#   negative are right.
# Hurts: decoders, poolings and classifiers for TVM that end with the last token. Each prompt gets the next token of
#   another prompt, which looks like text. Write hidden[:, -1:].squeeze(1).
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

hidden = torch.arange(1.0, 25.0).view(3, 4, 2)  # three rows of four tokens


class Model(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, hidden):
        return self.function(hidden)


def compiled(function):
    program = torch.export.export(Model(function).eval(), (hidden,))
    executable = tvm.compile(from_exported_program(program), target="llvm")
    outputs = relax.VirtualMachine(executable, tvm.cpu())["main"](tvm.runtime.tensor(hidden.numpy()))
    return torch.from_numpy(outputs[0].numpy().copy())


cases = (
    ("hidden[:, 3]", lambda hidden: hidden[:, 3], True),
    ("hidden[:, -1:].squeeze(1)", lambda hidden: hidden[:, -1:].squeeze(1), True),
    ("hidden[:, -1]", lambda hidden: hidden[:, -1], False),
    ("hidden.select(1, -1)", lambda hidden: hidden.select(1, -1), False),
    ("hidden[:, torch.tensor([-1])]", lambda hidden: hidden[:, torch.tensor([-1])].squeeze(1), False),
)
print("apache-tvm", tvm.__version__)
for name, function, right in cases:
    wanted, seen = function(hidden), compiled(function)
    print(f"{name}, rows 1 and 2: torch {wanted[1:].tolist()}, TVM {seen[1:].tolist()}")
    assert torch.equal(wanted[1:], seen[1:]) == right, "the behaviour has changed"
    assert right or torch.equal(wanted[:-1], seen[1:]), "the behaviour has changed"
PY
