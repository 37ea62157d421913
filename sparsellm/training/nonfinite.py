"""Steps that are skipped, and weights that are not finite.

A step whose loss or gradient is not finite stops the run, or is skipped (``train.on_nonfinite``).
A spike is skipped (``train.spike_threshold``). A skipped step changes neither weights nor optimizer
nor statistics; training continues with the data after it.

The device decides (`Counters.reduce`), so that the update can be queued before the host has read
the values. The host then says why (`reason_to_skip`).
"""

import math
from dataclasses import dataclass

from torch.distributed.tensor import DTensor

from sparsellm.runs import checkpoint, state
from sparsellm.sparsity.over_ranks import any_rank
from sparsellm.training.counting.counters import StepReading
from sparsellm.training.objective import reshard
from sparsellm.training.run import Run

MOST_SKIPPED = 20  # steps in a row; a fault that lasts longer will not pass by itself
_SPIKE_KEY = "train.spike_threshold"


@dataclass(frozen=True)
class Skip:
    """Why a step is skipped, and the key of the recipe that says so."""

    why: str
    key: str


def reason_to_skip(run: Run, reading: StepReading) -> Skip:
    """Why a step was refused; called by all ranks.

    Args:
        run: as it was before the step.
        reading: of the step.

    Raises:
        FloatingPointError: something is not finite and the recipe does not skip such steps, or too
            many steps in a row were skipped.
    """
    values = {"loss": reading.metrics["loss"], "L1": reading.metrics["l1"]}
    values["gradient norm"] = reading.gradient_norm
    skip = _not_finite(run, values) or _spike(run, values)
    if run.skips.in_a_row >= MOST_SKIPPED:
        otherwise = f", or raise {_SPIKE_KEY}" if skip.key == _SPIKE_KEY else ""
        raise FloatingPointError(
            f"step {run.step + 1}: {skip.why}, after {MOST_SKIPPED} skipped steps in a row; the "
            f"weights were not changed. {_restart_advice(run)}{otherwise}"
        )
    return skip


def _not_finite(run: Run, values: dict[str, float]) -> Skip | None:
    if all(math.isfinite(value) for value in values.values()):
        return None
    check_finite(run)  # with such weights, other data would not help
    problem = ", ".join(f"{name} {value}" for name, value in values.items())
    if run.recipe.train.on_nonfinite == "stop":
        raise FloatingPointError(
            f"step {run.step + 1}: {problem}; the weights were not changed. "
            f"{_restart_advice(run)}, or skip such steps: --set train.on_nonfinite=skip"
        )
    return Skip(problem, "train.on_nonfinite")


def _spike(run: Run, values: dict[str, float]) -> Skip:
    threshold = run.recipe.train.spike_threshold
    spikes = run.skips.spikes(values, threshold) if threshold else []
    return Skip(", ".join(spikes) or "loss or gradient of another rank", _SPIKE_KEY)


def check_finite(run: Run) -> None:
    """Checks weights and optimizer before a checkpoint and after a bad step; called by all ranks.

    Raises:
        FloatingPointError: a weight or a moment of the optimizer is not finite, on some rank.
    """
    reshard(run.objective)  # the next step's forward pass may have gathered its weights
    tensors = state.model_tensors(run.model)
    if run.optimizer.state:
        tensors |= state.optimizer_tensors(run.model, run.optimizer)
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    odd = state.first_nonfinite(local)
    if any_rank(odd is not None, run.accelerator.device):
        where = f", such as {odd}" if odd else " on another rank"
        raise FloatingPointError(
            f"step {run.step}: weights or optimizer state are not finite{where}; they are not "
            f"saved. {_restart_advice(run)}"
        )


def _restart_advice(run: Run) -> str:
    """Advises from which checkpoint to go on: one before the first skipped step.

    With the weights of that step, the same batch gives the same numbers at any learning rate. Waits
    for the save in progress.
    """
    run.say_saved()
    saved, first_bad = checkpoint.checkpoints_in(run.checkpoints), run.step - run.skips.in_a_row
    if not saved:
        return (
            "There is no checkpoint from before this step: start again with a lower "
            "optimizer.learning_rate"
        )
    good = [path for path in saved if checkpoint.step_of(path) < first_bad]
    if not good:
        first = saved[0]
        return (
            f"No checkpoint has earlier weights than {first}: begin a new run from it (--resume "
            f"{first} --set name=NEW) if the text or the machine was the cause and is repaired, or "
            "start over (--fresh) with a lower optimizer.learning_rate"
        )
    in_place = good[-1] == checkpoint.latest(run.checkpoints)
    command = "the same command" if in_place else f"--resume {good[-1]} --set name=NEW"
    return f"Last good checkpoint: {good[-1]}. Give {command}, with a lower optimizer.learning_rate"
