"""The settings of a controller, and checks of them."""

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any

from sparsellm.ffn.activations import ACTIVATIONS
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.words import listed


@dataclass(frozen=True)
class ControllerSettings:
    """As `target.TargetSettings`; the arguments of `SparsityController` have these names."""

    target_nnz: float | None
    target_per_layer: bool
    l1_coefficient: float
    l1_zero_steps: int
    warmup_steps: int
    dead_window_tokens: int

    def check(self, ffns: dict[str, SparseFFN]) -> None:
        """Raises ValueError for a value out of range, or a target that FFNs cannot have."""
        check_range("l1_coefficient", self.l1_coefficient, at_least=0)
        check_range("l1_zero_steps", self.l1_zero_steps, at_least=0)
        check_range("warmup_steps", self.warmup_steps, at_least=0)
        check_range("dead_window_tokens", self.dead_window_tokens, at_least=1)
        if self.target_nnz is None:
            return
        # In neurons; below 1 it was probably meant as a share of them.
        check_range("target_nnz", self.target_nnz, at_least=1)
        if not self.l1_coefficient > 0:
            raise ValueError(
                f"target_nnz {self.target_nnz} and l1_coefficient {self.l1_coefficient}: a target "
                "needs a λ to start from, such as l1_coefficient=2e-4"
            )
        _check_target(ffns, self.target_nnz)


def check_range(name: str, value: float, *, at_least: float) -> None:
    """Raises ValueError if an argument is not a number, or is out of range."""
    if isinstance(value, bool) or not isinstance(value, Real) or not at_least <= value < math.inf:
        raise ValueError(f"{name} {value!r} must be a number of at least {at_least}, and finite")


def check_state(state: dict[str, Any], ffns: dict[str, SparseFFN]) -> None:
    """Raises ValueError if it is not what `SparsityController.state_dict` gave for such FFNs."""
    if not state or not {"num_steps", "neurons", "paths", "costs"} <= state.keys():
        raise ValueError(
            "this is not what SparsityController.state_dict() returned: it has "
            f"{listed(state) if state else 'nothing'}"
        )
    if list(state["paths"]) != list(ffns):
        raise ValueError(
            f"this state belongs to the FFNs {listed(state['paths'])}; the model has {listed(ffns)}"
        )
    num_neurons = max(ffn.intermediate_size for ffn in ffns.values())
    saved_neurons = state["neurons"]["silent_tokens_LN"].shape[1]
    if saved_neurons != num_neurons:
        raise ValueError(
            f"this state belongs to FFNs with up to {saved_neurons} neurons; the model has up "
            f"to {num_neurons}"
        )


def _check_target(ffns: dict[str, SparseFFN], target_nnz: float) -> None:
    for name, ffn in ffns.items():
        if target_nnz >= ffn.intermediate_size:
            raise ValueError(
                f"target_nnz {target_nnz:g} must be below the {ffn.intermediate_size} neurons of "
                f"{name or 'the FFN'}"
            )
        if not ACTIVATIONS[ffn.activation].exact_zeros:
            raise ValueError(
                f"target_nnz: {name} has {ffn.activation}, of which no activation is exactly zero; "
                "build it with activation='relu' or 'relu2', or set target_nnz to None"
            )
