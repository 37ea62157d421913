#!/bin/sh
# Question: olmo-core's SkipStepAdamW, the optimizer of OLMo's recipes, skips a step whose loss or gradient norm is more
#   than six standard deviations above the mean of the last 128. One step has an infinite gradient, as an overflow gives
#   it, and its loss is fine. What is left of it?
# Guess: nothing. The step is skipped, weights and moments are those from before it, and the next step is taken.
# Seen (olmo-core 3.0.0): step_skipped is 1, and the weights that have the infinite gradient are NaN, as are their
#   moments: a skipped step multiplies its update by zero, and zero times infinity is NaN. If gradients are clipped, as
#   usual, the clipped gradient is NaN there. A NaN norm makes all weights NaN, by the clipping. The second effect: the
#   infinite norm (or an infinite loss, or a NaN) enters the 128 values. Their mean and deviation are not numbers, so
#   every comparison is false, and the next 128 steps are skipped too, whatever their losses. A finite spike is skipped
#   rightly, and only itself. The values are not in state_dict(), so after a resume no step can be skipped before 64 new
#   values are there.
# Hurts: long runs with this optimizer, which is there for such steps: one overflow ends the run, or costs 128 steps of
#   data with a learning rate schedule that goes on. Check `torch.isfinite(grad_norm)` before step(), leave such steps
#   out, and give the optimizer no such value.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 ai2-olmo-core==3.0.0
fi
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import math

import torch
from olmo_core.optim import SkipStepAdamW

STEPS, SPIKE = 400, 100


def run(gradient, loss, foreach=True):
    """One spiked step among many: the share of weights that is finite at the end, and the steps that were skipped."""
    torch.manual_seed(0)
    weights = torch.nn.Parameter(torch.randn(8))
    optimizer = SkipStepAdamW([weights], lr=1e-2, foreach=foreach)
    skipped = []
    for step in range(STEPS):
        weights.grad = 0.1 * torch.randn(8)
        optimizer.latest_loss = 3 + 0.05 * torch.randn(())
        if step == SPIKE:
            weights.grad[0] = gradient
            optimizer.latest_loss = torch.tensor(loss)
        optimizer.latest_grad_norm = torch.nn.utils.clip_grad_norm_([weights], 1.0)
        optimizer.step()
        if optimizer.step_skipped:
            skipped.append(step)
    return weights.isfinite().float().mean().item(), skipped, optimizer.state_dict()


for foreach in (True, False):
    for gradient, loss in ((1e4, 3.0), (0.1, 1e4), (math.inf, 3.0), (math.nan, 3.0), (0.1, math.inf)):
        finite, skipped, state = run(gradient, loss, foreach)
        print(f"foreach={foreach!s:5} gradient {gradient:g}, loss {loss:g} in step {SPIKE}: skipped {len(skipped)} steps, "
              f"{skipped[0]} to {skipped[-1]}; {finite:.1%} of the weights are finite at the end")
        usual = math.isfinite(gradient) and math.isfinite(loss)
        assert len(skipped) == (1 if usual else 129), "the behaviour has changed"
        expected = 1 if math.isfinite(gradient) else 0 if math.isnan(gradient) else 7 / 8
        assert finite == expected, "the behaviour has changed"
assert set(state) == {"state", "param_groups"}, "the behaviour has changed"
PY
