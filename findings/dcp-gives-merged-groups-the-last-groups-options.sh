#!/bin/sh
# Question: a run had two parameter groups, matrices with weight decay and norms and biases without. Its checkpoint is
#   loaded by torch.distributed.checkpoint.state_dict.set_optimizer_state_dict into an optimizer with one group, with a
#   rate and a decay of its own. Which options does it have then?
# Guess: an error, as from optimizer.load_state_dict; or the optimizer's own; or the first group's.
# Seen (torch 2.13.0): those of the saved group that comes last, without a message: no weight decay for any weight, and
#   the rate of the norms. If the saved groups are in the other order, everything decays. Moments are right.
# Hurts: runs that are resumed with a simpler or automatic grouping: weight decay stops, or a rate for one layer holds for
#   all.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


def build():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4))


def groups(model, matrices_first):
    matrices = {"params": [p for p in model.parameters() if p.dim() == 2], "weight_decay": 0.1, "lr": 1e-3}
    others = {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3}
    return [matrices, others] if matrices_first else [others, matrices]


def step(model, optimizer):
    model(torch.ones(2, 8)).square().mean().backward()
    optimizer.step()


for matrices_first in (True, False):
    model = build()
    optimizer = torch.optim.AdamW(groups(model, matrices_first))
    step(model, optimizer)
    saved = get_optimizer_state_dict(model, optimizer)

    resumed = build()
    one_group = torch.optim.AdamW(resumed.parameters(), lr=5e-4, weight_decay=0.3)
    set_optimizer_state_dict(resumed, one_group, optim_state_dict=saved)
    (group,) = one_group.param_groups
    moments = all(
        torch.equal(one_group.state[new]["exp_avg"], optimizer.state[old]["exp_avg"])
        for new, old in zip(resumed.parameters(), model.parameters())
    )
    last = optimizer.param_groups[-1]
    print(f"saved: {[(g['lr'], g['weight_decay']) for g in optimizer.param_groups]}; loaded into one group: rate "
          f"{group['lr']}, decay {group['weight_decay']}; moments right: {moments}")
    loaded = group["lr"], group["weight_decay"]
    assert moments and loaded == (last["lr"], last["weight_decay"]), "the behaviour has changed"
    try:
        one_group.load_state_dict(optimizer.state_dict())
        raise AssertionError("load_state_dict has taken it")
    except ValueError as error:
        print("optimizer.load_state_dict:", error)
PY
"$PYTHON" -W ignore "$dir/check.py"
