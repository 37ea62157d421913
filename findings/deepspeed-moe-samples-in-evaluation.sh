#!/bin/sh
# Question: a mixture of experts of DeepSpeed, deepspeed.moe.layer.MoE with 8 experts, two (or one) for each token and the
#   other settings left alone, is evaluated: model.eval(). Does the same batch give the same output twice?
# Guess: yes. What is random in routing, as the noise of noisy_gate_policy, is for training only.
# Seen (DeepSpeed 0.19.8, torch 2.13.0, CPU): no. With k=2, the second expert of each token is sampled by the Gumbel trick
#   (top2_2nd_expert_sampling, True by default), in evaluation too: 84% of the tokens change from one pass to the next,
#   by 55% of the output's norm. With k=1, an expert that has more tokens than its capacity drops random ones (use_rts), in
#   evaluation too: 17% change. drop_tokens=False or a large eval_capacity_factor helps with k=1, and not with k=2. With
#   top2_2nd_expert_sampling=False and use_rts=False, or with k=3, both passes are equal. A new layer does not show it,
#   since its experts begin as copies of each other.
# Hurts: losses and scores of a checkpoint, which are noisy and too bad, and greedy generation, which is not repeatable.
# Packages: torch is a large download. To use an existing Python that has both, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 setuptools wheel
  DS_BUILD_OPS=0 "$PYTHON" -m pip install --quiet --no-compile --no-build-isolation deepspeed==0.19.8
fi
cat >"$dir/check.py" <<'PY'
import logging

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.utils import logger
from torch import nn

logger.setLevel(logging.ERROR)
deepspeed.init_distributed("gloo")
tokens = torch.randn(4, 64, 32, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def passes(k, **settings):
    """Two passes over the same batch: the share of tokens whose output changes, and the change of the output's norm."""
    torch.manual_seed(0)
    expert = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    model = MoE(32, expert, num_experts=8, k=k, **settings)
    for weight in model.deepspeed_moe.experts.parameters():
        nn.init.normal_(weight, std=0.2)  # experts begin as copies of each other
    model.set_deepspeed_parallelism()
    model.eval()
    first, second = model(tokens)[0], model(tokens)[0]
    changed = ((first - second).abs().amax(-1) > 1e-4).float().mean().item()
    return changed, ((first - second).norm() / first.norm()).item()


seen = {}
plain = {"top2_2nd_expert_sampling": False, "use_rts": False}
for name, settings in {
    "defaults": {},
    "no dropped tokens": {"drop_tokens": False},
    "large capacity in evaluation": {"eval_capacity_factor": 8.0},
    "no sampling": plain,
}.items():
    for k in (1, 2, 3):
        seen[name, k] = passes(k, **settings)
        print("{}, k={}: {:.0%} of the tokens change, by {:.0%} of the norm".format(name, k, *seen[name, k]), flush=True)
assert all(seen["no sampling", k][0] == 0 for k in (1, 2, 3)) and seen["defaults", 3][0] == 0
assert seen["no dropped tokens", 1][0] == 0 and seen["large capacity in evaluation", 1][0] == 0
assert seen["defaults", 1][0] > 0.03, "the behaviour has changed"
for name in ("defaults", "no dropped tokens", "large capacity in evaluation"):
    assert seen[name, 2][0] > 0.5, "the behaviour has changed"
PY
DS_ACCELERATOR=cpu "$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 1 "$dir/check.py" \
  2>"$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
