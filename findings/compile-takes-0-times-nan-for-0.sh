#!/bin/sh
# Question: a loss keeps parts that are not used in its graph by a summand of 0, loss + 0 * unused.sum(), and sparse
#   training applies soft thresholds, F.softshrink(weight, lr * l1). Both are compiled. What becomes of a NaN?
# Guess: NaN, as without torch.compile, since 0 * NaN is NaN.
# Seen (torch 2.13.0, CPU): it is lost. If the 0 is an integer, torch.compile takes x * 0 for 0, whatever x is: NaN and
#   infinity become 0. x * 0.0 and x * torch.zeros_like(x) stay NaN. F.softshrink compiles to such a product, so it turns
#   NaN weights into 0. hardshrink, leaky_relu and x - x.clamp(-l, l), which is softshrink, keep NaN both ways.
# Hurts: runs in which a part of the model or a weight becomes NaN: the loss stays finite and the weights are set to 0, so
#   no check stops the run, and lost neurons look as if they had been pruned. Write 0.0.
# Packages: torch is a large download, and torch.compile needs a C++ compiler. To use an existing Python, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
TORCHINDUCTOR_CACHE_DIR="$dir/cache" "$PYTHON" -W ignore - <<'PY'
import torch
import torch.nn.functional as F

values = torch.tensor([torch.nan, 2.0, 0.2, -2.0]).repeat(16)
functions = {
    "1 + 0 * x.sum()": lambda x: 1 + 0 * x.sum(),
    "x * 0": lambda x: x * 0,
    "softshrink": lambda x: F.softshrink(x, 0.5),
    "1 + 0.0 * x.sum()": lambda x: 1 + 0.0 * x.sum(),
    "x * 0.0": lambda x: x * 0.0,
    "x * zeros_like(x)": lambda x: x * torch.zeros_like(x),
    "hardshrink": lambda x: F.hardshrink(x, 0.5),
    "leaky_relu": lambda x: F.leaky_relu(x),
    "x - x.clamp(-0.5, 0.5)": lambda x: x - x.clamp(-0.5, 0.5),
}
lost = set()
for name, function in functions.items():
    torch.compiler.reset()
    eager, compiled = function(values).flatten()[:4], torch.compile(function)(values).flatten()[:4]
    print(f"{name}: eager {eager.tolist()}, compiled {compiled.tolist()}")
    assert eager[0].isnan() and torch.equal(eager[1:], compiled[1:])
    if not compiled[0].isnan():
        lost.add(name)
        assert compiled[0] == (1 if name.startswith("1") else 0)
assert lost == {"1 + 0 * x.sum()", "x * 0", "softshrink"}, "the behaviour has changed"
PY
