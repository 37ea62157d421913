"""Every kernel once or more, small: what test_sanitizer.py runs under compute-sanitizer.

No GEMM of PyTorch's: racecheck fails inside cuBLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.kernels import dense, ffn, portable, union
from sparsellm.kernels.decode import MAX_TOKENS, decode_ffn
from sparsellm.reference import FFNWeights


def main() -> None:
    """Hopper's kernels, the portable ones, decoding and the dense path, with tails everywhere."""
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, device=device).bfloat16()

    for m, k, n in ((200, 264, 776), (65, 72, 264)):
        x_MK, w_NK, gate_MN, y_MK = matrix(m, k), matrix(n, k), matrix(m, n) - 2, matrix(m, k)
        b_N, b_K = matrix(n) - 20, matrix(k)
        columns = union.empty_union(m, n, device)
        portable.pack_union(gate_MN, 0.0, columns)
        portable.union_up(x_MK, w_NK, b_N, columns)
        portable.union_down(columns, w_NK, b_K, y_MK)
        if torch.cuda.get_device_capability() == ffn.HOPPER:
            union.gate_union(x_MK, w_NK, b_N, 0.0, columns)
            union.union_up(x_MK, w_NK, b_N, columns)
            union.union_down(columns, w_NK, b_K, y_MK)
        w = FFNWeights(w_NK, w_NK, w_NK.t(), b_N, b_N, b_K, 0.0)
        for tokens in (1, 9, MAX_TOKENS):
            decode_ffn(x_MK[:tokens], w, w_NK, y_MK[:tokens])
        dense.relu_product(gate_MN, gate_MN, 0.0, gate_MN)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
