"""One optimizer step, to be read from top to bottom: `train_step`.

Shapes: B sequences of T tokens in a micro-batch, L layers. A step is `micro_batches` on each rank;
their gradients add up to the gradient of the whole global batch.

The host waits for the device once per step, for the step's numbers (counters.py). The weights'
update is queued before that, and the device refuses it if the numbers say so. The first forward
pass of the next step is queued before it too (next_step.py), so that the GPU has work meanwhile.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from sparsellm.data.loader import MicroBatchReader
from sparsellm.ffn.step_shared import Fills
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.ffn.types import Ramp
from sparsellm.processes.distributed import FailedTogether
from sparsellm.processes.signals import StopRequest
from sparsellm.training.counting.counters import Counters, StepReading
from sparsellm.training.next_step import QueuedStep, StartedStep
from sparsellm.training.nonfinite import Skip, reason_to_skip
from sparsellm.training.objective import LossSums, total_loss
from sparsellm.training.optimization.optimizer import reinit_dead_neurons
from sparsellm.training.optimization.schedule import (
    is_logged,
    l1_coefficient,
    learning_rate,
    ramp_share,
)
from sparsellm.training.run import Run


@dataclass(frozen=True)
class StepTotals:
    """The results of a step, over all ranks."""

    reading: StepReading
    l1_by_layer: list[float]  # λ
    values: dict[str, float | None]  # by the names of `METRICS`; empty if the step is skipped
    skipped: Skip | None = None  # why the step changed nothing


def train_step(run: Run, stop: StopRequest, *, launch_next: bool = False) -> StepTotals:
    """One optimizer step over `global_batch_tokens`.

    With ``launch_next`` the first forward pass of the step after it is queued too (next_step.py);
    then nothing may be done with the model before that step, which must follow on all ranks.

    Raises:
        FloatingPointError: loss or gradient norm is not finite; weights are then unchanged.
        FailedTogether: some rank could not read its data; weights are then unchanged.
    """
    recipe, number = run.recipe, run.step + 1
    l1_L = l1_by_layer(run)
    step = _take_queued(run) or start_step(run, number)
    counters = step.counters

    # The GPU computes all of this before the host knows a number; it decides itself whether the
    # step is refused.
    norm = _gradients(run, step, l1_L)
    refused = counters.reduce(
        norm,
        run.skips.limits(recipe.train.spike_threshold),
        stop=stop.received is not None or run.saver.failed,
        failed=step.reader.error is not None,
        texts_2C=step.reader.texts_2C,
    )
    # From here on statistics and weights change.
    run.between_steps = False
    run.stats.advance(counters.active_LN, recipe.train.global_batch_tokens, refused)
    counters.send(run.stats.dead_LN() if is_logged(recipe, number) else None)
    lr = _update(run, refused)
    if launch_next:
        _queue(run, number + 1)
        run.activity.begin("summing over ranks", run.step)

    # Only here does the host wait.
    reading = counters.read()
    run.between_steps = reading.refused
    if reading.failed:
        raise FailedTogether(step.reader.error)
    skip = reason_to_skip(run, reading) if reading.refused else None
    run.step = number
    run.tokens += recipe.train.global_batch_tokens
    if skip:
        run.skips.skip()
        return StepTotals(reading, l1_L, {}, skip)
    _adapt(run, reading)
    run.between_steps = True
    values: dict[str, float | None] = {
        **reading.metrics,
        "l1_coefficient": sum(l1_L) / len(l1_L),
        "target_error": run.target.error if run.target else None,
        "learning_rate": lr,
        "grad_norm": reading.gradient_norm,
        "micro_batch_size": run.micro_batch.size,
        "skipped_steps": run.skips.total,
    }
    return StepTotals(reading, l1_L, values)


def l1_by_layer(run: Run) -> list[float]:
    """λ of each layer at the present step: by the controller, or by the schedule."""
    if run.target:
        return run.target.l1_by_layer(run.step)
    recipe = run.recipe
    return [l1_coefficient(recipe.sparsity, run.step)] * recipe.model.num_hidden_layers


def _take_queued(run: Run) -> StartedStep | None:
    """The step that was queued, if any; raises the error that kept it from starting."""
    queued, run.queued = run.queued, None
    if queued is not None and queued.error is not None:
        raise queued.error
    return queued.step if queued is not None else None


def start_step(run: Run, number: int) -> StartedStep:
    """Queues the first forward pass of a step; 1 is the first step."""
    choose_kernels(run.ffns, run.readings)
    if run.recipe.ffn.ramp_steps:
        ramp = ramp_at(run, number - 1)
        for ffn in run.ffns:
            ffn.use_ramp(ramp)
    shape = (run.micro_batch.size, run.recipe.model.context_length + 1)
    reader = MicroBatchReader(run.loader, shape, number, np.zeros_like(run.loader.texts_2C))
    count = micro_batches(run)
    of_all_ranks = count * run.accelerator.num_processes
    num_tokens = run.recipe.train.global_batch_tokens // of_all_ranks
    counters = Counters(run.layout, run.ffns, num_tokens, of_all_ranks)
    begin_sharing(run, accumulate=count > 1)
    first_sums = _next_forward(run, reader, last=count == 1)
    return StartedStep(reader, count, counters, first_sums)


def ramp_at(run: Run, step: int) -> Ramp | None:
    """The mixture of activations at a step, counted from 0; None if there is none."""
    share = ramp_share(run.recipe.ffn, step)
    if share is None:
        return None
    on_device = torch.tensor(share).to(run.accelerator.device, non_blocking=True)
    return Ramp(run.recipe.ffn.ramp_from, on_device)


def micro_batches(run: Run) -> int:
    """The number of micro-batches that a rank computes in a step."""
    tokens_at_once = run.micro_batch.size * run.recipe.model.context_length
    return run.recipe.train.global_batch_tokens // (tokens_at_once * run.accelerator.num_processes)


def begin_sharing(run: Run, accumulate: bool) -> None:
    """Prepares what the micro-batches of a step share; ``accumulate``: there are several."""
    if run.gathered is not None:
        run.gathered.begin_step()
        return
    fills = Fills()
    for part in run.sharing:
        part.begin_step(run.compute_dtype, accumulate, fills)
    fills.fill()


def _next_forward(run: Run, reader: MicroBatchReader, last: bool) -> LossSums:
    """Reads the next micro-batch, and queues its forward pass. Its backward pass must follow."""
    begin_micro_batch(run, last)
    run.activity.begin("reading data", reader.step - 1)
    tokens_BT1 = reader.next()
    run.activity.begin("computing", reader.step - 1)
    return forward(run, tokens_BT1)


def begin_micro_batch(run: Run, last: bool) -> None:
    """Called before a micro-batch's forward pass. Only a step's last one sums gradients over ranks.

    Where FSDP2 keeps gathered weights from forward to backward (``fsdp_reshard_after_forward:
    false``), it also keeps them for the next micro-batch: the peak of memory, at the end of a
    forward pass, includes them in any case.
    """
    model = run.objective
    if isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = last
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        if not run.accelerator.state.fsdp_plugin.reshard_after_forward:
            model.set_reshard_after_backward(last)
    if last:
        for part in run.sharing:
            part.end_accumulation()


def forward(run: Run, tokens_BT1: Tensor) -> LossSums:
    """The sums of a micro-batch of this rank, with their graph."""
    tokens_BT1 = tokens_BT1.to(run.accelerator.device, non_blocking=True)
    inputs_BT, targets_BT = tokens_BT1[:, :-1], tokens_BT1[:, 1:]
    teacher_BTV = run.teacher.logits(inputs_BT) if run.teacher else None
    with run.accelerator.autocast():
        sums: LossSums = run.objective(inputs_BT, targets_BT, teacher_BTV)
    return sums


def _gradients(run: Run, step: StartedStep, l1_L: list[float]) -> Tensor:
    """Forward and backward of all micro-batches, counted. Clips the gradients.

    Returns their norm before clipping, (); the host does not wait for it.
    """
    train, num_ranks = run.recipe.train, run.accelerator.num_processes
    l1_weight: float | Tensor = l1_L[0]
    if len(set(l1_L)) > 1:
        l1_weight = torch.tensor(l1_L).to(run.accelerator.device, non_blocking=True)
    sums = step.first_sums
    for number in range(1, step.num_micro_batches + 1):
        if number > 1:
            sums = _next_forward(run, step.reader, last=number == step.num_micro_batches)
        loss = total_loss(sums, l1_weight, train.global_batch_tokens, num_ranks, train.distillation)
        run.accelerator.backward(loss)
        step.counters.add(sums)
    end_sharing(run)
    run.activity.begin("summing over ranks", run.step)
    parameters, most = run.objective.parameters(), run.recipe.optimizer.clip_norm
    norm = run.accelerator.clip_grad_norm_(parameters, most)
    assert norm is not None
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def end_sharing(run: Run) -> None:
    """Gives up what the micro-batches of a step have shared; the weights may then change."""
    if run.gathered is not None:
        run.gathered.end_step()
    for part in run.sharing:
        part.end_step()


def _update(run: Run, refused: Tensor) -> float:
    """One update of the weights, or none where ``refused`` is 1; returns the learning rate.

    torch's fused optimizers read ``refused`` from `found_inf`, as they do for its `GradScaler`, so
    the host does not wait for it.
    """
    lr = learning_rate(run.recipe.optimizer, run.step, run.recipe.train.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)
    run.optimizer.found_inf = refused  # type: ignore[attr-defined]
    run.optimizer.step()
    clear_gradients(run.optimizer, run.objective)
    return lr


def clear_gradients(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Clears the gradients after an optimizer step.

    DDP's gradients are views of the buckets that it sends, and are kept: the micro-batches of the
    next step would otherwise allocate more memory besides the buckets, 4 bytes per parameter.
    """
    optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))


