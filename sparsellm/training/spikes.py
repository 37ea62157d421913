"""Moving averages of loss and gradient norm, and steps that exceed them by far (spikes).

A damaged batch can raise both by orders of magnitude while they stay finite. With
``train.spike_threshold`` the update of such a step is skipped.
"""

from __future__ import annotations

import math
from typing import Any

WATCHED = ("loss", "gradient norm")
DECAY = 0.98  # of the moving averages: they remember about 50 steps
SETTLED_STEPS = 50  # that must be averaged before a step can be a spike


class MovingAverages:
    """Exponential moving averages over the steps that were taken, without the bias to zero."""

    def __init__(self) -> None:
        self._steps = 0
        self._sums = dict.fromkeys(WATCHED, 0.0)

    def add(self, values: dict[str, float]) -> None:
        """The values of a step that was taken."""
        self._steps += 1
        for name, value in self._sums.items():
            self._sums[name] = DECAY * value + (1 - DECAY) * values[name]

    def limits(self, threshold: float) -> dict[str, float]:
        """What a step must not exceed: ``threshold`` times the averages, once there are enough."""
        if self._steps < SETTLED_STEPS:
            return dict.fromkeys(WATCHED, math.inf)
        weight = 1 - DECAY**self._steps
        limits = {name: threshold * value / weight for name, value in self._sums.items()}
        return {name: limit if limit > 0 else math.inf for name, limit in limits.items()}

    def spikes(self, values: dict[str, float], threshold: float) -> list[str]:
        """What exceeds its limit, as text."""
        return [
            f"{name} {values[name]:.4g} is {threshold * values[name] / limit:.3g} times its "
            f"average {limit / threshold:.4g}"
            for name, limit in self.limits(threshold).items()
            if values[name] > limit
        ]

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers; JSON keeps every bit of them."""
        return {"steps": self._steps, "sums": dict(self._sums)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from `state_dict`."""
        self._steps = state["steps"]
        self._sums = {name: state["sums"][name] for name in WATCHED}
