#!/bin/sh
# Question: a run of megatron-core continues at a fifth of its learning rate. OptimizerParamScheduler gets the new max_lr
#   and min_lr and override_opt_param_scheduler=True; optimizer and scheduler load their states. Which rates hold?
# Guess: the new ones. Without this setting, the scheduler takes max_lr and min_lr from the checkpoint; with it, it logs
#   "overriding learning rate value to 0.0002".
# Seen (megatron-core 0.16.1, torch 2.13.0): the old ones, to the last step. Each group of parameters has a max_lr and a
#   min_lr of its own, which get_megatron_optimizer writes there and the optimizer's state brings back, and the scheduler
#   asks the group first. Its own max_lr and min_lr, which were overridden as it says, have no effect.
# Hurts: annealing, continued pretraining and restarts after a divergence, at a rate that was lowered in the config only.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 megatron-core==0.16.1
fi
cd "$dir"
"$PYTHON" -W ignore - 2>"$dir/log" <<'PY' || { tail -n 20 "$dir/log"; exit 1; }
import os

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """megatron-core's optimizers name the GPU in a few places. This runs them, unchanged, on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


OnCPU().__enter__()
torch.cuda.current_device = lambda: torch.device("cpu")

from megatron.core import parallel_state  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer  # noqa: E402
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

dist.init_process_group("gloo", init_method=f"file://{os.getcwd()}/processes", rank=0, world_size=1)
parallel_state.initialize_model_parallel()


def run(max_lr, min_lr, override):
    torch.manual_seed(0)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), torch.nn.Linear(8, 8))
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=max_lr, min_lr=min_lr, clip_grad=0.0), [model])
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=max_lr, min_lr=min_lr, lr_warmup_steps=10, lr_decay_steps=100,
        lr_decay_style="cosine", start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant",
        use_checkpoint_opt_param_scheduler=not override, override_opt_param_scheduler=override,
    )  # fmt: skip
    return model, optimizer, schedule


def train(model, optimizer, schedule, steps):
    for _ in range(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(torch.randn(4, 8)).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        schedule.step(1)
    return round(optimizer.param_groups[0]["lr"], 7)


model, optimizer, schedule = run(1e-3, 1e-4, override=False)
old = train(model, optimizer, schedule, 50)
states = optimizer.state_dict(), schedule.state_dict()
last = train(model, optimizer, schedule, 50)
print(f"first run, 1e-3 to 1e-4: {old} after 50 steps, {last} after 100")

model, optimizer, schedule = run(2e-4, 2e-5, override=True)
optimizer.load_state_dict(states[0])
schedule.load_state_dict(states[1])
now, end = train(model, optimizer, schedule, 0), train(model, optimizer, schedule, 50)
print(f"continued, 2e-4 to 2e-5 with override: {now} after 50 steps, {end} after 100")
print(f"the scheduler's own values: max_lr {schedule.max_lr}, min_lr {schedule.min_lr}")
dist.destroy_process_group()
assert schedule.max_lr == 2e-4 and schedule.min_lr == 2e-5
assert (now, end) == (old, last) and end == 1e-4, "the behaviour has changed"
PY
