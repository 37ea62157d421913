"""The FFN on its sparsity pattern as a `torch.library` operator, for inference.

Shapes: M tokens, K hidden_size, N intermediate_size. On a CPU the operator is plain torch.
"""

from typing import Any

import torch
from torch import Tensor

from sparsellm.ffn.dispatch import Costs, Measured, by_handle
from sparsellm.ffn.operators import define
from sparsellm.ffn.quantised import E4M3, quantised_from
from sparsellm.ffn.reference import fatrelu_ffn
from sparsellm.ffn.types import ELEMENTS, MAX_NEURONS, MAX_TOKENS, FFNWeights


def _sparse_ffn(x_MK: Tensor, *arguments: Any) -> Tensor:
    gate_NK, up_NK, down_NK, *biases_and_formula, quantised_NK, scale_N, dispatch, token_M = (
        arguments
    )
    quantised = quantised_from(quantised_NK, scale_N)
    w = FFNWeights(gate_NK, up_NK, down_NK.t(), *biases_and_formula)
    w = w._replace(quantised=quantised, down_NK=down_NK)
    if x_MK.is_cuda:
        return _on_cuda(x_MK, w, dispatch, token_M)
    _check(x_MK, w, x_MK.dtype, token_M)
    return fatrelu_ffn(x_MK, w)


def _on_cuda(x_MK: Tensor, w: FFNWeights, dispatch: int, token_M: Tensor | None) -> Tensor:
    dtype = x_MK.dtype if x_MK.dtype in ELEMENTS else torch.bfloat16
    _check(x_MK, w, dtype, token_M)
    if x_MK.shape[0] == 0:
        return torch.empty_like(x_MK)
    if x_MK.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x_MK.device):
            return _run(x_MK, w, dispatch, token_M)
    return _run(x_MK, w, dispatch, token_M)


def _run(x_MK: Tensor, w: FFNWeights, dispatch: int, token_M: Tensor | None) -> Tensor:
    from sparsellm.ffn.kernels import inference

    chooser = by_handle(dispatch)
    if chooser is None:
        return inference.sparse(x_MK, w, 0, token_M)
    (m, k), n, gated = x_MK.shape, w.up_NK.shape[0], w.gate_NK is not None

    def costs() -> Costs:
        from sparsellm.ffn.costs import costs_of

        device_index, fp8 = x_MK.get_device(), w.quantised is not None
        return costs_of(Measured(m, k, n, gated, chooser.format, device_index, x_MK.dtype, fp8))

    path = chooser.choose(m, costs, frozen=torch.cuda.is_current_stream_capturing())
    if path == "dense":
        return inference.dense_ffn(x_MK, w)
    return inference.sparse(x_MK, w, chooser.word(m), token_M, chooser.format)


define(
    "sparse_ffn",
    "(Tensor x_MK, Tensor? w_gate_NK, Tensor w_up_NK, Tensor w_down_NK, Tensor? b_gate_N, "
    "Tensor? b_up_N, Tensor? b_down_K, float threshold, bool relu_up, str activation, "
    "Tensor? quantised_NK, Tensor? quantised_scale_N, int dispatch, Tensor? token_M) -> Tensor",
    _sparse_ffn,
    lambda x_MK, *_: torch.empty_like(x_MK),
)


def sparse_ffn(
    x_MK: Tensor, w: FFNWeights, dispatch: int = 0, token_M: Tensor | None = None
) -> Tensor:
    """`reference.fatrelu_ffn`, computed only for the active neurons.

    Args:
        x_MK: bf16 or fp16 and contiguous, like all tensors here; on a GPU of compute capability 8.0
            or newer.
        w: the FFN. Of W_d only the transpose is read.
        dispatch: `Dispatch.handle`; 0 always uses the sparse kernels.
        token_M: the order in which the sparse kernels process the tokens, (M,) int32, see
            `TokenOrder`; None is the order of x. It changes only the time and the order of sums.

    Returns:
        y of (M, K).

    Raises:
        ValueError: shapes, types, devices or layouts that do not fit, by name.
    """
    if w.down_NK is None:
        raise ValueError("sparse_ffn: W_d transposed is missing")
    # Only compilers need the operator; in eager mode its dispatch costs as much as a decoding step.
    if type(x_MK) is Tensor and x_MK.is_cuda and not torch.compiler.is_compiling():
        return _on_cuda(x_MK, w, dispatch, token_M)
    y_MK: Tensor = torch.ops.sparsellm.sparse_ffn(
        x_MK, *w[:2], w.down_NK, *w[3:9], *(w.quantised or (None, None)), dispatch, token_M
    )
    return y_MK


