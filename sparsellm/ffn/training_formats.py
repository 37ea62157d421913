"""The formats in which training keeps an activation pattern from forward to backward.

The operators of training_ops.py know a format only by its `TrainingFormat`.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from sparsellm.ffn.formats import (
    Hybrid,
    empty_hybrid,
    hybrid_backward,
    hybrid_forward,
)
from sparsellm.ffn.reference import empty_columns, sparse_backward, sparse_forward
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    MAX_ELL_WIDTH,
    Columns,
    FFNGradients,
    FFNStats,
    FFNWeights,
    Format,
    Room,
)


@dataclass(frozen=True)
class TrainingFormat:
    """What differs between formats."""

    saved: type[Columns] | type[Hybrid]  # what forward keeps for backward
    empty: Callable[..., Any]  # allocates it for (x, N, room, gated)
    check: Callable[[int, int, Room], None]  # that the room fits M and N
    # In plain torch: of x, the weights, the room and the order of the tokens; and backward.
    forward: Callable[[Tensor, FFNWeights, Room, Tensor | None], tuple[Tensor, FFNStats, Any]]
    backward: Callable[..., FFNGradients]
    kernels: str  # the module of kernels/ with both, see `kernels`


def _check_columns(num_tokens: int, num_neurons: int, room: Room) -> None:
    worst = -(-num_tokens // BLOCK_TOKENS) * num_neurons
    if not 0 <= room.capacity <= worst + 1:  # as `Capacity` begins
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
        empty=empty_columns,
        check=_check_columns,
        forward=sparse_forward,
        backward=sparse_backward,
        kernels="union_training",
    ),
    "twell": TrainingFormat(
        saved=Hybrid,
        empty=empty_hybrid,
        check=_check_hybrid,
        forward=hybrid_forward,
        backward=hybrid_backward,
        kernels="hybrid",
    ),
}


def runs_kernels(x_MK: Tensor) -> bool:
    """Whether an operator computes by kernels: on a GPU, if there are any tokens."""
    return x_MK.is_cuda and x_MK.shape[0] > 0


def kernels(format: Format) -> Any:
    """The module of a format's kernels: ``forward``, and ``backward`` that also adds to sums."""
    return importlib.import_module(f"sparsellm.ffn.kernels.{FORMATS[format].kernels}")
