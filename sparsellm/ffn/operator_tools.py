"""Shared by the training operators of both formats (training_ops.py, hybrid_ops.py).

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sparsellm.ffn.fills import Fills
from sparsellm.ffn.inference_ops import MAX_TOKENS, beyond_limits
from sparsellm.ffn.step_shared import kernel_weights
from sparsellm.ffn.types import FFNGradients, FFNWeights, KernelWeights

# Results of a backward operator: of x, W_g, W_u, W_d, b_g, b_u and b_d.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def operators_digest() -> str:
    """Changes with the files of this folder: what graphs compiled with its operators depend on."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def fake_backward(dy_MK: Tensor, d_l1: Tensor, x_MK: Tensor, *further: Any) -> Gradients:
    """Of a backward operator; ``further`` begins with the weights and biases."""
    parameters = further[: len(FFNGradients._fields) - 1]
    empty = [x_MK.new_empty(0) if p is None else p.new_empty(p.shape) for p in parameters]
    return (torch.empty_like(x_MK), *empty)  # type: ignore[return-value]


def fake_backward_into(dy_MK: Tensor, d_l1: Tensor, x_MK: Tensor, *_further: Any) -> Tensor:
    """The result of a backward operator that adds the matrices' gradients to sums."""
    return torch.empty_like(x_MK)


def present_gradients(
    x_MK: Tensor, dy_MK: Tensor | None, d_l1: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Zeros for what the loss does not depend on; dy contiguous."""
    dy_MK = torch.zeros_like(x_MK) if dy_MK is None else dy_MK.contiguous()
    if d_l1 is None:
        d_l1 = x_MK.new_zeros((), dtype=torch.promote_types(x_MK.dtype, torch.float32))
    return dy_MK, d_l1


def of_present(inputs: Sequence[Tensor | None], found: Sequence[Tensor]) -> list[Tensor | None]:
    """The gradients of a backward operator, None where there is no such input."""
    return [None if t is None else g for t, g in zip(inputs, found, strict=True)]


def ready_weights(
    gate_NK: Tensor | None, up_NK: Tensor | None, down_NK: Tensor | None
) -> KernelWeights | None:
    """The matrices as kernels read them, where the step shares them."""
    if up_NK is None or down_NK is None:
        return None
    return KernelWeights(gate_NK, up_NK, down_NK)


def without_biases(ready: KernelWeights) -> FFNWeights:
    """An FFN of these matrices."""
    return FFNWeights(ready.gate_NK, ready.up_NK, ready.down_NK.t(), None, None, None, 0.0)


def in_own_types(gradients: FFNGradients, x_MK: Tensor, w: FFNWeights) -> Gradients:
    """The gradients in the weights' type; (0,) for weights and biases that there are not."""
    own = w.up_NK.dtype
    cast = [x_MK.new_empty(0) if g is None else g.to(own) for g in gradients[1:]]
    return (gradients.x_MK, *cast)  # type: ignore[return-value]


def runs_kernels(x_MK: Tensor) -> bool:
    """Whether an operator computes by kernels; without any token it needs none."""
    return x_MK.is_cuda and x_MK.shape[0] > 0


def for_kernels(w: FFNWeights, dtype: torch.dtype, ready: KernelWeights | None) -> FFNWeights:
    """All in ``dtype``, and the matrices as the kernels read them: ``ready``, or made so here."""
    if ready is None:
        with Fills() as fills:
            ready = kernel_weights(w, dtype, fills)
    return cast_weights(w, dtype, ready)


def cast_weights(w: FFNWeights, dtype: torch.dtype, ready: KernelWeights | None) -> FFNWeights:
    """All in ``dtype``; the matrices are ``ready``, where they are."""
    if ready is not None:
        w = w._replace(gate_NK=ready.gate_NK, up_NK=ready.up_NK, down_KN=ready.down_NK.t())
    cast = [t.to(dtype) if isinstance(t, Tensor) else t for t in w]
    return FFNWeights(*cast)  # type: ignore[arg-type]


def check_cuda(x_MK: Tensor, w: FFNWeights) -> None:
    """Checks what the kernels require beyond `check_weights`.

    Raises:
        ValueError: sizes or a type outside the kernels' limits.
    """
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
