#!/bin/sh
# Question: two models of one class are compiled with torch.compile. The second model has a forward hook that was
#   registered before compilation. Does the hook run?
# Guess: yes. PyTorch's page on nn.Module support says that hooks installed before torch.compile are traced, and that
#   guards detect hooks that are added or removed later.
# Seen (torch 2.13.0): no, if the first model has run before. Both models have the same code and shapes, so the second
#   uses the first model's graph, which has no hook. If the second model is alone, its hook runs. A hook that is added
#   after the first call does not run either. With torch._dynamo.config.skip_nnmodule_hook_guards = False (default:
#   True), all three hooks run.
# Hurts: anyone who uses hooks to count activations or dead neurons, to add a loss or to steer a layer, and has a
#   teacher, an EMA copy or a second run in the same process. There is no warning: counts stay at zero.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0
fi
"$PYTHON" - <<'PY'
import torch
from torch import nn

x = torch.randn(4, 8)


def build():
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))


def calls_of_hook(case):
    torch._dynamo.reset()
    calls, model = [], build()
    if case == "after another model":
        torch.compile(build(), backend="eager")(x)
    if case != "added after a call":
        model[0].register_forward_hook(lambda *_: calls.append(1))
    compiled = torch.compile(model, backend="eager")
    if case == "added after a call":
        compiled(x)
        model[0].register_forward_hook(lambda *_: calls.append(1))
    compiled(x)
    return len(calls)


seen = {}
for skip in (True, False):
    torch._dynamo.config.skip_nnmodule_hook_guards = skip
    for case in ("alone", "after another model", "added after a call"):
        seen[skip, case] = calls_of_hook(case)
        print(f"skip_nnmodule_hook_guards {skip}, {case}: the hook ran {seen[skip, case]} times")
assert [seen[True, case] for case in ("alone", "after another model", "added after a call")] == [1, 0, 0], "it has changed"
assert all(seen[False, case] == 1 for _, case in seen)
PY
