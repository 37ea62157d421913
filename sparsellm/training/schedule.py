"""What changes with the step: learning rate and L1 coefficient. Steps count from 0."""

from __future__ import annotations

import math

from sparsellm.recipe import OptimizerConfig, SparsityConfig


def learning_rate(config: OptimizerConfig, step: int, total_steps: int) -> float:
    """Linear warm-up to the peak, then cosine decay that ends at ``min_lr_ratio`` of it."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    decay_steps = max(total_steps - config.warmup_steps, 1)
    progress = min((step - config.warmup_steps) / decay_steps, 1.0)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * (config.min_lr_ratio + (1 - config.min_lr_ratio) * cosine)


def l1_coefficient(config: SparsityConfig, step: int) -> float:
    """Zero, then a linear ramp, then constant (paper, L1 warm-up: 5,000 and 5,000 steps)."""
    if step < config.l1_zero_steps:
        return 0.0
    if config.l1_ramp_steps == 0:
        return config.l1_coefficient
    progress = (step - config.l1_zero_steps + 1) / config.l1_ramp_steps
    return config.l1_coefficient * min(progress, 1.0)
