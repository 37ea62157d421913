#!/bin/sh
# Question: a model is compiled ahead of time (AOTInductor), and later gets the weights of a newer checkpoint by
#   load_constants, with check_full_update=True. Is the output that of the newer checkpoint?
# Guess: yes: the names are those of get_constant_fqns(), and the check makes sure that none is missing.
# Seen (torch 2.13.0, CPU): no, without a message. Parameters and buffers of up to eight numbers are written into the code
#   as literals. They are not among the names, so the check does not miss them, and they keep the old values: one logit
#   scale, gates of eight heads, biases of eight experts. With nine numbers, they are replaced. With the option
#   aot_inductor.use_runtime_constant_folding, small ones are replaced too.
# Hurts: servers that load new checkpoints without compiling again, and comparisons of checkpoints: the new model runs with
#   old scales, gates and router biases.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import sys

import torch
from torch import nn
from torch._inductor import aoti_compile_and_package, aoti_load_package

x = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Router(nn.Module):
    def __init__(self, experts, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(experts, 16))
        self.bias = nn.Parameter(torch.randn(experts))
        self.scale = nn.Parameter(torch.rand(()) + 1)

    def forward(self, x):
        return (self.scale * (x @ self.weight.T) + self.bias).softmax(-1)


@torch.no_grad()
def update(experts, **options):
    """The names that can be replaced, and how far the result is from the new model's after all of them were."""
    old, new = Router(experts, seed=0), Router(experts, seed=1)
    package = aoti_compile_and_package(
        torch.export.export(old, (x,)), package_path=f"{sys.argv[1]}/model{experts}.pt2", inductor_configs=options
    )
    model = aoti_load_package(package)
    assert torch.allclose(model(x), old(x), atol=1e-5)
    names = [name for name in model.get_constant_fqns() if name in new.state_dict()]
    model.load_constants({name: new.state_dict()[name] for name in names}, check_full_update=not options)
    return sorted(names), ((model(x) - new(x)).norm() / new(x).norm()).item()


for experts, expected in ((8, ["weight"]), (9, ["bias", "weight"])):
    names, off = update(experts)
    print(f"{experts} experts: replaced {', '.join(names)}; the output is {off:.0%} off the new model's")
    assert names == expected and off > 0.02, "the behaviour has changed"
names, off = update(8, **{"aot_inductor.use_runtime_constant_folding": True})
print(f"8 experts, with the option: replaced {', '.join(names)}; the output is {off:.0%} off")
assert names == ["bias", "scale", "weight"] and off < 1e-5
PY
"$PYTHON" -W ignore "$dir/check.py" "$dir"
