"""Every kernel once or more, small: what test_sanitizer.py runs under compute-sanitizer."""

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
        x_MK, down_KN = matrix(m, k), matrix(k, n)
        w = FFNWeights(
            matrix(n, k), matrix(n, k), down_KN, matrix(n) - 20, matrix(n), matrix(k), 0.0
        )
        down_NK, y_MK = down_KN.t().contiguous(), torch.empty_like(x_MK)
        paths = [portable]
        if torch.cuda.get_device_capability() == ffn.HOPPER:
            paths.append(union)
        for kernels in paths:
            gate = union.empty_union(m, n, device)
            assert w.gate_NK is not None
            kernels.gate_union(x_MK, w.gate_NK, w.b_gate_N, 0.0, gate)
            kernels.union_up(x_MK, w.up_NK, w.b_up_N, gate)
            kernels.union_down(gate, down_NK, w.b_down_K, y_MK)
        for tokens in (1, 9, MAX_TOKENS):
            decode_ffn(x_MK[:tokens], w, down_NK, y_MK[:tokens])
        dense.dense_ffn(x_MK, w)
    torch.cuda.synchronize()
    print("all kernels ran")


if __name__ == "__main__":
    main()
