"""The FFN of up to 64 tokens, whose time is that of reading the weights.

``cuda/common/decode_gate.cu`` reads the gate's weights, in FP8 8 bits each, and the rows of W_u
whose neurons fire, ``decode_down.cu`` the same neurons' rows of W_d; ``decode.cuh`` is their
interface.
M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS` and contiguous.
"""

import functools

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import kernel_for
from sparsellm.ffn.kernels.launch import Address, Kernel
from sparsellm.ffn.types import FFNWeights


def decode_ffn(x_MK: Tensor, w: FFNWeights, y_MK: Tensor, observed: int = 0) -> None:
    """``y`` ← ``reference.fatrelu_ffn(x, w)``, on the current stream.

    Quantised weights are what they stand for; x is not quantised.

    Args:
        x_MK: 1 to `MAX_DECODE_TOKENS` tokens.
        w: the FFN; of W_d its transpose is read.
        y_MK: what is filled.
        observed: address of an int32, pinned, for the number of neurons that any token fires; 0 for
            none.

    Raises:
        ValueError: K is not a multiple of 16, in FP8.
    """
    (m, k), n = x_MK.shape, w.up_NK.shape[0]
    if w.quantised is not None and k % 16:
        raise ValueError(f"decode_ffn: hidden_size {k} must be a multiple of 16 in FP8")
    first_NK, scale_N = (w.first[0], None) if w.quantised is None else w.quantised
    gate = kernel_for("decode_gate", x_MK, w.activation, fp8=scale_N is not None)
    down = kernel_for("decode_down", x_MK)
    sections, stride, neuron_at = _division(gate, n)
    padded = next(size for size in (8, 16, 32, 64) if m <= size)
    # One allocation: count, neuron and value of cuda/common/decode.cuh.
    value_at = neuron_at + 2 * sections * stride
    scratch = torch.empty(value_at + 2 * n * padded, dtype=torch.uint8, device=x_MK.device)
    count = scratch.data_ptr()
    sizes, listed = (m, n, k), tuple(Address(count + at) for at in (0, neuron_at, value_at))
    gate.launch(
        sections,
        *(x_MK, first_NK, w.first[1], *w.second, w.down_NK, *sizes),
        *(w.threshold, w.relu_up, stride, *listed, scale_N),
    )
    down.launch(
        -(-k // down.exported("columns")),
        *(w.down_NK, w.b_down_K, *sizes, sections, stride),
        *(*listed, y_MK, Address(observed)),
    )


@functools.lru_cache(maxsize=256)
def _division(gate: Kernel, num_neurons: int) -> tuple[int, int, int]:
    """Sections, stride and the bytes before `neuron`, see ``cuda/common/decode.cuh``."""
    most, longest = gate.exported("max_sections"), gate.exported("max_section")
    sections = min(max(gate.num_multiprocessors, -(-num_neurons // longest)), most, num_neurons)
    stride = -(-num_neurons // (16 * sections)) * 16
    return sections, stride, 4 * most
