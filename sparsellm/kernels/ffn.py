"""One FFN forward by each of the ways that there are, and what they cost.

Shapes: M tokens, K hidden_size, N intermediate_size; everything bf16, contiguous, on one GPU.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from sparsellm.dispatch import Costs, bucket_of
from sparsellm.kernels import decode, portable, union
from sparsellm.kernels.dense import dense_ffn
from sparsellm.reference import FFNWeights

HOPPER = (9, 0)  # compute capability of wgmma and TMA multicast


def sparse(x_MK: Tensor, w: FFNWeights, down_NK: Tensor, observed: int = 0) -> Tensor:
    """By the sparse kernels for this GPU and M; y of (M, K).

    Args:
        x_MK: the tokens.
        w: the FFN; its W_d is not read.
        down_NK: W_d transposed, which is what the kernels read.
        observed: address of an int32, pinned, for the mean number of neurons that a block of
            tokens fires between them; 0 for none.
    """
    y_MK = torch.empty_like(x_MK)
    if x_MK.shape[0] <= decode.MAX_TOKENS:
        decode.decode_ffn(x_MK, w, down_NK, y_MK, observed)
        return y_MK
    kernels = union if torch.cuda.get_device_capability(x_MK.device) == HOPPER else portable
    gate = union.empty_union(x_MK.shape[0], w.up_NK.shape[0], x_MK.device)
    if w.gate_NK is None:
        kernels.gate_union(x_MK, w.up_NK, w.b_up_N, w.threshold, gate, observed)
    else:
        kernels.gate_union(x_MK, w.gate_NK, w.b_gate_N, w.threshold, gate, observed)
        kernels.union_up(x_MK, w.up_NK, w.b_up_N, gate)
    kernels.union_down(gate, down_NK, w.b_down_K, y_MK)
    return y_MK


def costs_of(num_tokens: int, k: int, n: int, gated: bool, device_index: int) -> Costs:
    """What dense and sparse take at this magnitude of M."""
    largest = 1 << min(bucket_of(num_tokens), _LARGEST_MEASURED)
    return measure_costs(largest, k, n, gated, device_index)


# Should there be no memory to measure with: H200, M 16384, K 2048, N 5632 in units of dense.
_ASSUMED_FIXED, _ASSUMED_PER_SHARE = 0.35, 1.1
_LARGEST_MEASURED = 16  # 65,536 tokens; costs are proportional beyond


@functools.lru_cache(maxsize=256)
def measure_costs(num_tokens: int, k: int, n: int, gated: bool, device_index: int) -> Costs:
    """Times dense and sparse on random weights, once a shape and process; waits for the GPU.

    A bias decides which neurons fire, so that the sparse side is timed at two known unions; its
    cost is linear in the union (the gate's GEMM, then work a member).
    """
    device = torch.device("cuda", device_index)
    try:
        with torch.cuda.device(device):
            return _measure_costs(num_tokens, k, n, gated, device)
    except torch.cuda.OutOfMemoryError:
        return Costs(1.0, _ASSUMED_FIXED, _ASSUMED_PER_SHARE / n)


def _measure_costs(num_tokens: int, k: int, n: int, gated: bool, device: torch.device) -> Costs:
    generator = torch.Generator(device).manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

    x_MK, up_NK, down_KN = matrix(num_tokens, k), matrix(n, k), matrix(k, n)
    gate_NK = matrix(n, k) if gated else None
    down_NK = down_KN.t().contiguous()
    sides: list[Callable[[], object]] = []
    unions = (n // 8, n // 2)
    for size in unions:
        b_N = torch.full((n,), -1e4, device=device, dtype=torch.bfloat16)
        b_N[torch.arange(size, device=device) * n // size] = 1e4
        b_gate_N, b_up_N = (b_N, None) if gated else (None, b_N)
        weights = FFNWeights(gate_NK, up_NK, down_KN, b_gate_N, b_up_N, None, 0.0)
        sides.append(functools.partial(sparse, x_MK, weights, down_NK))
    plain = FFNWeights(gate_NK, up_NK, down_KN, None, None, None, 0.0)
    sides.append(functools.partial(dense_ffn, x_MK, plain))
    few, many, all_dense = _medians(sides)
    per_neuron = max(many - few, 0.0) / (unions[1] - unions[0])
    return Costs(all_dense, few - per_neuron * unions[0], per_neuron)


def _medians(sides: list[Callable[[], object]], rounds: int = 7) -> list[float]:
    """Milliseconds of each, call by call in turn: a GPU slows down within seconds of load."""
    times: list[list[float]] = [[] for _ in sides]
    for turn in range(rounds + 2):
        for side, own in zip(sides, times, strict=True):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            side()
            end.record()
            end.synchronize()
            if turn >= 2:  # compiled and warm
                own.append(start.elapsed_time(end))
    return [statistics.median(own) for own in times]
