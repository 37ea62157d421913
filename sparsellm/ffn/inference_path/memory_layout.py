"""How the weights of a model that infers are kept, so that a GPU holds them once.

The memory of W_d becomes that of its transpose, which the kernels read. Its values, its shape and
the parameter itself stay the same; only the strides differ. `Module.to`, `copy.deepcopy` and
``torch.save`` keep the strides.

Weights that are read in e4m3 alone go to the CPU, where they are saved from. They come back when
they are needed: for a gradient, in another type, and by `restore`.

Shapes: K hidden_size, N intermediate_size.
"""

import torch
from torch import Tensor


def transposed_in_place(weight_KN: Tensor) -> Tensor:
    """(N, K) contiguous, a view of the weight, whose memory is laid out anew if it has to be.

    Where that cannot be done, in a compiled graph or a CUDA graph, it is a copy.
    """
    weight_NK = weight_KN.t()
    if weight_NK.is_contiguous():
        return weight_NK
    if torch.compiler.is_compiling() or (
        weight_KN.is_cuda and torch.cuda.is_current_stream_capturing()
    ):
        return weight_NK.contiguous()
    with _as(weight_KN):
        weight_KN.data = weight_NK.detach().contiguous().t()
    return weight_KN.t()


def restore_layout(weight_KN: Tensor) -> None:
    """Makes a weight contiguous again, as `nn.Linear` has it."""
    with _as(weight_KN):
        weight_KN.data = weight_KN.detach().contiguous()


def move(weight: Tensor, device: torch.device) -> None:
    """Moves a parameter, which stays the same object."""
    if weight.device != device:
        with _as(weight):
            weight.data = weight.detach().to(device)


def _as(weight: Tensor) -> torch.inference_mode:
    """A parameter takes only data of its own kind: made in inference mode, or not."""
    return torch.inference_mode(weight.is_inference())
