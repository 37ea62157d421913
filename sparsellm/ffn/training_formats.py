"""The formats in which training keeps an activation pattern from forward to backward.

The operators of training_ops.py know a format only by its `TrainingFormat`.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsellm.ffn import formats, reference
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    MAX_ELL_WIDTH,
    BackwardInputs,
    Columns,
    FFNGradients,
    FFNStats,
    FFNWeights,
    Format,
    Room,
)


@dataclass(frozen=True)
class TrainingFormat:
    """What differs between formats, and training in plain torch: the specification of kernels.

    y, statistics and gradients are those of the dense FFN whatever overflows.
    """

    saved: type[Columns] | type[formats.Hybrid]  # what forward keeps for backward
    empty: Callable[..., Any]  # allocates it for (x, N, room, gated)
    check: Callable[[int, int, Room], None]  # that the room fits M and N
    keep: Callable[[Tensor | None, Tensor, Room], Any]  # makes it from `reference.activations`
    restore: Callable[[Any, Tensor, FFNWeights], tuple[Tensor | None, Tensor]]  # from it, x and w
    kernels: str  # the module of kernels/ with forward and backward, see `kernels`

    def forward(
        self, x_MK: Tensor, w: FFNWeights, room: Room, token_M: Tensor | None = None
    ) -> tuple[Tensor, FFNStats, Any]:
        """y (M, K), statistics, and the input of `backward` (paper, section on training).

        Args:
            x_MK: the tokens; everything is computed in their type.
            w: of the same type, without biases; its threshold is not read.
            room: what is reserved for the pattern.
            token_M: see `reference.output_of`.
        """
        gate_MN, up_MN = reference.activations(x_MK, w)
        y_MK, stats = reference.output_of(gate_MN, up_MN, w, token_M)
        return y_MK, stats, self.keep(gate_MN, up_MN, room)

    def backward(self, given: BackwardInputs) -> FFNGradients:
        """`reference.gradients_on` the pattern; what did not fit is recomputed from x.

        ∇x is in the order of the rows of x.
        """
        dy_MK, d_l1, x_MK, w, saved, token_M = given
        dy_MK = dy_MK if token_M is None else dy_MK[token_M]
        gate_MN, up_MN = self.restore(saved, x_MK, w)
        return reference.gradients_on(gate_MN, up_MN, dy_MK, d_l1, x_MK, w)


def _check_columns(num_tokens: int, num_neurons: int, room: Room) -> None:
    worst = -(-num_tokens // BLOCK_TOKENS) * num_neurons
    if not 0 <= room.capacity <= worst + 1:  # `Capacity` begins with the maximum
        raise ValueError(
            f"sparse_ffn: capacity {room.capacity:,} must be 0 to {worst:,} (blocks × N)"
        )
    if worst >= 2**31:
        raise ValueError(
            f"sparse_ffn: {num_tokens:,} tokens × {num_neurons:,} neurons are over 2³¹ columns"
        )


def _check_hybrid(num_tokens: int, num_neurons: int, room: Room) -> None:
    width = room.ell_width
    if not 1 <= width <= MAX_ELL_WIDTH or num_tokens * width >= 2**31:
        raise ValueError(
            f"sparse_ffn: an ELL matrix of {num_tokens:,} × {width:,}: the width must be 1 to "
            f"{MAX_ELL_WIDTH:,}, and the product under 2³¹"
        )


FORMATS: dict[Format, TrainingFormat] = {
    "union": TrainingFormat(
        saved=Columns,
        empty=reference.empty_columns,
        check=_check_columns,
        keep=lambda gate_MN, up_MN, room: reference.columns_of(gate_MN, up_MN, room.capacity),
        restore=reference.activations_in,
        kernels="union_training",
    ),
    "twell": TrainingFormat(
        saved=formats.Hybrid,
        empty=formats.empty_hybrid,
        check=_check_hybrid,
        keep=formats.hybrid_of,
        restore=formats.activations_in,
        kernels="hybrid",
    ),
}


def runs_kernels(x_MK: Tensor) -> bool:
    """Whether an operator runs the kernels: on a GPU, if there are any tokens."""
    return x_MK.is_cuda and x_MK.shape[0] > 0


def kernels(format: Format) -> Any:
    """The module of a format's kernels: ``forward``, and ``backward`` that also adds to sums."""
    return importlib.import_module(f"sparsellm.ffn.kernels.{FORMATS[format].kernels}")
