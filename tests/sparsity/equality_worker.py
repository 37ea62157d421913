"""One rank of test_equality.py: the same steps by our loop and by a loop of one's own.

``accelerate launch … equality_worker.py OUT COMMON… -- SPLIT… [-- SPLIT…]``: all words are recipe
overrides. The main rank writes what differs, for each split.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import PartialState
from accelerate.state import AcceleratorState
from torch.nn.parallel import DistributedDataParallel
from training.gradient_worker import FixedBatches, PlainSGD, fixed_batches, splits

from sparsellm import SparsityController
from sparsellm.data.tokenizer import load_tokenizer
from sparsellm.model import build_model
from sparsellm.processes.signals import StopRequest
from sparsellm.recipe import load_recipe
from sparsellm.training.optimization.schedule import learning_rate
from sparsellm.training.run import build_run
from sparsellm.training.step import train_step

STEPS = 3


def kept_gradients(optimizer, model):
    """Those of each step, as the optimizer is about to use them."""
    gradients = []
    optimizer.register_step_pre_hook(
        lambda *_: gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    return gradients


def by_our_loop(recipe):
    """Gradients and numbers of each step."""
    run = build_run(recipe)
    run.loader.close()
    run.loader = FixedBatches(run, STEPS)
    run.optimizer = PlainSGD(run.objective.parameters())
    gradients, numbers = kept_gradients(run.optimizer, run.model), []
    for _ in range(STEPS):
        totals = train_step(run, StopRequest())
        reading = totals.reading
        numbers.append(
            {
                "lambda": totals.l1_by_layer,
                "l1": reading.metrics["l1"],
                "nnz": reading.nnz_L,
                "p50": reading.sparsity.nnz_p50,
                "p99": reading.sparsity.nnz_p99,
                "max": reading.sparsity.nnz_max,
                "dead": reading.sparsity.dead_fraction,
                "union": reading.kernels.union_mean,
                "sparse": reading.kernels.sparse,
                "error": run.target.error,
            }
        )
    silent = run.stats.silent_tokens_LN
    run.saver.close()
    del run.objective  # before the process group, see `close_run`
    run.accelerator.free_memory()
    return gradients, numbers, silent


def by_a_loop_of_ones_own(recipe, rank, num_ranks):
    """The same with the public interface, on the same weights."""
    model = build_model(recipe, load_tokenizer(recipe.data.tokenizer).eot_id)
    for layer in model.model.layers:
        layer.mlp.use_kernels(recipe.ffn.kernels)
    bf16 = recipe.runtime.precision == "bf16"
    if bf16:  # as our loop does: the residual stream is bf16
        model.model.embed_tokens.register_forward_hook(lambda module, ids, x: x.bfloat16())
    optimizer, sparsity = torch.optim.SGD(model.parameters()), recipe.sparsity
    controller = SparsityController(
        model,
        optimizer,
        target_nnz=sparsity.target_nnz,
        target_per_layer=sparsity.target_per_layer,
        l1_coefficient=sparsity.l1_coefficient,
        l1_zero_steps=sparsity.l1_zero_steps,
        warmup_steps=recipe.optimizer.warmup_steps,
        dead_window_tokens=sparsity.dead_window_tokens,
        embedding=model.model.embed_tokens if recipe.runtime.token_order == "auto" else None,
    )
    gradients, numbers = kept_gradients(optimizer, model), []
    parallel = DistributedDataParallel(model) if num_ranks > 1 else model
    rounds = recipe.accumulation_steps(num_ranks)
    batches = fixed_batches(recipe, rank, num_ranks, STEPS)
    for step in range(STEPS):
        for index in range(rounds):
            if num_ranks > 1:
                parallel.require_backward_grad_sync = index == rounds - 1
            tokens_BT1 = next(batches)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                logits = parallel(tokens_BT1[:, :-1]).logits
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens_BT1[:, 1:].flatten())
            ((loss + controller.l1_loss()) / rounds).backward()
        optimizer.param_groups[0]["lr"] = learning_rate(recipe.optimizer, step, recipe.train.steps)
        optimizer.step()
        controller.step()
        optimizer.zero_grad()
        statistics = controller.statistics()
        numbers.append(
            {
                "lambda": statistics.l1_coefficient,
                "l1": statistics.l1,
                "nnz": statistics.nnz_mean,
                "p50": statistics.nnz_p50,
                "p99": statistics.nnz_p99,
                "max": statistics.nnz_max,
                "dead": statistics.dead_fraction,
                "union": statistics.union_mean,
                "sparse": statistics.sparse,
                "error": statistics.target_error,
            }
        )
    return gradients, numbers, controller.state_dict()["neurons"]["silent_tokens_LN"]


def largest_error(ours, theirs):
    """Of all gradients of all steps, relative to the norm of our loop's."""
    return max(
        float((a[name] - b[name]).norm() / a[name].norm())
        for a, b in zip(ours, theirs, strict=True)
        for name in a
    )


def main(out: str, *words: str) -> None:
    """All splits; the first words are common to them."""
    results = []
    for overrides in splits(words):
        AcceleratorState._reset_state()  # splits differ in precision
        recipe = load_recipe("debug", overrides)
        state = PartialState(cpu=True)
        place = (state.process_index, state.num_processes)
        ours, theirs = by_our_loop(recipe), by_a_loop_of_ones_own(recipe, *place)
        results.append(
            {
                "gradient_error": largest_error(ours[0], theirs[0]),
                "ours": ours[1],
                "others": theirs[1],
                "silent_equal": torch.equal(ours[2], theirs[2]),
                "num_ranks": state.num_processes,
                "rounds": recipe.accumulation_steps(state.num_processes),
            }
        )
    if PartialState().is_main_process:
        Path(out).write_text(json.dumps(results))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
