"""λ of each layer in a user's own training loop: fixed, or adjusted to reach a target."""

from copy import deepcopy
from typing import Any

from sparsellm.sparsity.over_ranks import warn_on_first_rank
from sparsellm.sparsity.settings import ControllerSettings
from sparsellm.sparsity.target import TargetController, final_l1


class Coefficients:
    """Gives λ of a step before it, and takes its non-zeros after it.

    Args:
        settings: checked.
        num_layers: L.
    """

    def __init__(self, settings: ControllerSettings, num_layers: int) -> None:
        self._settings, self._num_layers = settings, num_layers
        self._target: TargetController | None = None
        if settings.target_nnz is not None:
            warmup = settings.warmup_steps
            self._target = TargetController(settings, num_layers, warmup, recipe=False)

    def by_layer(self, step: int) -> list[float]:
        """λ at a step, from 0."""
        if self._target is not None:
            return self._target.l1_by_layer(step)
        is_zero = step < self._settings.l1_zero_steps
        return [0.0 if is_zero else self._settings.l1_coefficient] * self._num_layers

    def observe(self, step: int, nnz_L: list[float], stacklevel: int) -> None:
        """Moves λ after a step, by its mean non-zeros per token; warns if the target is not met.

        ``stacklevel`` is that of the warning, counted from here.
        """
        if self._target is None:
            return
        self._target.observe(step, nnz_L)
        if warning := self._target.new_warning():
            warn_on_first_rank(f"step {step + 1}: {warning}", stacklevel + 1)

    @property
    def target_error(self) -> float | None:
        """As `TargetController.error`."""
        return self._target.error if self._target else None

    def state_dict(self) -> dict[str, Any] | None:
        """Plain numbers; None if λ is fixed."""
        return deepcopy(self._target.state_dict()) if self._target else None

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Restores a `state_dict`.

        Raises:
            ValueError: it is of other settings of the target.
        """
        if self._target is None and state:
            last = f"{final_l1(state):.3g}"
            raise ValueError(
                f"this state belongs to a run with target_nnz, which has moved λ to {last}: give "
                f"the controller the same arguments, or to keep λ, l1_coefficient={last} and load "
                "{**state, 'target': None}"
            )
        if self._target and not (state and self._target.load_state_dict(deepcopy(state))):
            raise ValueError(
                "this state belongs to a run without target_nnz, or with another target_per_layer; "
                "give the controller the same arguments"
            )
