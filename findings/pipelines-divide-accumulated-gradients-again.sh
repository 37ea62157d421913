#!/bin/sh
# Question: torch's pipeline schedules (ScheduleGPipe, Schedule1F1B and others) split a batch into 8 micro-batches. The
#   gradients of four such batches are accumulated: schedule.step() is called four times, and then the optimizer. Is the
#   gradient the sum of the four, as without a pipeline?
# Guess: yes. step() runs the backward passes, which add to .grad, and divides by the number of micro-batches, since the
#   loss is a mean.
# Seen (torch 2.13.0, gloo, two CPU processes): no. It divides .grad, with all that was in it before. So the last batch has
#   the weight 1, the one before it 1/8, then 1/64 and 1/512: the optimizer sees little more than the last batch. The losses
#   are right, and there is no message. With scale_grads=False, and a loss that divides by 8 itself, the weights are equal.
# Hurts: pipeline-parallel runs with gradient accumulation over steps: three quarters of the data are read and hardly
#   used, and the gradient's noise is that of a quarter of the batch. Adam hides the smaller scale.
# Packages: torch is a large download. To use an existing Python that has it, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6
fi
cat > "$dir/check.py" <<'PY'
import copy

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

MICRO_BATCHES, BATCHES = 8, 4
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
parts = [nn.Sequential(nn.Linear(16, 32), nn.Tanh()), nn.Linear(32, 8)]
data = [(torch.randn(32, 16), torch.randint(0, 8, (32,))) for _ in range(BATCHES)]


def gradient(model):
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


def alone(batch):
    """The gradient of this rank's part for one batch, without a pipeline."""
    model = copy.deepcopy(nn.Sequential(*parts))
    nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
    return gradient(model[rank])


def weights(schedule, scaled):
    """The weight of each batch in the gradient that a pipeline accumulates over all of them."""
    part = copy.deepcopy(parts[rank])
    stage = PipelineStage(part, rank, 2, torch.device("cpu"))

    def loss(logits, targets):
        mean = nn.functional.cross_entropy(logits, targets)
        return mean if scaled else mean / MICRO_BATCHES

    pipeline = schedule(stage, MICRO_BATCHES, loss_fn=loss, scale_grads=scaled)
    for inputs, targets in data:
        pipeline.step(inputs) if rank == 0 else pipeline.step(target=targets, losses=[])
    separate = torch.stack([alone(batch) for batch in data], dim=1)
    return torch.linalg.lstsq(separate, gradient(part)[:, None]).solution.flatten().tolist()


for schedule in (ScheduleGPipe, Schedule1F1B):
    for scaled in (True, False):
        seen = weights(schedule, scaled)
        if rank == 0:
            print(f"{schedule.__name__}, scale_grads={scaled}: the weights are", *(f"{weight:.4f}" for weight in seen))
        for age, weight in enumerate(reversed(seen)):
            expected = MICRO_BATCHES**-age if scaled else 1
            assert abs(weight - expected) < 1e-3, "the behaviour has changed"
dist.barrier()
dist.destroy_process_group()
PY
"$PYTHON" -W ignore -m torch.distributed.run --standalone --nproc-per-node 2 "$dir/check.py"
