"""The schedules of learning rate and L1 coefficient, and what is due after which step.

The schedules count steps from 0. What is due follows a step, and counts steps from 1.
"""

import math

from sparsellm.recipe import Recipe
from sparsellm.recipe.sections import FFNConfig, OptimizerConfig, SparsityConfig
from sparsellm.runs.checkpoint import step_name


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Linear warm-up to the peak, then by ``config.schedule`` to ``min_lr_ratio`` of it.

    ``wsd`` (MiniCPM, arXiv 2404.06395) decays linearly in its last steps; ``constant`` never does.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    first = decay_start(config, total_steps) or config.warmup_steps
    progress = min(max(step - first, 0) / max(total_steps - first, 1), 1.0)
    cosine = config.schedule == "cosine"
    left = 0.5 * (1 + math.cos(math.pi * progress)) if cosine else 1.0 - progress
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


def peak_warning(recipe: Recipe) -> str | None:
    """For a run that ends during its warm-up, as short trials of long recipes do."""
    warmup_steps, steps = recipe.optimizer.warmup_steps, recipe.train.steps
    if warmup_steps <= steps:
        return None
    return (
        f"optimizer.warmup_steps {warmup_steps} exceeds train.steps {steps}: the learning rate "
        f"only reaches {steps / warmup_steps:.0%} of its peak"
    )


def decay_start(config: OptimizerConfig, total_steps: int) -> int | None:
    """Steps before the decay of ``wsd`` begins; None for other schedules.

    From the checkpoint of that step a longer run goes on without a jump of the learning rate.
    """
    if config.schedule != "wsd":
        return None
    decay_steps = config.decay_steps or max(total_steps // 10, 1)
    return max(config.warmup_steps, total_steps - decay_steps)


def rate_changes(saved: Recipe, present: Recipe, step: int) -> list[str]:
    """Warnings if a run resumed after ``step`` steps leaves its old schedule."""
    before = learning_rate(saved.optimizer, max(step - 1, 0), saved.train.steps)
    planned = learning_rate(saved.optimizer, step, saved.train.steps)
    after = learning_rate(present.optimizer, step, present.train.steps)
    changes = []
    if not math.isclose(after, planned, rel_tol=0.01):
        changes.append(_change("the learning rate", before, after, step))
        if present.optimizer.schedule == "cosine" and present.train.steps != saved.train.steps:
            changes[0] += (
                f": the cosine now ends at step {present.train.steps}, not {saved.train.steps}; "
                "optimizer.schedule=constant can be continued without a jump, and wsd from where "
                "its decay began"
            )
        first = decay_start(saved.optimizer, saved.train.steps)
        if first is not None and first < step and present.optimizer.schedule == "wsd":
            changes[0] += (
                f": wsd decays from step {first} on. Without a jump a new run goes on from before "
                f"that: --resume …/{step_name(first)} --set name=NEW"
            )
    was, now = saved.optimizer.gate_lr_scale, present.optimizer.gate_lr_scale
    if was != now and not math.isclose(after * now, planned * was, rel_tol=0.01):
        changes.append(_change("the gates' learning rate", before * was, after * now, step))
    return changes


def _change(name: str, before: float, after: float, step: int) -> str:
    return f"{name} changes from {before:.3g} at step {step} to {after:.3g} at the next"


def l1_coefficient(config: SparsityConfig, step: int) -> float:
    """Zero, then a linear ramp, then constant (paper, L1 warm-up: 5,000 and 5,000 steps)."""
    if step < config.l1_zero_steps:
        return 0.0
    if config.l1_ramp_steps == 0:
        return config.l1_coefficient
    progress = (step - config.l1_zero_steps + 1) / config.l1_ramp_steps
    return config.l1_coefficient * min(progress, 1.0)


def ramp_share(config: FFNConfig, step: int) -> float | None:
    """Share of `activation` in its mixture with `ramp_from`; None once the ramp is over."""
    return step / config.ramp_steps if step < config.ramp_steps else None


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps (0 is never) is due after ``step``."""
    return every > 0 and step % every == 0


def saves_after(recipe: Recipe, step: int) -> bool:
    """Whether a checkpoint is due after ``step``: also at the end, and before wsd decays."""
    every, last = recipe.checkpoint.every_steps, recipe.train.steps
    ends = (decay_start(recipe.optimizer, last), last)
    return every > 0 and (is_due(step, every) or step in ends)


def measurements_due(recipe: Recipe, step: int) -> list[str]:
    """Which of ``validation`` and ``evaluation`` are due after a step, in this order."""
    last = step == recipe.train.steps
    every = {
        "validation": recipe.validation.every_steps,
        "evaluation": recipe.evaluation.every_steps,
    }
    return [kind for kind, n in every.items() if step > 0 and n > 0 and (is_due(step, n) or last)]


def is_logged(recipe: Recipe, step: int) -> bool:
    """Whether ``step`` gets a record; the first and the last step always do."""
    return step % recipe.logging.every_steps == 0 or step in (1, recipe.train.steps)


def next_may_launch(recipe: Recipe, step: int) -> bool:
    """Whether the step after ``step`` may be launched within it, see `next_step`.

    It may not if anything is saved or measured between the two, neurons are re-initialised, or the
    micro-batch size may change: each of these needs the model or its memory, or changes it. With
    dropout it would draw random numbers, and a stop saves the state of those between the steps.
    """
    return (
        step < recipe.train.steps
        and not saves_after(recipe, step)
        and not measurements_due(recipe, step)
        and not recipe.sparsity.reinit_rate
        and recipe.train.micro_batch_size != "auto"
        and not recipe.model.huggingface.get("attention_dropout")
    )
