"""The dense FFN by cuBLAS, with one kernel between its products; as fast as ``torch.compile``'s.

M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS` and contiguous.
"""

import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn.kernels.compile import kernel_for
from sparsellm.ffn.types import FFNWeights


def dense_ffn(x_MK: Tensor, w: FFNWeights) -> Tensor:
    """`reference.fatrelu_ffn`, to the type's rounding; y of (M, K)."""
    h_MN = F.linear(x_MK, w.up_NK, w.b_up_N)
    if w.gate_NK is None:
        relu_product(h_MN, None, w.threshold, h_MN, activation=w.activation)
    else:
        gate_MN = F.linear(x_MK, w.gate_NK, w.b_gate_N)
        relu_product(gate_MN, h_MN, w.threshold, h_MN, relu_up=w.relu_up, activation=w.activation)
    return F.linear(h_MN, w.down_KN, w.b_down_K)


def relu_product(
    gate_MN: Tensor,
    up_MN: Tensor | None,
    threshold: float,
    h_MN: Tensor,
    *,
    relu_up: bool = False,
    activation: str = "relu",
) -> None:
    """``h`` ← act(gate) * up, or act(gate); ``h`` may be one of them. N is a multiple of 8.

    With ``relu_up`` act(gate) * relu(up).
    """
    kernel = kernel_for("relu_product", h_MN, activation)
    octets = h_MN.numel() // kernel.exported("values")
    kernel.launch(-(-octets // kernel.threads), gate_MN, up_MN, h_MN, octets, threshold, relu_up)
