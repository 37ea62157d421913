"""Measures what an FFN costs, dense and sparse: its forward, and in training both passes.

Shapes: M tokens, K hidden_size, N intermediate_size; everything contiguous, on one GPU.
"""

import statistics
from collections import OrderedDict
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsellm.ffn.dispatch import Costs, Measured, bucket_of
from sparsellm.ffn.formats import ELL_WIDTH, backup_rows_for
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.kernels import hybrid, inference, union_training
from sparsellm.ffn.kernels.transpose import transposed
from sparsellm.ffn.reference import dense_ffn
from sparsellm.ffn.shared_linear import SharedLinear, fp8_weight
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    MAX_DECODE_TOKENS,
    BackwardInputs,
    FFNStats,
    FFNWeights,
    MatrixGradients,
    Room,
)

# Costs assumed at inference if there is too little memory to measure: those of an H200 at M 16384,
# K 2048, N 5632, in units of the dense cost. TwELL: 8 KB per non-zero at 8 TB/s.
_ASSUMED_FIXED, _ASSUMED_PER_SHARE, _ASSUMED_PER_TOKEN_SHARE = 0.35, 1.1, 55.0
_LARGEST_MEASURED = 16  # 65,536 tokens; costs are proportional beyond
_MAX_COPIES = 6
Layers = tuple[nn.Linear | None, nn.Linear, nn.Linear]  # gate, up, down
# A normally distributed gate exceeds the first number of standard deviations for one token in 32,
# and the second for one in 16: two and four tokens of a block. In real traces a column has 1.7 to
# 2.5 tokens, and 3.8 to 5.4 with sorted tokens.
_ACTIVE_ABOVE, _ACTIVE_ABOVE_IN_ORDER = 1.8627, 1.5341


def costs_of(call: Measured) -> Costs:
    """The costs of dense and sparse, measured at the call's order of magnitude of tokens."""
    largest = 1 << min(bucket_of(call.num_tokens), _LARGEST_MEASURED)
    return measure_costs(call._replace(num_tokens=largest))


@lru_cache(maxsize=256)
def measure_costs(call: Measured) -> Costs:
    """Times inference on random weights, dense and sparse, once per shape; waits for the GPU.

    A bias decides which neurons are active, for all tokens, so that sparse is timed at two known
    unions; its cost is linear in the union (the gate's GEMM, then work per member). The cost of
    TwELL is linear in the non-zeros of a token, which here equal the union and are few enough for
    its tiles.
    """
    if call.num_tokens <= MAX_DECODE_TOKENS:  # decoding uses no format
        call = call._replace(format="union")
    try:
        with torch.cuda.device(call.device_index):
            return _measure_costs(call)
    except torch.cuda.OutOfMemoryError:
        by_token = call.format == "twell"
        per_share = _ASSUMED_PER_TOKEN_SHARE if by_token else _ASSUMED_PER_SHARE
        return Costs(1.0, _ASSUMED_FIXED, per_share / call.n)


