"""One rank of test_distributed.py: real steps on one fixed global batch, however it is split.

``accelerate launch … gradient_worker.py OUT COMMON… -- SPLIT… [-- SPLIT…]``: a step for each SPLIT;
all words are recipe overrides. The optimizer is replaced by plain SGD, so that the change of the
weights is the (clipped) gradient itself; AdamW's first step would be its sign.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sparsellm.ffn import shared_linear
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import load_recipe
from sparsellm.runs.state import gather_model
from sparsellm.training.objective import total_loss
from sparsellm.training.run import build_run, close_run
from sparsellm.training.step import (
    begin_micro_batch,
    begin_sharing,
    end_sharing,
    forward,
    micro_batches,
    train_step,
)


def fixed_batches(recipe, rank, num_ranks, steps=1):
    """This rank's micro-batches of fixed global batches: int64, (B, context_length + 1) each."""
    length = recipe.model.context_length
    shape = (recipe.train.global_batch_tokens // length, length + 1)
    generator = torch.Generator().manual_seed(11)
    for _ in range(steps):
        whole = torch.randint(257, shape, generator=generator)
        yield from whole.chunk(num_ranks)[rank].split(recipe.train.micro_batch_size)


class FixedBatches:
    """Serves `fixed_batches` to a run."""

    # As `TokenLoader` has them.
    corpus_names = ("fixed",)
    texts_2C = np.zeros((2, 1), dtype=np.int64)

    def __init__(self, run, steps=1):
        place = (run.accelerator.process_index, run.accelerator.num_processes)
        self._micro_batches = fixed_batches(run.recipe, *place, steps)

    def close(self):
        """Nothing runs in the background."""

    def __next__(self):
        return next(self._micro_batches)


def micro_batch(run, tokens_BT1, l1_weight):
    """Forward and backward of one micro-batch."""
    num_ranks = run.accelerator.num_processes
    sums, tokens = forward(run, tokens_BT1), run.recipe.train.global_batch_tokens
    run.accelerator.backward(total_loss(sums, l1_weight, tokens, num_ranks))


def accumulated_gradients(recipe, each_round=lambda run: None):
    """By parameter, of one process's step that goes no further; ``each_round`` is called before
    each micro-batch, and gets the run."""
    run = build_run(recipe)
    run.loader.close()
    run.loader = FixedBatches(run)
    try:
        count = micro_batches(run)
        begin_sharing(run, accumulate=count > 1)
        for number in range(1, count + 1):
            begin_micro_batch(run, last=number == count)
            each_round(run)
            micro_batch(run, next(run.loader).to(run.accelerator.device), l1_weight=0.5)
        end_sharing(run)
        return {name: p.grad for name, p in run.model.named_parameters()}
    finally:
        close_run(run)


class PlainSGD(torch.optim.SGD):
    """Takes no notice of refused steps: of torch's optimizers only fused ones know them."""

    found_inf = property(lambda self: None, lambda self, refused: None)


class Collectives(TorchDispatchMode):
    """Counts the all-gathers of FSDP2, and the sums over ranks other than of fp32 gradients."""

    gathers, sums = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.gathers += func is torch.ops.c10d._allgather_base_.default
        if func is torch.ops.c10d.allreduce_.default:
            self.sums += args[0][0].dtype != torch.float32
        return func(*args, **(kwargs or {}))


class OwnWeights:
    """Counts how often a linear layer in FP8 quantises its weight in a forward pass by itself."""

    def __init__(self) -> None:
        self.count, self._quantise = 0, shared_linear.fp8_weight

    def __enter__(self) -> OwnWeights:
        def quantise(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
            self.count += 1
            return self._quantise(*args, **kwargs)

        shared_linear.fp8_weight = quantise
        return self

    def __exit__(self, *exception: object) -> None:
        shared_linear.fp8_weight = self._quantise


def gradient_storages(model: torch.nn.Module) -> int:
    """How many pieces of memory the gradients are in."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return len({gradient.untyped_storage().data_ptr() for gradient in gradients})


def mesh_shape(model: torch.nn.Module) -> list[int]:
    """Of the ranks that hold a parameter; empty where each holds it whole."""
    parameter = next(model.parameters())
    return list(parameter.device_mesh.shape) if isinstance(parameter, DTensor) else []


def splits(words: Sequence[str]) -> list[list[str]]:
    """The overrides of each split, after those that are common to all; ``--`` is between them."""
    groups = [list(group) for marker, group in itertools.groupby(words, "--".__eq__) if not marker]
    return [[*groups[0], *split] for split in groups[1:]]


def step(overrides: list[str], out: Path) -> None:
    """One step; the main rank writes the gradient and what else is compared."""
    run = build_run(load_recipe("debug", overrides))
    before = gather_model(run.model)
    run.loader.close()
    run.loader = FixedBatches(run)
    run.optimizer = PlainSGD(run.objective.parameters())
    with Collectives() as collectives, OwnWeights() as own_weights:
        totals = train_step(run, StopRequest())
    after = gather_model(run.model)  # all ranks take part
    if run.accelerator.is_main_process:
        lr = totals.values["learning_rate"]
        save_file({n: (before[n] - p) / lr for n, p in after.items()}, out)
        numbers = {
            "world_size": run.accelerator.num_processes,
            "loss": totals.values["loss"],
            "l1": totals.values["l1"],
            "grad_norm": totals.values["grad_norm"],
            "gathers": collectives.gathers,
            "sums": collectives.sums,
            "own_weights": own_weights.count,
            "target": run.target.state_dict() if run.target else None,
            "mesh": mesh_shape(run.model),
            "gradient_storages": gradient_storages(run.objective),
        }
        stats = {n: t.tolist() for n, t in run.stats.state_dict().items()}
        out.with_suffix(".json").write_text(json.dumps(numbers | {"stats": stats}))
    del run.objective  # before the process group, see `close_run`
    run.accelerator.free_memory()


def main() -> None:
    torch.set_num_threads(1)
    out, *words = sys.argv[1:]
    for index, overrides in enumerate(splits(words)):
        step(overrides, Path(f"{out}-{index}.safetensors"))
    PartialState().destroy_process_group()


if __name__ == "__main__":
    main()
