"""Every kernel once or more, small: what test_sanitizer.py runs under compute-sanitizer.

``python -m tests.gpu.sanitized ARCHITECTURE`` runs the kernels of one. No GEMM of PyTorch's:
racecheck fails inside cuBLAS.
"""

import sys
from unittest import mock

import torch
from torch import Tensor

from sparsellm.decoding import token_kernels
from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.decoding.token_math import Heads
from sparsellm.ffn.formats import backup_rows_for
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.kernels import hybrid, inference, linear, transpose, twell, union
from sparsellm.ffn.kernels.compiler import compile
from sparsellm.ffn.kernels.compiler.gpu_architecture import ARCHITECTURES
from sparsellm.ffn.token_order import token_order
from sparsellm.ffn.training_path.training_ops import sparse_ffn_training
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    MAX_DECODE_TOKENS,
    BackwardInputs,
    FFNWeights,
    Linear,
    MatrixGradients,
    Room,
    TokenOrder,
)
from sparsellm.training.optimization import muon_passes
from tests.gpu.conditions import forced

DEVICE = "cuda"


def main(name: str) -> None:
    """Inference and training by an architecture's kernels, and the dense ones; all with tails."""
    torch.manual_seed(0)
    [architecture] = (a for a in ARCHITECTURES if a.name == name)
    with forced(name):
        run_all(fp8=architecture.makes_gate)  # otherwise FP8 is a GEMM of PyTorch's
    folders = {"common", architecture.folder}
    num_sources = sum(path.parent.name in folders for path in compile.sources().values())
    ran = compile.load.cache_info().currsize
    assert ran >= num_sources, f"{ran} kernels of {num_sources} ran"
    torch.cuda.synchronize()
    print("all kernels ran")


def run_all(*, fp8: bool) -> None:
    """Launches every kernel of the present architecture."""
    with mock.patch("torch.nn.functional.linear", product):
        infer()
        decode()
        step_muon()
        if fp8:
            infer_fp8(200, 272, 776)
        for shape in ((200, 264, 776), (65, 72, 264), (1100, 72, 40), (200, 72, 1032)):
            train(*shape)


def product(x_MK: Tensor, w_NK: Tensor, b_N: Tensor | None = None) -> Tensor:
    """A product without a GEMM, in three launches: the sanitizer slows each of them down."""
    y_MN = (x_MK[:, None].float() * w_NK.float()).sum(2)
    return (y_MN if b_N is None else y_MN + b_N).to(x_MK.dtype)


def matrix(*shape: int) -> Tensor:
    """Random."""
    return torch.randn(shape, device=DEVICE).bfloat16()


def infer() -> None:
    """Each kernel by itself, and decoding."""
    quantised_rows(matrix(200, 264))
    token_order(torch.arange(300, device=DEVICE).view(3, 100) % 7, 7)
    device = matrix(1).device
    for m, k, n in ((200, 264, 776), (65, 72, 264)):
        x_MK, w_NK, y_MK = matrix(m, k), matrix(n, k), matrix(m, k)
        b_N, b_K = matrix(n) - 20, matrix(k)
        columns = union.empty_union(x_MK, n)
        w = FFNWeights(w_NK, w_NK, w_NK.t(), b_N, b_N, b_K, down_NK=w_NK)
        union.gate_union(x_MK, w, columns)
        union.union_up(x_MK, w, columns)
        union.union_down(columns, w, y_MK)
        for shift in (0.0, 20.0):  # few fire, then so many that all overflow
            gate = twell.empty_twell(m, n, device)
            shifted = w._replace(b_gate_N=b_N + shift)
            twell.gate_twell(x_MK, shifted, gate)
            twell.twell_ffn(gate, x_MK, shifted, y_MK)
        inference.sparse(x_MK, w, 0, order_of(m).token_M)
        for tokens in (1, 9, MAX_DECODE_TOKENS):
            inference.decode_ffn(x_MK[:tokens], w, y_MK[:tokens])
        inference.dense_ffn(x_MK, w)


def infer_fp8(m: int, k: int, n: int) -> None:
    """The gate in e4m3, in both formats."""
    x_MK, w_NK = matrix(m, k), matrix(n, k)
    w = FFNWeights(w_NK, w_NK, w_NK.t(), matrix(n), quantised=quantised_rows(w_NK))
    union.gate_union(x_MK, w, union.empty_union(x_MK, n))
    twell.gate_twell(x_MK, w, twell.empty_twell(m, n, x_MK.device))


