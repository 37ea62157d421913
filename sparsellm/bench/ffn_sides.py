"""The dense formula, an FFN with given weights, and differences between their results.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.bench.ffn_cases import Shape
from sparsellm.bench.timing import Call
from sparsellm.ffn.module import SparseFFN

Sides = Mapping[str, Sequence[Call]]  # one call per copy of the weights


def dense(x_MK: Tensor, w_gate_NK: Tensor | None, w_up_NK: Tensor, w_down_KN: Tensor) -> Tensor:
    """``(relu(x W_g) * (x W_u)) W_d``, or without a gate ``relu(x W_u) W_d``: (M, K)."""
    if w_gate_NK is None:
        h_MN = F.relu(F.linear(x_MK, w_up_NK))
    else:
        h_MN = F.relu(F.linear(x_MK, w_gate_NK)) * F.linear(x_MK, w_up_NK)
    return F.linear(h_MN, w_down_KN)


def dense_weights(ffn: SparseFFN) -> tuple[Tensor | None, Tensor, Tensor]:
    """The weights that `dense` takes."""
    gate = ffn.gate_proj.weight if ffn.gated else None
    return gate, ffn.up_proj.weight, ffn.down_proj.weight


def state_of(shape: Shape, w_NK: Tensor) -> dict[str, Tensor]:
    """Weights of an FFN: the one that determines the pattern is given, the others are Gaussian."""
    k, n, gated = shape
    generator = torch.Generator(w_NK.device).manual_seed(1)

    def matrix(rows: int, columns: int) -> Tensor:
        size = (rows, columns)
        return torch.randn(size, generator=generator, device=w_NK.device) / columns**0.5

    state = {"up_proj.weight": matrix(n, k), "down_proj.weight": matrix(k, n)}
    state["gate_proj.weight" if gated else "up_proj.weight"] = w_NK
    return state


def new_ffn(shape: Shape, state: dict[str, Tensor], device: torch.device) -> SparseFFN:
    """A bf16 FFN with a copy of the weights of `state_of`."""
    k, n, gated = shape
    with device:
        ffn = SparseFFN(k, n, gated=gated).to(torch.bfloat16)
    ffn.load_state_dict(state)
    return ffn


def refuse_if_off(what: str, difference: float, most: float) -> None:
    """Raises ValueError if ``difference`` from dense is NaN or exceeds ``most``."""
    if not difference <= most:
        raise ValueError(
            f"{what} differs from dense by {difference:.1%}; wrong results are not timed"
        )


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference over that of ``expected``, in fp32."""
    error = (found.float() - expected.float()).norm()
    return float(error / expected.float().norm().clamp(min=1e-30))
