"""What the micro-batches of an optimizer step share on the sparse path, computed once per step.

The kernels read weights in bf16, and W_d transposed. Without sharing, every forward and backward
pass of every micro-batch would cast and transpose fp32 parameters. Gradients would be written to
memory, and read again to be added up; here the kernels add them to the step's sums.

Cost without sharing (2B, 65,536 tokens per step in micro-batches of 4 × 2048, one H200): transposes
32 ms, casts 22 ms and additions 46 ms of a step of 1,130 ms (attention's weights included).
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from sparsellm.ffn.fp8 import quantise_into
from sparsellm.ffn.quantised import QuantisedRows, empty_rows
from sparsellm.ffn.types import FFNWeights


@dataclass
class Fills:
    """Returns memory at once, and fills all of it when `fill` is called.

    It casts many tensors by one call, zeroes many by another, then quantises. At the beginning of a
    step every layer needs its weights in bf16 and its gradients at zero: with one call per tensor
    the host took 1.3 ms, with the GPU waiting (recipe small: 5 layers, one H200).
    """

    casts: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # target, source
    zeros: list[Tensor] = field(default_factory=list)
    quantisations: list[tuple[QuantisedRows, Tensor]] = field(default_factory=list)  # alike

    def cast(self, source: Tensor, dtype: torch.dtype) -> Tensor:
        """``source`` in ``dtype`` and contiguous; if it is both already, ``source`` detached."""
        if source.dtype == dtype and source.is_contiguous():
            return source.detach()
        target = torch.empty_like(source, dtype=dtype, memory_format=torch.contiguous_format)
        self.casts.append((target, source.detach()))
        return target

    def quantised(self, source: Tensor) -> QuantisedRows:
        """The rows of a matrix in e4m3. A matrix that `cast` returned is filled before that."""
        rows = empty_rows(source)
        self.quantisations.append((rows, source))
        return rows

    def zeros_like(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Zeros of the shape of ``tensor``, contiguous."""
        zeros = torch.empty_like(tensor, dtype=dtype, memory_format=torch.contiguous_format)
        self.zeros.append(zeros)
        return zeros

    @torch.no_grad()
    def fill(self) -> None:
        """Fills what has been returned; called once."""
        if self.casts:
            targets, sources = zip(*self.casts, strict=True)
            torch._foreach_copy_(targets, sources)
        if self.zeros:
            torch._foreach_zero_(self.zeros)
        for target, source in self.quantisations:
            quantise_into(target, source)


def kernel_weights(
    w: FFNWeights, dtype: torch.dtype, fills: Fills, *, fp8: bool = False
) -> FFNWeights:
    """``w`` with its matrices in ``dtype`` and contiguous; W_d is there only as its transpose.

    With ``fp8`` also the pattern's weight, quantised.
    """
    gate_NK = None if w.gate_NK is None else fills.cast(w.gate_NK, dtype)
    up_NK, down_NK = fills.cast(w.up_NK, dtype), transposed(w.down_KN, dtype)
    w = w._replace(gate_NK=gate_NK, up_NK=up_NK, down_KN=down_NK.t(), down_NK=down_NK)
    return w._replace(quantised=fills.quantised(w.first[0])) if fp8 else w


def transposed(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """The transpose of a matrix, contiguous and in ``dtype``."""
    if matrix.is_cuda:
        from sparsellm.ffn.kernels import transpose

        with torch.cuda.device(matrix.get_device()):
            return transpose.transposed(matrix, dtype)
    return matrix.t().to(dtype).contiguous()


def add_to_gradient(parameter: Tensor, total: Tensor) -> None:
    """Adds a sum to the parameter's gradient, unless the sum is in the gradient's own memory.

    The sum may be elsewhere: DDP rebuilds its buckets in the forward pass after its first backward
    pass, and so moves the gradients, which are still zero then.
    """
    if parameter.grad is None:
        parameter.grad = total
    elif parameter.grad.data_ptr() != total.data_ptr():
        parameter.grad.add_(total)


def summable(parameter: Tensor) -> bool:
    """Whether micro-batches may add the gradient up outside autograd, in fp32."""
    return (
        parameter.dtype == torch.float32 and parameter.requires_grad and parameter.is_contiguous()
    )


def gradient_memory(parameter: Tensor, fills: Fills) -> Tensor:
    """The memory of the parameter's own gradient, in which micro-batches are added up.

    It is a tensor with its own storage. DDP's gradients are views of a few buckets, and a compiled
    graph that modifies several views of one storage takes the whole storage as its argument: an
    error while compiling in torch 2.13, an illegal memory access in torch 2.11. Also, once one
    layer had added to its part, autograd would consider the other layers' parts overwritten.
    """
    assert isinstance(parameter, nn.Parameter)
    if parameter.grad is None:
        parameter.grad = fills.zeros_like(parameter)
    return torch.from_dlpack(parameter.grad)
