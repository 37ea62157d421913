#!/bin/sh
# Question: megatron-core trains the embedding and the output matrix at a learning rate of their own, decoupled_lr=5e-3, and
#   everything else at lr=1e-3, with its distributed optimizer. The run is resumed from its checkpoint. At which rates?
# Guess: the same. The checkpoint holds the groups of parameters, each with its largest rate.
# Seen (megatron-core 0.16.1, torch 2.13.0, one process): all parameters train at the rate of the embedding, 5 times as high
#   as it should be. Groups of a checkpoint are found by four keys: wd_mult, lr_mult, is_expert_parallel and
#   is_decoupled_lr. The last is never set any more (a decoupled rate is an override of max_lr now), so both groups have
#   the same keys, and both get the settings of the one that comes last. There is no message. Other overrides of rates
#   (max_lr, min_lr by ParamKey) meet the same code. The optimizer that is not distributed refuses the checkpoint.
# Hurts: runs with a decoupled rate that are resumed, which may diverge, or train on at five times the rate that was tuned.
# Packages: torch is a large download. To use an existing Python that has them, set PYTHON=…
set -eu
dir=$(mktemp -d); trap 'rm -rf "$dir"' EXIT
if [ -z "${PYTHON:-}" ]; then
  python3 -m venv "$dir/venv"
  PYTHON="$dir/venv/bin/python"
  "$PYTHON" -m pip install --quiet --no-compile torch==2.13.0 numpy==2.4.6 megatron-core==0.16.1 psutil==7.2.2
fi
cat >"$dir/run.py" <<'PY'
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode


class OnCPU(TorchFunctionMode):
    """megatron-core's optimizers name the GPU in a few places. This runs them, unchanged, on the CPU."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = function(*args, **kwargs)
        if function is torch.Tensor.type and len(args) == 1 and not kwargs:
            return "torch.cuda." + result.split(".")[-1]
        return result


OnCPU().__enter__()
torch.cuda.current_device = lambda: torch.device("cpu")
torch.cuda.synchronize = lambda *_: None

from megatron.core import dist_checkpointing, parallel_state  # noqa: E402
from megatron.core.dist_checkpointing import ShardedTensor  # noqa: E402
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig  # noqa: E402
from megatron.core.optimizer import (  # noqa: E402
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402


def run():
    """A model with an embedding and two matrices, its optimizer, and a schedule of 100 steps with a warm-up of 10."""
    torch.manual_seed(0)
    matrices = [torch.nn.Linear(8, 8, bias=False) for _ in range(2)]
    model = torch.nn.Sequential(torch.nn.Embedding(16, 8), *matrices)
    model[0].weight.is_embedding_or_output_parameter = True  # as Megatron's models mark it
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(use_distributed_optimizer=True), model)
    config = OptimizerConfig(
        optimizer="adam", lr=1e-3, min_lr=0.0, decoupled_lr=5e-3, decoupled_min_lr=0.0, clip_grad=0.0,
        use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(config, [model], get_standard_config_overrides(config))
    schedule = OptimizerParamScheduler(
        optimizer, init_lr=0.0, max_lr=1e-3, min_lr=0.0, lr_warmup_steps=10, lr_decay_steps=100, lr_decay_style="cosine",
        start_wd=0.0, end_wd=0.0, wd_incr_steps=100, wd_incr_style="constant",
    )  # fmt: skip
    return model, optimizer, schedule


def train(model, optimizer, schedule, steps):
    """Returns how far the last step moved the embedding, and the matrices, at most."""
    for _ in range(steps):
        before = [weight.detach().clone() for weight in model.parameters()]
        model.zero_grad_buffer()
        optimizer.zero_grad()
        model(torch.randint(0, 16, (64,))).square().mean().backward()
        model.finish_grad_sync()
        optimizer.step()
        schedule.step(1)
    moved = [(weight - old).abs().max().item() for weight, old in zip(model.parameters(), before)]
    return moved[0], max(moved[1:])


def sharded(model, optimizer, is_loading=False):
    """What megatron-core's checkpoints take: the model's and the optimizer's states, each tensor as a ShardedTensor."""
    weights = {
        name: ShardedTensor.from_rank_offsets(name, weight, replica_id=(0, 0, 0))
        for name, weight in model.module.state_dict(keep_vars=True).items()
    }
    metadata = {"distrib_optim_sharding_type": "dp_reshardable"}
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights, is_loading=is_loading, metadata=metadata)}


def rates(optimizer):
    return sorted((len(group["params"]), group["max_lr"], round(group["lr"], 6)) for group in optimizer.param_groups)


def main():
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "checkpoint"
        dist.init_process_group("gloo", init_method=f"file://{temporary}/processes", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model, optimizer, schedule = run()
        train(model, optimizer, schedule, 50)
        states = sharded(model, optimizer)
        folder.mkdir()
        dist_checkpointing.save({**states, "schedule": schedule.state_dict()}, folder)
        before = rates(optimizer)
        print("before: (matrices, largest rate, rate now)", *before)
        print("  moved by the next step: embedding {:.4f}, matrices {:.4f}".format(*train(model, optimizer, schedule, 1)))

        model, optimizer, schedule = run()
        model.zero_grad_buffer()
        optimizer.step()  # makes the states that are loaded; without Transformer Engine, megatron-core asks for that
        states = dist_checkpointing.load(sharded(model, optimizer, is_loading=True), folder)
        model.module.load_state_dict(states["model"])
        with torch.no_grad():
            optimizer.load_state_dict(states["optimizer"])
        schedule.load_state_dict(dist_checkpointing.load_common_state_dict(folder)["schedule"])
        after = rates(optimizer)
        print("resumed: (matrices, largest rate, rate now)", *after)
        print("  moved by the next step: embedding {:.4f}, matrices {:.4f}".format(*train(model, optimizer, schedule, 1)))
        dist.destroy_process_group()
    assert before[0][1] == 5e-3 and before[1][1] == 1e-3
    assert after[0][1] == 5e-3 and after[1][1] == 5e-3, "the behaviour has changed"


if __name__ == "__main__":
    main()
PY
"$PYTHON" -W ignore "$dir/run.py" 2>"$dir/log" || { tail -n 20 "$dir/log"; exit 1; }
