"""One optimizer step, to be read from top to bottom: `train_step`.

Shapes: B sequences of T tokens in a micro-batch, L layers. A step is ``run.rounds`` micro-batches
on each rank; their gradients add up to that of the whole global batch.

The host waits for the device once per step, for the step's sums. The weights' update is queued
before that, and the device refuses it where the sums say so (nonfinite.py). The first forward pass
of the next step is queued before it too (step_start.py), so that the GPU has work meanwhile.
"""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from sparsellm.training import step_start
from sparsellm.training.distributed import FailedTogether, all_reduce_sum, clear_gradients
from sparsellm.training.measure import is_due
from sparsellm.training.meter import StepTotals
from sparsellm.training.nonfinite import reason_to_skip, refuse, skip_step
from sparsellm.training.objective import LossSums, total_loss
from sparsellm.training.optimizer import reinit_dead_neurons, update
from sparsellm.training.run import Run
from sparsellm.training.schedule import l1_coefficient, learning_rate
from sparsellm.training.signals import StopRequest
from sparsellm.training.started import StepStart
from sparsellm.training.step_sums import StepReading


def train_step(run: Run, stop: StopRequest, *, begin_next: bool = False) -> StepTotals:
    """One optimizer step over `global_batch_tokens`.

    With ``begin_next`` the first forward pass of the step after it is queued too (step_start.py);
    then nothing may be done with the model before that step, which must follow on all ranks.

    Raises:
        FloatingPointError: loss or gradient norm is not finite; weights are then unchanged.
        FailedTogether: some rank could not read its data; weights are then unchanged.
    """
    recipe = run.recipe
    lr = learning_rate(recipe.optimizer, run.step, recipe.train.steps)
    for group in run.optimizer.param_groups:
        group["lr"] = lr
    l1_L = l1_by_layer(run)

    start = step_start.the_started(run)
    _compute_gradients(run, start, stop, l1_L)
    refused = refuse(run, start.sums)
    start.sums.send(refused)
    run.between_steps = False
    _update(run, refused)
    number = run.step + 1
    logged = is_due(number, recipe.logging.every_steps) or number in (1, recipe.train.steps)
    summary = run.stats.summary() if logged else None
    if begin_next:
        step_start.begin_next(run)
        run.activity.begin("summing over ranks", run.step)
    step = start.sums.read()
    run.between_steps = step.refused
    if step.failed:
        raise FailedTogether(start.reader.error)
    watched = _watched(run, step)
    if step.refused:
        skip = reason_to_skip(run, watched)
        skip_step(run)
        return StepTotals({}, l1_L, None, step.kernels, step.stop, skipped=skip)
    run.averages.add(watched)
    run.skipped_in_a_row = 0
    _adapt(run, step)
    run.activity.begin("between steps", run.step)
    _reinit_dead(run)
    run.between_steps = True
    values: dict[str, float | None] = {
        "loss": watched["loss"],
        "l1": watched["L1"],
        "l1_coefficient": sum(l1_L) / len(l1_L),
        "target_error": run.target.error if run.target else None,
        "learning_rate": lr,
        "grad_norm": watched["gradient norm"],
        "micro_batch_size": run.micro_batch.size,
        "skipped_steps": run.skipped,
    }
    sparsity = summary.read() if summary else None
    return StepTotals(values, l1_L, sparsity, step.kernels, step.stop)


def _watched(run: Run, step: StepReading) -> dict[str, float]:
    """The values that make a step be skipped, where they are not finite, or spikes."""
    recipe, tokens = run.recipe, run.recipe.train.global_batch_tokens
    return {
        "loss": step.cross_entropy_sum / tokens,
        "L1": step.l1_sum / (tokens * recipe.model.num_hidden_layers),
        "gradient norm": step.gradient_norm,
    }


def l1_by_layer(run: Run) -> list[float]:
    """λ of each layer at the present step: by the controller, or by the schedule."""
    if run.target:
        return run.target.l1_by_layer(run.step)
    recipe = run.recipe
    return [l1_coefficient(recipe.sparsity, run.step)] * recipe.model.num_hidden_layers


def _compute_gradients(run: Run, start: StepStart, stop: StopRequest, l1_L: list[float]) -> None:
    """Forward and backward of all micro-batches; clipped gradients, and the sums of all ranks."""
    l1_weight: float | torch.Tensor = l1_L[0]
    if len(set(l1_L)) > 1:
        l1_weight = torch.tensor(l1_L).to(run.accelerator.device, non_blocking=True)
    for sums in step_start.micro_batches(run, start):
        backward(run, sums, l1_weight)
        start.sums.add(sums)
    run.activity.begin("summing over ranks", run.step)
    norm = _clip_gradients(run)
    asked = stop.received is not None or run.saver.failed
    start.sums.reduce(norm, asked, start.reader.error is not None)


def backward(run: Run, sums: LossSums, l1_weight: float | torch.Tensor) -> None:
    """Backward of one micro-batch, of which `step_start.forward` gave the sums."""
    accelerator = run.accelerator
    loss = total_loss(
        sums, l1_weight, run.recipe.train.global_batch_tokens, accelerator.num_processes
    )
    accelerator.backward(loss)
    run.stats.update(sums.nnz_LBT, sums.fired_LN)


def _clip_gradients(run: Run) -> torch.Tensor:
    """Returns their norm before; the host does not wait for it."""
    norm = run.accelerator.clip_grad_norm_(
        run.objective.parameters(), run.recipe.optimizer.clip_norm
    )
    assert norm is not None
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _update(run: Run, refused: torch.Tensor) -> None:
    """Changes weights and statistics on the device, unless the step is refused there."""
    update(run.optimizer, refused)
    clear_gradients(run.optimizer, run.objective)
    run.stats.finish_step(all_reduce_sum, refused)


def _adapt(run: Run, step: StepReading) -> None:
    """Counts the step; adapts λ, and the kernels of the next step that has not begun."""
    tokens = run.recipe.train.global_batch_tokens
    run.step += 1
    run.tokens += tokens
    run.readings.append(step)
    if run.begun is None:
        step_start.adapt_kernels(run)
    if run.target:
        run.target.observe(run.step - 1, [nnz / tokens for nnz in step.nnz_sum_L])


def _reinit_dead(run: Run) -> None:
    recipe = run.recipe
    if recipe.sparsity.reinit_rate:
        reinit_dead_neurons(
            run.ffns,
            run.stats.dead_LN(),
            rate=recipe.sparsity.reinit_rate,
            std=recipe.model.initializer_range,
            seed=recipe.seed,
            step=run.step,
        )