def decode() -> None:
    """The kernels of a decoding step that are not the FFN's; for few sequences and for more."""
    heads, capacity = Heads(4, 2, 32, 32**-0.5, True, 0, None, None, 1e-6), 70
    rotary = matrix(capacity, 32), matrix(capacity, 32)
    for m in (3, 20):
        x_MK, weights = matrix(m, 272), (matrix(40, 272), matrix(24, 272))
        for quantise in (lambda _: None, quantised_rows):
            layers = (Linear(w_NK, matrix(len(w_NK)), quantise(w_NK)) for w_NK in weights)
            linear.linears(x_MK, tuple(layers))
        token_kernels.residual_norm(x_MK, matrix(m, 272), matrix(272), 1e-5)
        first_M = torch.arange(m, device=DEVICE)
        cache = LayerCache(matrix(m, 2, capacity, 32), matrix(m, 2, capacity, 32))
        at = Positions(60 - first_M, first_M, 60, rotary)
        token_kernels.attend(matrix(m, 8 * 32), heads, cache, at)
        q, k, v = matrix(m * 60, 8 * 32).split((128, 64, 64), -1)
        token_kernels.rotate_prompts(q, k, v, 60, heads, cache, first_M.int(), at)


def step_muon() -> None:
    """Muon's passes, over a multiple of four numbers and others; its symmetric matrices."""
    transpose.mirror_strip(matrix(2, 200, 200), 24, 104)
    refused = torch.zeros((), dtype=torch.bool, device=DEVICE)
    for shape in ((60, 72), (65, 71)):
        weights, momenta, gradients = (list(torch.randn(3, *shape, device=DEVICE)) for _ in "123")
        directions = matrix(3, *shape)
        muon_passes.advance_momenta(momenta, gradients, [*directions[:2], None], 0.95, refused)
        muon_passes.add_updates(weights, directions, 0.99, -0.1, refused)


def order_of(m: int) -> TokenOrder:
    """The last token first."""
    row_M = torch.arange(m - 1, -1, -1, device=DEVICE)
    return TokenOrder(row_M.int(), row_M)


def train(m: int, k: int, n: int) -> None:
    """Forward and backward; few, half or all active, with room for them or not; in an order."""
    worst = -(-m // BLOCK_TOKENS) * n
    x_MK, dy_MK, other_NK, down_KN = matrix(m, k), matrix(m, k), matrix(n, k), matrix(k, n)
    for level, gated, dtype, capacity, order in (
        (-2.5, True, torch.bfloat16, worst, None),
        (-2.5, False, torch.float32, worst, order_of(m)),
        (-2.5, True, torch.float32, 5, order_of(m)),
        (-2.5, False, torch.bfloat16, 5, None),
        (0.0, True, torch.bfloat16, worst, order_of(m)),
        (100.0, False, torch.bfloat16, worst, None),
        (100.0, True, torch.bfloat16, worst, order_of(m)),
        (-100.0, True, torch.float32, 0, order_of(m)),
    ):
        first_NK = matrix(n, k)
        x_MK[:, -1], first_NK[:, -1] = 1, level * k**0.5
        weights = [first_NK if gated else None, other_NK if gated else first_NK, down_KN]
        leaves = [None if t is None else t.detach().to(dtype).requires_grad_() for t in weights]
        inputs = [x_MK.detach().requires_grad_(), *(t for t in leaves if t is not None)]
        w = FFNWeights(*weights, down_NK=down_KN.t().contiguous())
        _, _, saved = hybrid.forward(x_MK, w, Room(backup_rows_for(m), 32))
        d_l1 = torch.ones((), device=x_MK.device)
        out = MatrixGradients.empty(w, dtype)
        hybrid.backward(BackwardInputs(dy_MK, d_l1, x_MK, w, saved), out, adds=False)
        y_MK, stats = sparse_ffn_training(inputs[0], FFNWeights(*leaves), capacity, order)
        by_l1 = torch.ones_like(stats.l1_sum)
        torch.autograd.grad((y_MK, stats.l1_sum), inputs, (dy_MK, by_l1))


if __name__ == "__main__":
    main(sys.argv[1])
