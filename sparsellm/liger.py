"""Liger's Triton kernels for `runtime.loss` and `runtime.norm`: the check that they can run, and
RMSNorm as operators.

torch.compile calls an operator as it is; Liger's own autograd function would have its launches
traced into the graph. Shapes: M tokens, K hidden_size.
"""

from __future__ import annotations

import importlib
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.paths import how_to_install


def check_liger(key: str) -> None:
    """Checks that Liger's kernels can run for a recipe key such as ``runtime.loss``.

    Raises:
        ValueError: there is no CUDA device, or Liger is not installed.
    """
    if not torch.cuda.is_available():
        raise ValueError(f"{key}: liger needs a CUDA device; set {key}=torch")
    try:
        importlib.import_module("liger_kernel.ops")
    except ImportError as error:
        raise ValueError(
            f"{key}: liger needs `{how_to_install('liger')}`; or set {key}=torch"
        ) from error


def use_liger_norm(norm: nn.Module) -> None:
    """Replaces the forward of a Hugging Face `LlamaRMSNorm`, in place."""
    norm.forward = MethodType(_norm_forward, norm)


def _norm_forward(norm: Any, hidden_states: Tensor) -> Tensor:
    x_MK = hidden_states.reshape(-1, hidden_states.shape[-1]).contiguous()
    y_MK, _ = liger_rms_norm(x_MK, norm.weight, norm.variance_epsilon)
    return y_MK.view(hidden_states.shape)


@torch.library.custom_op("sparsellm::liger_rms_norm", mutates_args=(), device_types="cuda")
def liger_rms_norm(x_MK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``x / rms(x) * weight`` in the type of x, and ``1 / rms(x)`` (M,) in fp32, without gradient.

    Unlike Hugging Face's norm, whose result is fp32 where the weight is, it rounds to the type of
    x, as autocast does with that result in the next matrix product.
    """
    from liger_kernel.ops.rms_norm import rms_norm_forward

    y_MK, _, inverse_rms_M, *_ = rms_norm_forward(x_MK, weight_K, eps, 0.0, "llama", None)
    return y_MK, inverse_rms_M


@liger_rms_norm.register_fake
def _(x_MK: Tensor, weight_K: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x_MK), x_MK.new_empty(x_MK.shape[0], dtype=torch.float32)


@torch.library.custom_op(
    "sparsellm::liger_rms_norm_backward", mutates_args=("dy_MK",), device_types="cuda"
)
def liger_rms_norm_backward(
    dy_MK: Tensor, x_MK: Tensor, weight_K: Tensor, inverse_rms_M: Tensor
) -> Tensor:
    """Overwrites dy with the gradient of x; returns that of the weight."""
    from liger_kernel.ops.rms_norm import _CASTING_MODE_LLAMA, rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    block_size, num_warps = calculate_settings(x_MK.shape[1])
    _, d_weight_K = rms_norm_backward(
        dy_MK,
        x_MK,
        weight_K,
        inverse_rms_M,
        0.0,
        _CASTING_MODE_LLAMA.value,
        block_size,
        num_warps,
        in_place=True,
        row_mode=None,
    )
    return d_weight_K  # type: ignore[no-any-return]


@liger_rms_norm_backward.register_fake
def _(dy_MK: Tensor, x_MK: Tensor, weight_K: Tensor, inverse_rms_M: Tensor) -> Tensor:
    return torch.empty_like(weight_K)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x_MK, weight_K, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x_MK, weight_K, output[1])


def _gradients(ctx: Any, dy_MK: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor, None]:
    dx_MK = dy_MK.clone(memory_format=torch.contiguous_format)
    d_weight_K = liger_rms_norm_backward(dx_MK, *ctx.saved_tensors)
    return dx_MK, d_weight_K, None


liger_rms_norm.register_autograd(_gradients, setup_context=_save)
