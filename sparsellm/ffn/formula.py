"""Finds out what a module computes by running it, because names and classes do not tell.

Shapes: K hidden_size, N intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.reference import fatrelu_ffn
from sparsellm.ffn.types import ELEMENTS, FFNWeights

_SCALES = (0.1, 1.0, 10.0)  # a forward may clamp what is large, or cut what is small
_TOKENS_PER_SCALE = 2
# Two orders of the same operations differ by under 0.5% in bf16 and 0.1% in fp16; another formula
# differs by tens of percent.
_TOLERANCE_IN_EPS = 2


class OtherFormula(ValueError):
    """A module computes something that the kernels do not support; the message says what."""


class Formula(NamedTuple):
    """``fatrelu(gate, threshold) * up``, or with ``relu_up`` (dReLU) ``… * relu(up)``."""

    threshold: float
    relu_up: bool


def threshold_of(activation: Callable[[Tensor], Any], like: Tensor) -> float | None:
    """The t of an activation that is ``x if x > t else 0``; 0 for ReLU, None for anything else.

    Every finite value of the type of ``like`` is tried, or of bf16 if that is none of `ELEMENTS`.
    """
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=like.device)
    x = every.view(like.dtype if like.dtype in ELEMENTS else ELEMENTS[0])
    x = x[x.isfinite()]
    try:
        with torch.no_grad():
            y = activation(x)
    except Exception:  # whatever a foreign module raises: it is none that can be read here
        return None
    if not isinstance(y, Tensor) or (y.shape, y.dtype) != (x.shape, x.dtype):
        return None
    threshold = x[y == 0].max() if (y == 0).any() else x.min()
    right = torch.where(x <= threshold, 0, x)
    return float(threshold) if threshold >= 0 and torch.equal(y, right) else None


def probe_tokens(k: int, like: Tensor) -> Tensor:
    """(tokens, K) of several magnitudes, each with its negative; torch's RNG state is unchanged."""
    generator = torch.Generator().manual_seed(0)
    tokens = [s * torch.randn(_TOKENS_PER_SCALE, k, generator=generator) for s in _SCALES]
    x_MK = torch.cat(tokens)
    return torch.cat([x_MK, -x_MK]).to(like)


def find_formula(x_MK: Tensor, y_MK: object, w: FFNWeights) -> Formula:
    """The formula by which an FFN with weights ``w`` computes ``y`` from ``x``.

    Args:
        x_MK: see `probe_tokens`.
        y_MK: what the module's own forward returned.
        w: its weights, with the threshold of its activation.

    Raises:
        OtherFormula: it is none of those that the kernels support.
    """
    if not isinstance(y_MK, Tensor) or y_MK.shape != x_MK.shape:
        kind = f"{tuple(y_MK.shape)}" if isinstance(y_MK, Tensor) else f"a {type(y_MK).__name__}"
        raise OtherFormula(f"its forward returns {kind} for tokens of {tuple(x_MK.shape)}")
    if not y_MK.isfinite().all(dim=-1).any():
        raise OtherFormula(f"its forward overflows {y_MK.dtype} on every random token")
    if not y_MK.any():
        raise OtherFormula("its forward gives zero for every token that was tried")
    candidates = [w] if w.gate_NK is None else [w, w._replace(relu_up=True)]
    errors = [_error(y_MK, fatrelu_ffn(x_MK, candidate)) for candidate in candidates]
    best = min(range(len(errors)), key=errors.__getitem__)
    if errors[best] <= _TOLERANCE_IN_EPS * torch.finfo(x_MK.dtype).eps:
        return Formula(w.threshold, candidates[best].relu_up)
    formulas = "relu(up)" if w.gate_NK is None else "relu(gate) * up or relu(gate) * relu(up)"
    raise OtherFormula(
        f"its forward does not compute {formulas}: on random tokens it differs by "
        f"{errors[best]:.1%}"
    )


def differs(found: Tensor, right: Tensor) -> bool:
    """Whether two results are not equal within the rounding of their type."""
    return not _error(found, right) <= _TOLERANCE_IN_EPS * torch.finfo(right.dtype).eps


def _error(found: Tensor, right: Tensor) -> float:
    """The largest relative error of a token; infinite where one of the two alone is not finite.

    fp16 ends at 65,504: a token on which both overflow says nothing.
    """
    says_something = found.isfinite().all(dim=-1) | right.isfinite().all(dim=-1)
    found, right = found[says_something].float(), right[says_something].float()
    if not says_something.any():
        return float("inf")
    error = ((found - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)).max()
    return float(error) if error.isfinite() else float("inf")