def beyond_limits(k: int, n: int) -> str | None:
    """Why the operator does not support a hidden_size and intermediate_size, or None."""
    if k % 8 or n % 8 or not 0 < n <= MAX_NEURONS or k == 0:
        return (
            f"hidden_size {k} and intermediate_size {n} must be multiples of 8, and the latter at "
            f"most {MAX_NEURONS:,}"
        )
    return None


def _check(x_MK: Tensor, w: FFNWeights, dtype: torch.dtype, token_M: Tensor | None) -> None:
    sizes = check_tensors(x_MK, w, dtype, token_M, as_kernels_read=True)
    check_limits(*sizes, remedy="use the dense FFN")
    if w.relu_up and w.gate_NK is None:
        raise ValueError("sparse_ffn: relu_up requires an FFN with a gate")
    if not w.threshold >= 0:
        raise ValueError(f"sparse_ffn: threshold {w.threshold} must not be negative")


def check_limits(m: int, k: int, n: int, remedy: str) -> None:
    """Raises ValueError if the kernels cannot take an FFN of this size, or so many tokens."""
    if reason := beyond_limits(k, n):
        raise ValueError(f"sparse_ffn: {reason}; {remedy}")
    if m > MAX_TOKENS:
        raise ValueError(f"sparse_ffn: {m:,} tokens are more than {MAX_TOKENS:,}; split the batch")


def check_tensors(
    x_MK: Tensor,
    w: FFNWeights,
    dtype: torch.dtype,
    token_M: Tensor | None,
    *,
    as_kernels_read: bool,
) -> tuple[int, int, int]:
    """M, K and N of an FFN whose matrices and biases are of type ``dtype``.

    ``as_kernels_read``: x must be of this type too, and all tensors contiguous; of W_d its
    transpose is read.

    Raises:
        ValueError: a tensor has another shape, type, device or layout, by name.
    """
    if x_MK.ndim != 2 or w.first[0].ndim != 2:
        raise ValueError(f"sparse_ffn: x {tuple(x_MK.shape)} must be (tokens, hidden_size)")
    m, (n, k), device = len(x_MK), w.first[0].shape, x_MK.device
    if x_MK.shape[1] != k:
        raise ValueError(f"sparse_ffn: x has {x_MK.shape[1]} features, and the FFN takes {k}")
    for name, tensor, shape, expected in (
        ("x", x_MK if as_kernels_read else None, (m, k), dtype),
        ("W_g", w.gate_NK, (n, k), dtype),
        ("W_u", w.up_NK, (n, k), dtype),
        ("W_d transposed", w.down_NK, (n, k), dtype),
        ("W_d", w.down_KN, (k, n), dtype),
        ("b_g", w.b_gate_N, (n,), dtype),
        ("b_u", w.b_up_N, (n,), dtype),
        ("b_d", w.b_down_K, (k,), dtype),
        ("the order", token_M, (m,), torch.int32),
    ):
        if tensor is None:
            continue
        if tensor.shape != shape:
            raise ValueError(f"sparse_ffn: {name} is {tuple(tensor.shape)} but must be {shape}")
        # In FP8 the 16-bit matrix may be gone; its quantised rows stand in its place.
        in_fp8 = w.quantised is not None and tensor is w.first[0] and tensor.dtype == E4M3
        if (tensor.dtype != expected and not in_fp8) or tensor.device != device:
            raise ValueError(
                f"sparse_ffn: {name} is {tensor.dtype} on {tensor.device}, "
                f"not {expected} on {device}"
            )
        # Kernels read W_d transposed; the matrix itself may lie in memory in any way.
        read = as_kernels_read and tensor is not w.down_KN
        if (read or tensor is token_M) and not tensor.is_contiguous():
            raise ValueError(f"sparse_ffn: {name} is not contiguous; call .contiguous() on it")
    return m, k, n
