"""Steps whose loss or gradient is not finite, and weights that are not.

By ``train.on_nonfinite`` such a step stops the run, or is skipped: weights, optimizer and
statistics stay as they are, and the data goes on behind it.
"""

from __future__ import annotations

import math

from torch.distributed.tensor import DTensor

from sparsellm.runs import checkpoint, state
from sparsellm.training.distributed import any_rank, clear_gradients
from sparsellm.training.run import Run

MOST_SKIPPED = 20  # steps in a row: what goes on longer does not pass


def reason_to_skip(run: Run, values: dict[str, float]) -> str | None:
    """What is not finite, as text; None where the step can be taken.

    Args:
        run: as it was before the step.
        values: of the step, the same on all ranks: loss, L1, gradient norm.

    Raises:
        FloatingPointError: something is not finite, and such steps are not skipped, or too many
            were in a row.
    """
    if all(math.isfinite(value) for value in values.values()):
        return None
    what = ", ".join(f"{name} {value}" for name, value in values.items())
    if run.recipe.train.on_nonfinite == "stop":
        raise FloatingPointError(
            f"step {run.step + 1}: {what}; the step was not taken. {_last_good(run)}, or skip such "
            "steps: --set train.on_nonfinite=skip"
        )
    if run.skipped_in_a_row >= MOST_SKIPPED:
        raise FloatingPointError(
            f"step {run.step + 1}: {what}, after {MOST_SKIPPED} steps in a row that were skipped "
            f"for the like; the step was not taken. {_last_good(run)}"
        )
    return what


def skip_step(run: Run) -> None:
    """Counts a step that changes nothing but the position in the data."""
    clear_gradients(run.optimizer, run.objective)
    run.stats.drop_step()
    run.step += 1
    run.tokens += run.recipe.train.global_batch_tokens
    run.skipped += 1
    run.skipped_in_a_row += 1


def check_finite(run: Run) -> None:
    """Before a checkpoint; all ranks call it.

    Raises:
        FloatingPointError: a weight or a moment of the optimizer is not finite, on some rank.
    """
    tensors = state.model_tensors(run.model) | state.optimizer_tensors(run.model, run.optimizer)
    local = {name: t.to_local() if isinstance(t, DTensor) else t for name, t in tensors.items()}
    odd = state.first_nonfinite(local)
    if any_rank(odd is not None, run.accelerator.device):
        where = f", such as {odd}" if odd else " on another rank"
        raise FloatingPointError(
            f"step {run.step}: weights or optimizer state are not finite{where}; they were not "
            f"saved. {_last_good(run)}"
        )


def _last_good(run: Run) -> str:
    if path := run.saver.wait():
        run.accelerator.print(f"saved {path}")
    good = checkpoint.latest(run.checkpoints)
    return (
        f"Last good checkpoint: {good or 'none yet'}. Resume from it with a lower "
        "optimizer.learning_rate"
    )
