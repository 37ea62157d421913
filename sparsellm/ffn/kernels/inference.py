"""The FFN's forward on every path, and the measurement of their costs.

Shapes: M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS`,
contiguous, on one GPU.
"""

import functools
import statistics
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sparsellm.ffn.dispatch import Costs, Measured, bucket_of
from sparsellm.ffn.kernels import decode, twell, union
from sparsellm.ffn.kernels.dense import dense_ffn
from sparsellm.ffn.kernels.quantise import quantise_rows
from sparsellm.ffn.types import MAX_DECODE_TOKENS, FFNWeights, Format


def sparse(
    x_MK: Tensor,
    w: FFNWeights,
    observed: int = 0,
    token_M: Tensor | None = None,
    format: Format = "union",
) -> Tensor:
    """Computes y, (M, K), by the sparse kernels for this GPU and M.

    Args:
        x_MK: the tokens.
        w: the FFN; of W_d its transpose is read.
        observed: address of an int32 in pinned memory; the kernels write there how many neurons
            the tokens of a block fire between them on average (TwELL: how many a token fires). 0:
            nowhere.
        token_M: (M,) int32, the order in which tokens are divided into blocks; None is the natural
            one. TwELL has no blocks.
        format: in which the gate is stored; with up to 64 tokens it is not stored.
    """
    y_MK = torch.empty_like(x_MK)
    if x_MK.shape[0] <= MAX_DECODE_TOKENS:
        decode.decode_ffn(x_MK, w, y_MK, observed)
    elif format == "twell":
        _by_twell(x_MK, w, y_MK, observed)
    else:
        _by_union(x_MK, w, y_MK, observed, token_M)
    return y_MK


def _by_twell(x_MK: Tensor, w: FFNWeights, y_MK: Tensor, observed: int) -> None:
    gate = twell.empty_twell(x_MK.shape[0], w.up_NK.shape[0], x_MK.device)
    twell.gate_twell(x_MK, *w.first_multiplied, w.threshold, gate, w.activation)
    twell.twell_ffn(gate, x_MK, w, y_MK, observed)


def _by_union(
    x_MK: Tensor, w: FFNWeights, y_MK: Tensor, observed: int, token_M: Tensor | None
) -> None:
    splits = rows_M = None
    if token_M is not None:
        if union.gathers(x_MK):
            rows_M = token_M
        else:
            x_MK = x_MK.index_select(0, token_M)
        splits = union.allocate_splits(x_MK, w.up_NK.shape[0])
    gate = union.empty_union(
        x_MK.shape[0], w.up_NK.shape[0], x_MK.device, splits, element=x_MK.dtype
    )
    union.gate_union(
        x_MK,
        *w.first_multiplied,
        w.threshold,
        gate,
        observed,
        token_M=rows_M,
        activation=w.activation,
    )
    if w.gate_NK is not None:
        union.union_up(x_MK, w.up_NK, w.b_up_N, gate, relu_up=w.relu_up, token_M=rows_M)
    union.union_down(gate, w.down_NK, w.b_down_K, y_MK, token_M)


def costs_of(call: Measured) -> Costs:
    """The measured costs of dense and sparse at the order of magnitude of its tokens."""
    largest = 1 << min(bucket_of(call.num_tokens), _LARGEST_MEASURED)
    return measure_costs(call._replace(num_tokens=largest))


# Assumed if there is too little memory to measure: those of an H200 at M 16384, K 2048, N 5632, in
# units of dense. TwELL: 8 KB per non-zero at 8 TB/s.
_ASSUMED_FIXED, _ASSUMED_PER_SHARE, _ASSUMED_PER_TOKEN_SHARE = 0.35, 1.1, 55.0
_LARGEST_MEASURED = 16  # 65,536 tokens; costs are proportional beyond
_MAX_COPIES = 6


@functools.lru_cache(maxsize=256)
def measure_costs(call: Measured) -> Costs:
    """Times dense and sparse on random weights, once per shape and process; waits for the GPU.

    A bias decides which neurons fire, for all tokens, so that sparse is timed at two known unions;
    its cost is linear in the union (the gate's GEMM, then work per member). The cost of TwELL is
    linear in the non-zeros of a token, which here equal the union and are few enough for its tiles.
    """
    if call.num_tokens <= MAX_DECODE_TOKENS:  # decoding knows no format
        call = call._replace(format="union")
    try:
        with torch.cuda.device(call.device_index):
            return _measure_costs(call)
    except torch.cuda.OutOfMemoryError:
        by_token = call.format == "twell"
        per_share = _ASSUMED_PER_TOKEN_SHARE if by_token else _ASSUMED_PER_SHARE
        return Costs(1.0, _ASSUMED_FIXED, per_share / call.n)


def _measure_costs(call: Measured) -> Costs:
    num_tokens, k, n, gated, format, device_index, element, fp8 = call
    device = torch.device("cuda", device_index)
    generator = torch.Generator(device).manual_seed(0)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=element)

    # As in a model, the gate's weights have left the cache when they are needed again.
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    x_MK, copies = matrix(num_tokens, k), min(-(-cache // (n * k)), _MAX_COPIES)
    weights = [(matrix(n, k), matrix(n, k), matrix(k, n)) for _ in range(copies)]
    transposed = [down_KN.t().contiguous() for *_, down_KN in weights]
    quantised = [quantise_rows(gate if gated else up) if fp8 else None for gate, up, _ in weights]

    def ffn(copy: int, bias_N: Tensor | None) -> FFNWeights:
        gate_NK, up_NK, down_KN = weights[copy]
        w = FFNWeights(gate_NK, up_NK, down_KN, down_NK=transposed[copy])
        w = w._replace(quantised=quantised[copy])
        if gated:
            return w._replace(b_gate_N=bias_N)
        return w._replace(gate_NK=None, b_up_N=bias_N)

    def sparse_at(union: int) -> float:
        bias_N = torch.full((n,), -1e4, device=device, dtype=element)
        bias_N[torch.arange(union, device=device) * n // union] = 1e4
        return median_ms([partial(sparse, x_MK, ffn(i, bias_N), format=format) for i in each])

    each = range(copies)
    few, many = (n // 8, n // 2) if format == "union" else (n // 256 + 1, n // 64 + 2)
    at_few, at_many = sparse_at(few), sparse_at(many)
    all_dense = median_ms([partial(dense_ffn, x_MK, ffn(i, None)) for i in each])
    per_neuron = max(at_many - at_few, 0.0) / (many - few)
    return Costs(all_dense, at_few - per_neuron * few, per_neuron)


def median_ms(calls: list[Callable[[], object]], rounds: int = 7) -> float:
    """Milliseconds per call on the GPU. In a CUDA graph, or small calls would measure the CPU."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        calls[0]()  # compiles and loads
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        for call in calls:
            call()
    for turn in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        if turn >= 1:  # warm
            times.append(start.elapsed_time(end) / len(calls))
    return statistics.median(times)
