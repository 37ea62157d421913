"""Passes whose gradients are discarded: to compile the model, and to find the size that fits.

The latter is for ``train.micro_batch_size: auto``; `micro_batch` decides what is tried, and when.
"""

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sparsellm.data.loader import Bookmark
from sparsellm.sparsity.over_ranks import any_rank
from sparsellm.training import micro_batch, step
from sparsellm.training.counting.kernel_policy import each_path
from sparsellm.training.objective import total_loss
from sparsellm.training.run import Run, resize
from sparsellm.words import counted


def warm_up(run: Run) -> None:
    """Forward and backward of micro-batches whose gradients are discarded, one or two per path.

    Compilation is then finished before throughput is measured. Also, DDP rebuilds its gradient
    buckets after its first backward pass: afterwards every step sums over ranks in the same order,
    and a resumed run equals an uninterrupted one to the last bit.
    """
    run.activity.begin("compiling", run.step)
    several = step.micro_batches(run) > 1
    for _ in each_path(run.ffns, step.ramp_at(run, 0)):
        # Where micro-batches share weights the last one has a graph of its own, since its gradients
        # go through autograd. Without sharing all have the same graph.
        sparse = any(ffn.path == "sparse" for ffn in run.ffns)
        shares = sparse or run.recipe.runtime.weight_gradients == "fused"
        lasts = [False, True] if several and shares else [True]
        step.begin_sharing(run, accumulate=len(lasts) > 1)
        for last in lasts:
            step.begin_micro_batch(run, last)
            _rehearse(run)
        step.end_sharing(run)
    step.clear_gradients(run.optimizer, run.objective)


