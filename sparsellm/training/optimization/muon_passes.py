"""The two passes of Muon's step over all numbers of its matrices: before the products, and after.

On GPUs each is one launch of ``cuda/common/muon.cu`` for up to 64 matrices. It touches 14 bytes per
number before the products and 10 after them; PyTorch's operations touch 42 and 26, since each of
them reads and writes all numbers. On one H200 they take 9 ms of a step of 2b's matrices, which was
20 ms longer with PyTorch's. The results are the same to the bit (tests/gpu/test_muon.py).
"""

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.compiler.gpu_architecture import gpu_runs_kernels


def advance_momenta(
    momenta: list[Tensor],
    gradients: list[Tensor],
    directions: Sequence[Tensor | None],
    momentum: float,
    refused: Tensor,
) -> None:
    """``m ← m + (1 - momentum) (g - m)``, and Nesterov's direction ``g + momentum (m - g)``.

    Args:
        momenta: m of matrices of one shape; they change in place.
        gradients: g of each; they may be overwritten.
        directions: of each, bf16 and contiguous, which is filled; None: it is not needed.
        momentum: how much of m stays.
        refused: bool, (); where it is true, m stays, and is the direction, whatever g is.
    """
    if _kernels_take([*momenta, *gradients]):
        matrices = {"momenta": momenta, "gradients": gradients, "directions": directions}
        numbers = {"rate": 1 - momentum, "ahead": momentum}
        _launch("advance_momenta", momenta, matrices, refused=refused, **numbers)
        return
    for m, gradient in zip(momenta, gradients, strict=True):
        # A refused gradient may be NaN. Towards itself, the momentum does not move.
        torch.where(refused, m, gradient, out=gradient)
    torch._foreach_lerp_(momenta, gradients, 1 - momentum)
    for m, gradient, direction in zip(momenta, gradients, directions, strict=True):
        if direction is not None:
            direction.copy_(torch.lerp(gradient, m, momentum))


def add_updates(
    weights: list[Tensor], updates: Tensor, decay: float, factor: float, refused: Tensor
) -> None:
    """``w ← decay w + factor u``.

    Args:
        weights: w of matrices of one shape; they change in place.
        updates: u, bf16 and contiguous (matrices, rows, columns).
        decay, factor: of w and u.
        refused: bool, (); where it is true, w stays.
    """
    if _kernels_take(weights):
        matrices = {"weights": weights, "updates": list(updates)}
        numbers = {"decay": decay, "factor": factor}
        _launch("add_updates", weights, matrices, refused=refused, **numbers)
        return
    torch._foreach_mul_(weights, torch.where(refused, 1.0, decay))
    # It has a dimension, so that its product with bf16 is fp32.
    torch._foreach_add_(weights, list(updates * torch.where(refused, 0.0, factor).view(1)))


def _kernels_take(tensors: list[Tensor]) -> bool:
    """Whether they lie on a GPU that runs the kernels, in fp32 and without gaps."""
    return (
        tensors[0].numel() > 0  # a rank may have no rows of a sharded matrix
        and gpu_runs_kernels(tensors[0])
        and all(t.dtype == torch.float32 and t.is_contiguous() for t in tensors)
    )


def _launch(
    name: str, like: list[Tensor], matrices: Mapping[str, Sequence[Tensor | None]], **arguments: Any
) -> None:
    """Launches a kernel for all matrices, as many at a time as it takes.

    Their addresses are arguments, which a launch copies: nothing else is sent to the GPU.

    Args:
        name: of the kernel.
        like: one list of matrices of one size.
        matrices: all lists, by the names of the kernel's parameters.
        arguments: the others.
    """
    kernel, numel = kernel_for(name, like[0]), like[0].numel()
    most, blocks = kernel.exported("matrices"), -(-numel // kernel.exported("numbers"))
    for start in range(0, len(like), most):
        part = slice(start, start + most)
        addresses = {parameter: _addresses(those[part]) for parameter, those in matrices.items()}
        kernel.launch(blocks * len(like[part]), n=numel, **addresses, **arguments)


def _addresses(tensors: Sequence[Tensor | None]) -> bytes:
    return array("Q", [0 if t is None else t.data_ptr() for t in tensors]).tobytes()
