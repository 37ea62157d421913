"""Finds out what a module computes by running it, because names and classes do not tell.

Shapes: K hidden_size, N intermediate_size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsellm.architecture import Rectified, rectified_activations
from sparsellm.ffn.discover import Projections
from sparsellm.ffn.reference import fatrelu_ffn
from sparsellm.ffn.types import ELEMENTS, FFNWeights

# A forward may clamp what is large, or cut what is small; fp16 overflows.
_SCALES = {dtype: (0.1, 1.0, 10.0) for dtype in ELEMENTS} | {torch.float32: (1e-4, 1e-2, 1.0, 1e2)}
_TOKENS_PER_SCALE = 2
# Two orders of the same operations differ by under 0.5% in bf16, 0.1% in fp16 and 0.001% in fp32.
_TOLERANCE = {dtype: 2 * torch.finfo(dtype).eps for dtype in ELEMENTS} | {torch.float32: 2e-5}


class OtherFormula(ValueError):
    """A module computes something that the kernels do not support; the message says what."""


class Formula(NamedTuple):
    """``act(fatrelu(gate, threshold)) * up``, or with ``relu_up`` (dReLU) ``… * relu(up)``."""

    threshold: float
    relu_up: bool
    activation: str


def computed_by(activation: Callable[[Tensor], Any], like: Tensor) -> Formula | None:
    """The formula of an activation that is ``act(x) if x > t else 0``; None for any other one.

    Args:
        activation: of a foreign module.
        like: a tensor of the type and device to try it with.
    """
    for name, kernels in rectified_activations().items():
        threshold = _threshold_of(activation, kernels, like)
        if threshold is not None:
            return Formula(threshold, relu_up=False, activation=name)
    return None


def _threshold_of(
    activation: Callable[[Tensor], Any], known: Rectified, like: Tensor
) -> float | None:
    """The t of an activation that is ``act(x) if x > t else 0``; 0 for ReLU.

    Every finite value of the type of ``like`` is tried; of fp32 those of bf16, and all near t.
    """
    dtype = like.dtype if like.dtype in ELEMENTS else ELEMENTS[0]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cpu").view(dtype)
    device = "cpu" if like.is_meta else like.device
    x = every[every.isfinite()].to(like.dtype).to(device)
    threshold = _threshold_among(activation, known, x)
    if threshold and like.dtype not in ELEMENTS:
        next_up = x[x > threshold].min()
        bits = torch.stack([x.new_tensor(threshold), next_up]).float().view(torch.int32).tolist()
        near = torch.arange(bits[0], bits[1] + 1, dtype=torch.int32, device=device)
        threshold = _threshold_among(activation, known, near.view(torch.float32))
    return threshold


def _threshold_among(
    activation: Callable[[Tensor], Any], known: Rectified, x: Tensor
) -> float | None:
    try:
        with torch.no_grad():
            y = activation(x)
    except Exception:  # a foreign module may raise anything; its activation is then unknown
        return None
    if not isinstance(y, Tensor) or (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
        return None
    threshold = x[y == 0].max() if (y == 0).any() else x.min()
    # 0 first: small values may become zero in the activation itself, as the square of 1e-30 does.
    for candidate in (0.0, float(threshold)):
        right = known.value(torch.where(x <= candidate, 0, x))
        if threshold >= 0 and torch.equal(y, right):
            return candidate
    return None


def probe_tokens(k: int, like: Tensor) -> Tensor:
    """(2, tokens, K) of several magnitudes, each with its negative; torch's RNG is not used."""
    generator = torch.Generator("cpu").manual_seed(0)
    scales = _SCALES[like.dtype]
    tokens = [
        s * torch.randn(_TOKENS_PER_SCALE, k, generator=generator, device="cpu") for s in scales
    ]
    x_MK = torch.stack(tokens, dim=1)
    return torch.stack([x_MK, -x_MK]).flatten(1, 2).to(like)


@contextmanager
def in_fp32(ffn: Projections) -> Iterator[None]:
    """The matrices of an FFN compute with fp32 copies of their parameters.

    Raises:
        OtherFormula: these do not fit into memory.
    """
    own: list[dict[str, Any]] = [linear._parameters for linear in ffn.present]
    before = [dict(parameters) for parameters in own]
    try:
        for parameters in own:
            parameters |= {n: p if p is None else p.float() for n, p in parameters.items()}
        yield
    except torch.OutOfMemoryError as error:
        raise OtherFormula("there is no memory for an fp32 copy of its weights") from error
    finally:
        for parameters, previous in zip(own, before, strict=True):
            parameters.update(previous)


def find_formula(x: Tensor, y: object, known: list[FFNWeights]) -> Formula:
    """The formula by which an FFN computes ``y`` from ``x``.

    Args:
        x: (…, K), see `probe_tokens`.
        y: what the module's own forward returned.
        known: its weights, with each activation and threshold that it may have.

    Raises:
        OtherFormula: it is none of those that the kernels support.
    """
    if not isinstance(y, Tensor) or y.shape != x.shape:
        kind = f"{tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise OtherFormula(f"its forward returns {kind} for tokens of {tuple(x.shape)}")
    if not y.isfinite().all(dim=-1).any():
        raise OtherFormula(f"its forward overflows {y.dtype} on every random token")
    if not y.any():
        raise OtherFormula("its forward gives zero for every token that was tried")
    candidates = list(known)
    if known[0].gate_NK is not None:
        candidates += [w._replace(relu_up=True) for w in known]
    errors = [_error(y, fatrelu_ffn(x, candidate)) for candidate in candidates]
    best = min(range(len(errors)), key=errors.__getitem__)
    if errors[best] <= _TOLERANCE[x.dtype]:
        found = candidates[best]
        return Formula(found.threshold, found.relu_up, found.activation)
    formulas = " or ".join(_text_of(w) for w in candidates)
    raise OtherFormula(
        f"its forward does not compute {formulas}: on random tokens it differs by "
        f"{errors[best]:.2%}"
    )


def _text_of(w: FFNWeights) -> str:
    if w.gate_NK is None:
        return f"{w.activation}(up)"
    return f"{w.activation}(gate) * {'relu(up)' if w.relu_up else 'up'}"


def _error(found: Tensor, right: Tensor) -> float:
    """The largest relative error of a token; infinite where only one of the two is finite.

    fp16 ends at 65,504: a token on which both overflow says nothing.
    """
    says_something = found.isfinite().all(dim=-1) | right.isfinite().all(dim=-1)
    found, right = found[says_something].double(), right[says_something].double()
    if not says_something.any():
        return float("inf")
    error = ((found - right).norm(dim=-1) / right.norm(dim=-1).clamp_min(1e-30)).max()
    return float(error) if error.isfinite() else float("inf")