def fit_initial_size(run: Run) -> None:
    """Before the first step: halves the size until it fits; all ranks call it."""
    if run.recipe.train.micro_batch_size != "auto":
        return
    while not fits(run) and run.micro_batch.size > 1:
        _shrink(run, run.micro_batch.size // 2)
    say_size(run, "begins with")


def restore_saved_size(run: Run) -> None:
    """After a resume: takes the saved size, if the recipe leaves it open and it still fits."""
    now, saved = run.micro_batch, run.micro_batch.saved
    if run.recipe.train.micro_batch_size != "auto" or not saved:
        return
    possible = micro_batch.possible_sizes(run.recipe, run.accelerator.num_processes)
    saved_size = saved["size"]
    if saved_size not in possible or (saved_size > now.size and not _try(run, saved_size)):
        return
    if saved_size != now.size:
        resize(run, saved_size)
    now.stays, now.calm_steps = saved["stays"], saved["calm_steps"]
    now.paths = tuple(saved["paths"])
    say_size(run, "goes on with")


def double_if_it_fits(run: Run, sparse: list[bool]) -> None:
    """After a step, before its record: doubles the size where layers have freed the memory.

    All ranks call it and decide alike.

    Args:
        run: between two steps.
        sparse: which layers the step computed with the sparse kernels.
    """
    if run.recipe.train.micro_batch_size != "auto" or not run.micro_batch.observe(sparse):
        return
    device = run.accelerator.device
    used = micro_batch.memory_used(device)
    enough = used is not None and _predicted(run, *used) <= micro_batch.ROOM * (
        micro_batch.device_memory(device)
    )
    if any_rank(not enough, device):
        return
    if _try(run, 2 * run.micro_batch.size):
        say_size(run, "goes on with")
    else:
        say_size(run, "stays at")


def may_shrink(run: Run) -> bool:
    """Whether a step that ran out of memory can be done again by smaller micro-batches.

    With several ranks it cannot, since the others wait for this one in the step's reduction. Under
    FSDP2 it cannot on one rank either: gradients of the micro-batches before the last are kept
    where `clear_gradients` does not reach them, and would be in the next step's.
    """
    alone = run.accelerator.num_processes == 1 and run.between_steps
    auto = run.recipe.train.micro_batch_size == "auto"
    whole = not isinstance(run.objective, FSDPModule)
    return alone and auto and whole and run.micro_batch.size > 1


def shrink_after_failure(run: Run, before: Bookmark) -> None:
    """After a step that ran out of memory: undoes what it did, and halves the size for good.

    Args:
        run: for which `may_shrink` holds.
        before: position of the data before the step.
    """
    _clean_up(run)
    run.loader.go_back(before)
    _shrink(run, run.micro_batch.size // 2)
    say_size(run, "ran out of memory, and is done again with")


def fits(run: Run) -> bool:
    """Runs one micro-batch forward and backward on every path, without a collective.

    Under FSDP2, whose passes gather weights from all ranks, nothing is tried: there the estimate
    and the measured memory decide.
    """
    if isinstance(run.objective, FSDPModule):
        return True
    failed = False
    try:
        _one_micro_batch(run)
    except torch.OutOfMemoryError:
        failed = True
    _clean_up(run)
    return not any_rank(failed, run.accelerator.device)


def say_size(run: Run, verb: str) -> None:
    """Prints the present size, after the step and a verb such as ``begins with``."""
    run.accelerator.print(
        f"train.micro_batch_size: auto: step {run.step + 1} {verb} "
        f"{counted(run.micro_batch.size, 'sequence')} × "
        f"{counted(step.micro_batches(run), 'micro-batch', 'micro-batches')}"
    )


def _try(run: Run, size: int) -> bool:
    before = run.micro_batch.size
    resize(run, size)
    if fits(run):
        return True
    _shrink(run, before)
    return False


def _shrink(run: Run, size: int) -> None:
    resize(run, size)
    run.micro_batch.stays = True


def _predicted(run: Run, now: int, peak: int) -> int:
    """Peak memory at twice the size, in bytes: only what a step frees again grows.

    Gradients and the weights that FSDP2 gathers are freed too, but do not grow. Without them, 45.1
    GiB are predicted where 44.7 were used; with them, it would be 54.7 (2B, FP8, four H100, FSDP2,
    from 4 to 8 sequences, a10a9ca).
    """
    parameters, is_sharded = list(run.objective.parameters()), isinstance(run.objective, FSDPModule)
    constant = 0
    if all(p.grad is None for p in parameters):  # DDP keeps its own
        # Until the last micro-batch, each rank has whole gradients.
        whole = is_sharded and step.micro_batches(run) > 1
        local = (p.to_local() if isinstance(p, DTensor) else p for p in parameters)
        constant += sum(p.nbytes for p in (parameters if whole else local))
    if is_sharded and not run.accelerator.state.fsdp_plugin.reshard_after_forward:
        constant += sum(p.numel() for p in parameters) * run.compute_dtype.itemsize
    return peak + max(peak - now - constant, 0)


def _one_micro_batch(run: Run) -> None:
    moments = []
    if not run.optimizer.state:  # two moments at most, which are made at the first step
        moments = [torch.empty_like(p) for p in run.objective.parameters() for _ in range(2)]
    for _ in each_path(run.ffns, step.ramp_at(run, 0)):
        step.begin_sharing(run, accumulate=True)
        step.begin_micro_batch(run, last=False)
        _rehearse(run)
        for part in run.sharing:
            part.end_accumulation()
        step.end_sharing(run)
    del moments


def _clean_up(run: Run) -> None:
    step.end_sharing(run)
    step.clear_gradients(run.optimizer, run.objective)
    if run.accelerator.device.type == "cuda":
        torch.cuda.empty_cache()


def _rehearse(run: Run) -> None:
    """Forward and backward of one micro-batch of zeros; the caller discards the gradients."""
    shape = (run.micro_batch.size, run.recipe.model.context_length + 1)
    device = run.accelerator.device
    # Dropout in attention draws from the state of the steps, which a resumed run has restored.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        sums = step.forward(run, torch.zeros(shape, dtype=torch.int64))
        train, num_ranks = run.recipe.train, run.accelerator.num_processes
        loss = total_loss(sums, 0.0, train.global_batch_tokens, num_ranks, train.distillation)
        run.accelerator.backward(loss)