def _queue(run: Run, number: int) -> None:
    """Starts the next step. An error waits until it is taken: the step before it is complete."""
    run.queued = QueuedStep(run.loader.position)
    try:
        run.queued.step = start_step(run, number)
    except Exception as error:
        run.queued.error = error


def _adapt(run: Run, reading: StepReading) -> None:
    """After a step that was taken: moves λ, and decides on kernels and dead neurons."""
    run.skips.take(reading.metrics["loss"], reading.gradient_norm)
    run.readings.append(reading)
    if run.queued is None:
        choose_kernels(run.ffns, run.readings)
    if run.target:
        run.target.observe(run.step - 1, reading.nnz_L)
    run.activity.begin("between steps", run.step)
    sparsity = run.recipe.sparsity
    if sparsity.reinit_rate:
        reinit_dead_neurons(
            run.ffns,
            run.stats.dead_LN(),
            rate=sparsity.reinit_rate,
            std=run.recipe.model.initializer_range,
            seed=run.recipe.seed,
            step=run.step,
        )


def choose_kernels(ffns: list[SparseFFN], readings: list[StepReading]) -> None:
    """Has each layer choose its path by the steps read since the last choice, and empties them.

    All ranks choose alike; capacities are those that this rank's own micro-batches need.
    """
    for reading in readings:
        unions = zip(reading.largest_union_L, reading.kernels.union_mean, strict=True)
        for ffn, (largest, mean), nnz in zip(ffns, unions, reading.nnz_L, strict=True):
            ffn.observe_union(largest)
            ffn.update_kernels(mean, nnz)
    readings.clear()
