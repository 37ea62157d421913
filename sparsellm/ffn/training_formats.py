"""The formats in which training keeps an activation pattern from forward to backward.

The operators of training_ops.py know a format only by its `TrainingFormat`. They compute here: by
kernels on a GPU, elsewhere in plain torch.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sparsellm.ffn.formats import (
    Hybrid,
    empty_hybrid,
    hybrid_backward,
    hybrid_forward,
)
from sparsellm.ffn.inference_ops import beyond_limits
from sparsellm.ffn.reference import empty_columns, sparse_backward, sparse_forward
from sparsellm.ffn.step_shared import Fills, kernel_weights
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    MAX_ELL_WIDTH,
    MAX_TOKENS,
    Columns,
    FFNGradients,
    FFNStats,
    FFNWeights,
    Format,
    GradientSums,
    KernelWeights,
    Room,
)

Saved = Columns | Hybrid


@dataclass(frozen=True)
class TrainingFormat:
    """What differs between formats."""

    saved: type[Columns] | type[Hybrid]  # what forward keeps for backward
    empty: Callable[..., Any]  # allocates it for (x, N, room, gated)
    check: Callable[[int, int, Room], None]  # that the room fits M and N
    forward: Callable[[Tensor, FFNWeights, Room, Tensor | None], tuple[Tensor, FFNStats, Any]]
    backward: Callable[..., FFNGradients]
    kernels: str  # the module of kernels/ with both


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


def forward(  # noqa: PLR0917
    format: Format,
    x_MK: Tensor,
    w: FFNWeights,
    ready: KernelWeights | None,
    room: Room,
    token_M: Tensor | None,
) -> tuple[Tensor, FFNStats, Saved]:
    """y, statistics, and what `backward` needs.

    Args:
        format: in which the pattern is kept.
        x_MK: the tokens; everything is computed in their type.
        w: the FFN, of any type.
        ready: the matrices as the kernels read them, where the step shares them.
        room: what is reserved for the pattern.
        token_M: (M,) int32, the token of each row of x; y and nnz are by token.

    Raises:
        ValueError: sizes or a type outside the kernels' limits.
    """
    if runs_kernels(x_MK):
        _check_limits(x_MK, w)
        with torch.cuda.device(x_MK.get_device()):
            cast = _for_kernels(w, x_MK.dtype, ready)
            return _kernels(format).forward(x_MK, cast, room, token_M)  # type: ignore[no-any-return]
    # Autocast still applies inside an operator, where every type has been chosen already.
    with torch.autocast(x_MK.device.type, enabled=False):
        return FORMATS[format].forward(x_MK, _cast(w, x_MK.dtype, ready), room, token_M)


def backward(  # noqa: PLR0917
    format: Format,
    dy_MK: Tensor,
    d_l1: Tensor,
    x_MK: Tensor,
    w: FFNWeights,
    ready: KernelWeights | None,
    saved: Saved,
    token_M: Tensor | None,
    sums: GradientSums | None = None,
) -> FFNGradients:
    """Gradients of ``Σ dy * y + d_l1 * l1_sum``; with ``sums`` the matrices' are added there.

    ``dy_MK`` is by token; ``saved`` is of `forward`, and so are the other arguments.
    """
    if runs_kernels(x_MK):
        with torch.cuda.device(x_MK.get_device()):
            cast, own = _for_kernels(w, x_MK.dtype, ready), w.up_NK.dtype
            return _kernels(format).backward(  # type: ignore[no-any-return]
                dy_MK, d_l1, x_MK, cast, saved, own, token_M, sums
            )
    with torch.autocast(x_MK.device.type, enabled=False):
        cast = _cast(w, x_MK.dtype, ready)
        gradients = FORMATS[format].backward(dy_MK, d_l1, x_MK, cast, saved, token_M)
    return gradients if sums is None else gradients.added_to(sums)


def runs_kernels(x_MK: Tensor) -> bool:
    """Whether an operator computes by kernels: on a GPU, if there are any tokens."""
    return x_MK.is_cuda and x_MK.shape[0] > 0


def _kernels(format: Format) -> Any:
    return importlib.import_module(f"sparsellm.ffn.kernels.{FORMATS[format].kernels}")


def _check_limits(x_MK: Tensor, w: FFNWeights) -> None:
    (m, k), n = x_MK.shape, w.up_NK.shape[0]
    if reason := beyond_limits(k, n):
        raise ValueError(f"sparse_ffn: {reason}; use ffn.kernels=dense")
    if m > MAX_TOKENS:
        raise ValueError(f"sparse_ffn: {m:,} tokens are more than {MAX_TOKENS:,}; split the batch")
    if x_MK.dtype != torch.bfloat16:
        raise ValueError(
            f"sparse_ffn: x is {x_MK.dtype}; on a GPU sparse training takes torch.bfloat16 alone "
            "(fp16 is for inference): train in bf16, or with ffn.kernels=dense"
        )


def _for_kernels(w: FFNWeights, dtype: torch.dtype, ready: KernelWeights | None) -> FFNWeights:
    """All in ``dtype``, and the matrices as the kernels read them: ``ready``, or made here."""
    if ready is None:
        with Fills() as fills:
            ready = kernel_weights(w, dtype, fills)
    return _cast(w, dtype, ready)


def _cast(w: FFNWeights, dtype: torch.dtype, ready: KernelWeights | None) -> FFNWeights:
    """All in ``dtype``; the matrices are those of ``ready``, if given."""
    if ready is not None:
        w = w._replace(gate_NK=ready.gate_NK, up_NK=ready.up_NK, down_KN=ready.down_NK.t())
    cast = [t.to(dtype) if isinstance(t, Tensor) else t for t in w]
    return FFNWeights(*cast)  # type: ignore[arg-type]