def _measure_costs(call: Measured) -> Costs:
    num_tokens, k, n, _, format, device_index, element, _ = call
    device = torch.device("cuda", device_index)
    generator = torch.Generator(device).manual_seed(0)
    matrix = partial(torch.randn, generator=generator, device=device, dtype=element)
    # As in a model, the gate's weights have left the cache when they are needed again.
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    x_MK, copies = matrix(num_tokens, k), min(-(-cache // (n * k)), _MAX_COPIES)
    ffns = [_random_weights(call, matrix) for _ in range(copies)]
    down_NKs = [transposed(w.down_KN, element) for w in ffns]
    ffns = [
        w._replace(down_KN=down_NK.t(), down_NK=down_NK)
        for w, down_NK in zip(ffns, down_NKs, strict=True)
    ]

    def sparse_at(union: int) -> float:
        sparse = partial(inference.sparse, x_MK, format=format)
        return median_ms([partial(sparse, w=_with_active(w, union, 1e4)) for w in ffns])

    low_union, high_union = (n // 8, n // 2) if format == "union" else (n // 256 + 1, n // 64 + 2)
    line = (sparse_at(low_union), low_union), (sparse_at(high_union), high_union)
    dense = median_ms([partial(inference.dense_ffn, x_MK, w) for w in ffns])
    return _costs(dense, *line)


def _random_weights(call: Measured, matrix: Callable[[int, int], Tensor]) -> FFNWeights:
    """Weights that ``matrix`` draws for a call's FFN."""
    k, n = call.k, call.n
    gate_NK = matrix(n, k) if call.gated else None
    w = FFNWeights(gate_NK, matrix(n, k), matrix(k, n))
    return w._replace(quantised=quantised_rows(w.first[0])) if call.fp8 else w


def _with_active(w: FFNWeights, num_active: int, bias: float) -> FFNWeights:
    """``w`` with this bias for so many evenly spaced neurons; all others are never active."""
    n = len(w.up_NK)
    bias_N = w.up_NK.new_full((n,), -1e4)
    bias_N[torch.arange(num_active, device=bias_N.device) * n // num_active] = bias
    return w._replace(b_up_N=bias_N) if w.gate_NK is None else w._replace(b_gate_N=bias_N)


def _costs(dense: float, low: tuple[float, float], high: tuple[float, float]) -> Costs:
    """Sparse costs are a line through two points: milliseconds, and how many neurons are active."""
    per_neuron = max(high[0] - low[0], 0.0) / (high[1] - low[1])
    return Costs(dense, low[0] - per_neuron * low[1], per_neuron)


def median_ms(calls: list[Callable[[], object]]) -> float:
    """Milliseconds per call on the GPU. Uses a CUDA graph, or small calls would measure the CPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles and loads
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    for turn in range(8):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn:  # the first one warms up
            times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)


@dataclass(frozen=True)
class LinearLayers:
    """The linear layers of a dense FFN (gate, up, down), without weights; equal if of one class.

    A host may have its own class of `nn.Linear`, such as one that computes in FP8.
    """

    classes: tuple[type, ...]
    layers: Layers = field(compare=False)

    @classmethod
    def like(cls, projections: Layers) -> Self:
        """Copies of them."""
        gate, up, down = projections
        layers = (gate and _without_weight(gate), _without_weight(up), _without_weight(down))
        return cls(tuple(map(type, layers)), layers)

    def with_weights(self, w: FFNWeights) -> Layers:
        """The layers, computing with the weights of ``w``."""
        gate, up, down = self.layers
        gate = gate and _with_weight(gate, w.gate_NK)
        return gate, _with_weight(up, w.up_NK), _with_weight(down, w.down_KN)


def _with_weight(layer: nn.Linear, weight: Tensor | None) -> nn.Linear:
    layer = copy(layer)
    layer._parameters = {"weight": None if weight is None else nn.Parameter(weight), "bias": None}
    return layer


def _without_weight(layer: nn.Linear) -> nn.Linear:
    if [name for name, _ in layer.named_parameters()] != ["weight"]:  # such as parametrizations
        return nn.Linear(1, 1, bias=False, device="meta")
    layer = _with_weight(layer, None)
    # Those of a host, such as of sharded parameters, need the layer itself.
    layer._forward_pre_hooks, layer._forward_hooks = OrderedDict(), OrderedDict()
    return layer


@lru_cache(maxsize=64)
def measure_training_costs(
    call: Measured, *, compiled: bool, ordered: bool, linears: LinearLayers | None = None
) -> Costs:
    """Times forward and backward on random weights, dense and sparse; waits for the GPU.

    Both include statistics and the L1 term, as in training; dense is compiled if ``compiled``. A
    bias keeps some neurons silent and lets each of the others be active for one token in 32, since
    the cost of the weights' gradients also depends on the tokens per column (`_ACTIVE_ABOVE`). With
    ``ordered``, sparse runs on sorted tokens, with as many tokens per column as are usual there.
    The cost of TwELL depends on the non-zeros of a token, and not on the order. With ``fp8`` both
    paths compute in FP8 what training computes in FP8.

    Args:
        call: shape of the FFN, and number of tokens.
        compiled, ordered: see above.
        linears: with which dense computes; None: with `SharedLinear`.
    """
    num_tokens, k, n, _, format, device_index, *_ = call
    device = torch.device("cuda", device_index)
    generator = torch.Generator(device).manual_seed(0)
    matrix = partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)
    x_MK, dy_MK = matrix(num_tokens, k), matrix(num_tokens, k)
    w = _random_weights(call, matrix)
    d_l1, blocks, order_M = torch.ones((), device=device), -(-num_tokens // BLOCK_TOKENS), None
    kernels: Any = hybrid if format == "twell" else union_training
    room = Room(backup_rows_for(num_tokens), ELL_WIDTH) if format == "twell" else Room(blocks * n)
    if ordered and format == "union":
        order_M = torch.randperm(num_tokens, generator=generator, device=device, dtype=torch.int32)

    # Costs are linear in the active neurons: two measurements determine the line.
    def sparse_at(num_active: int) -> tuple[float, float]:
        bias = -(_ACTIVE_ABOVE_IN_ORDER if ordered else _ACTIVE_ABOVE) * k**0.5
        biased = _with_active(w, num_active, bias)

        def step() -> FFNStats:
            weights = biased._replace(down_NK=transposed(w.down_KN, torch.bfloat16))
            _, stats, saved = kernels.forward(x_MK, weights, room, order_M)
            inputs = BackwardInputs(dy_MK, d_l1, x_MK, weights, saved, order_M)
            out = MatrixGradients.empty(weights, torch.bfloat16)
            kernels.backward(inputs, out, adds=False)
            transposed(out.down_NK, torch.bfloat16)
            return stats

        # Not how many were asked for, but how many there are: the cost is of those.
        stats = step()
        if format == "twell":
            return median_ms([step]), float(stats.nnz_M.float().mean())
        return median_ms([step]), int(stats.union_sum) / blocks

    with torch.cuda.device(device):
        layers = _shared_linears(w) if linears is None else linears.with_weights(w)
        dense = median_ms([_dense_step(x_MK, layers, dy_MK, d_l1, compiled)])
        with torch.no_grad():
            return _costs(dense, sparse_at(n // 16), sparse_at(n // 4))


def _shared_linears(w: FFNWeights) -> Layers:
    """As our own loop has them: in FP8 if ``w`` is."""
    fp8 = w.quantised is not None

    def linear(weight_NK: Tensor) -> SharedLinear:
        layer = SharedLinear(nn.Parameter(weight_NK), fp8=fp8)
        layer.ready = fp8_weight(weight_NK) if fp8 else None
        return layer

    gate = None if w.gate_NK is None else linear(w.gate_NK)
    return gate, linear(w.up_NK), linear(w.down_KN)


def _dense_step(
    x_MK: Tensor, layers: Layers, dy_MK: Tensor, d_l1: Tensor, compiled: bool
) -> Callable[[], object]:
    """A forward and backward pass of the dense FFN with these linear layers."""
    ffn = torch.compile(dense_ffn, dynamic=False) if compiled else dense_ffn
    x_MK = x_MK.detach().requires_grad_()
    inputs = [x_MK, *(layer.weight for layer in layers if layer is not None)]

    def step() -> None:
        y_MK, stats = ffn(x_MK, *layers)
        torch.autograd.grad((y_MK, stats.l1_sum), inputs, (dy_MK, d_l1.to(stats.l1_sum.dtype)))

    return step
