#!/bin/sh
# Question: an optimizer trains bf16 weights and keeps fp32 state, a copy of the weights or a momentum. A run saves its
#   state_dict and goes on from it. Is the state the same?
# Guess: yes. load_state_dict gives back what state_dict gave, unless the optimizer says otherwise.
# Seen (torch 2.13.0): no. Optimizer.load_state_dict casts every floating-point tensor of the state to the dtype of its
#   parameter, here bf16; only `step` stays as it is. Below, the update of a step is too small for bf16 and collects in
#   the fp32 copy. 100 steps without a stop move the weight to 1.0100. If the run is saved and loaded after every step,
#   the weight stays at 1.
# Hurts: own optimizers for bf16 weights with fp32 master weights, momentum or error feedback. A resumed run has lost
#   the 16 low bits, without a message. Override load_state_dict, or copy the state back after it.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
"$PYTHON" - <<'PY'
import torch


class MasterWeights(torch.optim.Optimizer):
    """SGD in fp32 for bf16 weights."""

    def __init__(self, params):
        super().__init__(params, {"lr": 1e-4})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for weight in group["params"]:
                state = self.state[weight]
                if not state:
                    state["master"] = weight.float()
                state["master"] -= group["lr"] * weight.grad
                weight.copy_(state["master"])


def weight_after_100_steps(reload):
    weight = torch.nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = MasterWeights([weight])
    for _ in range(100):
        weight.grad = -torch.ones_like(weight)
        optimizer.step()
        if reload:
            saved = optimizer.state_dict()
            optimizer = MasterWeights([weight])
            optimizer.load_state_dict(saved)
    return optimizer.state[weight]["master"]


seen = {}
for reload in (False, True):
    seen[reload] = weight_after_100_steps(reload)
    print(f"{'saved and loaded after every step' if reload else 'without a stop'}: "
          f"fp32 copy {seen[reload].item():.4f}, {seen[reload].dtype}")
assert seen[False].dtype == torch.float32 and abs(seen[False].item() - 1.01) < 1e-4
assert seen[True].dtype == torch.bfloat16 and seen[True].item() == 1, "the behaviour has changed"
PY
