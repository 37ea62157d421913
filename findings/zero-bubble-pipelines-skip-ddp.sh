#!/bin/sh
# Question: pipeline stages are wrapped in DDP, two pipelines train on different data, and the schedule is changed from
#   1F1B to one without bubbles (ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble). What are the gradients?
# Guess: the same: the mean over both pipelines. Schedules change the order of the work only.
# Seen (torch 2.13.0, gloo, four CPU processes): of all stages but the first, each pipeline keeps the gradients of its own
#   data, without a message. These schedules compute gradients of weights apart from the rest of the backward pass, so
#   DDP is not told about them; register_post_accumulate_grad_hook does not run either. Only the first stage is averaged.
#   Under FSDP2, and with interleaved 1F1B under DDP, gradients are the mean.
# Hurts: data-parallel pipelines: the copies of a stage drift apart, and the saved model is put together from stages that
#   were not trained together.
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
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import (
    PipelineStage,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "stage"))
data, place = mesh.get_local_rank("data"), mesh.get_local_rank("stage")
torch.manual_seed(9)
inputs, targets = torch.randn(2, 8, 8), torch.randn(2, 8, 8)  # pipeline, row, feature


def layer(number):
    torch.manual_seed(number)
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh())


def expected():
    model = nn.Sequential(*map(layer, range(4)))
    for x, y in zip(inputs, targets):
        (mse_loss(model(x), y) / 2).backward()
    return [part[0].weight.grad for part in model]


def errors(schedule_class, kind):
    """For each of this process's stages, how far its gradient is from the mean's."""
    numbers = (place, 3 - place) if schedule_class is ScheduleZBVZeroBubble else (place, place + 2)
    layers = [layer(number) for number in numbers]
    group = mesh["data"].get_group()
    wrapped = [fully_shard(l, mesh=mesh["data"]) if kind == "FSDP2" else DistributedDataParallel(l, process_group=group)
               for l in layers]
    cpu, pipeline = torch.device("cpu"), mesh["stage"].get_group()
    stages = [PipelineStage(module, number, 4, cpu, group=pipeline) for module, number in zip(wrapped, numbers)]
    schedule = schedule_class(stages, n_microbatches=4, loss_fn=mse_loss)
    schedule.step(*[inputs[data]] * (0 in numbers), **({"target": targets[data]} if 3 in numbers else {}))
    grads = [part[0].weight.grad for part in layers]
    grads = [grad.full_tensor() if kind == "FSDP2" else grad for grad in grads]
    return {n: ((grad - expected()[n]).norm() / expected()[n].norm()).item() for n, grad in zip(numbers, grads)}


for schedule_class in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble):
    for kind in ("DDP", "FSDP2"):
        of_all = [None] * 4
        dist.all_gather_object(of_all, errors(schedule_class, kind))
        worst = [max(of_rank.get(number, 0) for of_rank in of_all) for number in range(4)]
        if dist.get_rank() == 0:
            print(f"{schedule_class.__name__}, {kind}: gradients of stages 0 to 3 are off by {[f'{e:.0%}' for e in worst]}")
        wrong = "ZeroBubble" in schedule_class.__name__ and kind == "DDP"
        assert worst[0] < 1e-5 and (min(worst[1:]) > 0.3 if wrong else max(worst) < 1e-5), "the behaviour has changed"
dist.destroy_process_group()
PY
"$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 4 "$dir/check.py"
