"""Measures what an FFN's forward and backward pass cost in training, dense and sparse.

Shapes: M tokens, K hidden_size, N intermediate_size; everything bf16 and contiguous.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.ffn.dispatch import Costs, Measured
from sparsellm.ffn.formats import ELL_WIDTH, backup_rows_for
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.kernels import hybrid, union_training
from sparsellm.ffn.kernels.inference import median_ms
from sparsellm.ffn.kernels.transpose import transposed
from sparsellm.ffn.reference import dense_ffn
from sparsellm.ffn.shared_linear import SharedLinear, fp8_weight
from sparsellm.ffn.types import BLOCK_TOKENS, FFNStats, FFNWeights, Room

# A normal gate is above so many standard deviations for one token in 32, and in token order for one
# in 16: two and four tokens of a block. In real traces a column has 1.7 to 2.5, and 3.8 to 5.4.
_FIRES_ABOVE, _FIRES_ABOVE_IN_ORDER = 1.8627, 1.5341


@functools.lru_cache(maxsize=64)
def measure_costs(call: Measured, *, compiled: bool, ordered: bool) -> Costs:
    """Times forward and backward on random weights, dense and sparse; waits for the GPU.

    Both include statistics and the L1 term, as in training; dense is compiled if ``compiled``. A
    bias keeps some neurons silent and lets each of the others fire for one token in 32, since the
    cost of the weights' gradients also depends on the tokens per column (`_FIRES_ABOVE`). With
    ``ordered``, sparse runs in a token order, with as many tokens per column as are usual there.
    The cost of TwELL depends on the non-zeros of a token, and not on the order. With ``fp8`` both
    sides compute in FP8 what training does.
    """
    num_tokens, k, n, gated, format, device_index, _, fp8 = call
    device = torch.device("cuda", device_index)
    generator = torch.Generator(device).manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    x_MK, dy_MK = matrix(num_tokens, k), matrix(num_tokens, k)
    gate_NK, up_NK, down_KN = matrix(n, k) if gated else None, matrix(n, k), matrix(k, n)
    w = FFNWeights(gate_NK, up_NK, down_KN)
    if fp8:
        w = w._replace(quantised=quantised_rows(up_NK if gate_NK is None else gate_NK))
    d_l1, blocks, order_M = torch.ones((), device=device), -(-num_tokens // BLOCK_TOKENS), None
    kernels: Any = hybrid if format == "twell" else union_training
    room = Room(backup_rows_for(num_tokens), ELL_WIDTH) if format == "twell" else Room(blocks * n)
    if ordered and format == "union":
        order_M = torch.randperm(num_tokens, generator=generator, device=device, dtype=torch.int32)

    def sparse_at(num_firing: int) -> tuple[float, float]:
        bias_N = torch.full((n,), -1e4, device=device, dtype=torch.bfloat16)
        firing = torch.arange(num_firing, device=device) * n // num_firing
        bias_N[firing] = -(_FIRES_ABOVE_IN_ORDER if ordered else _FIRES_ABOVE) * k**0.5
        biased = w._replace(b_gate_N=bias_N) if gated else w._replace(b_up_N=bias_N)

        def step() -> FFNStats:
            given = biased._replace(down_NK=transposed(down_KN, torch.bfloat16))
            _, stats, saved = kernels.forward(x_MK, given, room, order_M)
            kernels.backward(dy_MK, d_l1, x_MK, given, saved, torch.bfloat16, order_M)
            return stats

        stats = step()
        if format == "twell":
            return median_ms([step]), float(stats.nnz_M.float().mean())
        return median_ms([step]), int(stats.union_sum) / blocks

    with torch.cuda.device(device):
        dense = median_ms([_dense_step(x_MK, w, dy_MK, d_l1, compiled, fp8)])
        with torch.no_grad():
            (at_few, few), (at_many, many) = sparse_at(n // 16), sparse_at(n // 4)
    per_neuron = max(at_many - at_few, 0.0) / (many - few)
    return Costs(dense, at_few - per_neuron * few, per_neuron)


def _dense_step(  # noqa: PLR0917
    x_MK: Tensor, w: FFNWeights, dy_MK: Tensor, d_l1: Tensor, compiled: bool, fp8: bool
) -> Callable[[], object]:
    def linear(weight_NK: Tensor) -> SharedLinear:
        layer = SharedLinear(nn.Parameter(weight_NK), fp8=fp8)
        layer.quantised = fp8_weight(weight_NK) if fp8 else None
        return layer

    gate = None if w.gate_NK is None else linear(w.gate_NK)
    up, down = linear(w.up_NK), linear(w.down_KN)
    ffn = torch.compile(dense_ffn, dynamic=False) if compiled else dense_ffn
    x_MK = x_MK.detach().requires_grad_()
    inputs = [x_MK, *(layer.weight for layer in (gate, up, down) if layer is not None)]

    def step() -> None:
        y_MK, stats = ffn(x_MK, gate, up, down)
        torch.autograd.grad((y_MK, stats.l1_sum), inputs, (dy_MK, d_l1.to(stats.l1_sum.dtype)))

    return step
