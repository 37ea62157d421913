"""Launches the kernels of a decoding step that are not the FFN's.

Shapes: M sequences, one token each; K hidden_size; H heads and G heads of keys, of D numbers each.
"""

import math

import torch
from torch import Tensor

from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.decoding.token_math import Heads, Linear
from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.types import MAX_DECODE_TOKENS

_NARROW_TOKENS = 8  # `decode_linear`; above it is `decode_linear_wide`
_MAX_MATRICES = 3
HEAD_SIZES = (16, 32, 64, 128, 256)
# Blocks of a multiprocessor, and the fewest positions of one of them, in `decode_attention`.
_BLOCKS, _MIN_POSITIONS = 4, 64


def residual_norm(h_MK: Tensor, y_MK: Tensor | None, weight_K: Tensor, epsilon: float) -> Tensor:
    """See `token_math.residual_norm`."""
    x_MK, (m, k) = torch.empty_like(h_MK), h_MK.shape
    kernel_for("residual_norm", h_MK).launch(
        m, h_MK=h_MK, y_MK=y_MK, weight_K=weight_K, k=k, epsilon=epsilon, x_MK=x_MK
    )
    return x_MK


def takes_linears(x_MK: Tensor, linears: tuple[Linear, ...]) -> bool:
    """Whether `linears` computes these."""
    (m, k), fp8 = x_MK.shape, linears[0].quantised is not None
    return (
        m <= MAX_DECODE_TOKENS
        and len(linears) <= _MAX_MATRICES
        and k % (16 if fp8 else 8) == 0
        and all((linear.quantised is not None) == fp8 for linear in linears)
        and all(linear.weight_NK.is_contiguous() for linear in linears)
    )


def linears(x_MK: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    """See `token_math.linears`."""
    m, k = x_MK.shape
    sizes = [len(linear.weight_NK) for linear in linears]
    y_MN = x_MK.new_empty(m, sum(sizes))
    name = "decode_linear" if m <= _NARROW_TOKENS else "decode_linear_wide"
    kernel = kernel_for(name, x_MK, fp8=linears[0].quantised is not None)
    grid = kernel.blocks_for(-(-sum(sizes) // 16))
    blocks = _division(grid, sizes)
    matrices: dict[str, object] = {}
    for i in range(_MAX_MATRICES):
        linear = linears[i] if i < len(linears) else None
        weight_NK, scale_N = (None, None) if linear is None else linear.stored
        matrices |= {f"w_{i}": weight_NK, f"scale_{i}": scale_N}
        matrices |= {f"bias_{i}": None if linear is None else linear.bias_N}
        matrices |= {f"n_{i}": 0 if linear is None else sizes[i]}
    kernel.launch(
        sum(blocks),
        x_MK=x_MK,
        m=m,
        k=k,
        blocks_0=blocks[0],
        blocks_1=blocks[1],
        y_MN=y_MN,
        **matrices,
    )
    return y_MN


def _division(grid: int, sizes: list[int]) -> tuple[int, int, int]:
    """How many blocks compute each matrix: in proportion to its rows, and at least one."""
    blocks = [max(round(grid * size / sum(sizes)), 1) for size in sizes]
    blocks[0] = max(blocks[0] + grid - sum(blocks), 1)
    first, second, third = (*blocks, 0, 0)[:_MAX_MATRICES]
    return first, second, third


def takes_heads(heads: Heads) -> bool:
    """Whether `attend` computes heads of this size."""
    return heads.size in HEAD_SIZES


def attend(qkv_MN: Tensor, heads: Heads, cache: LayerCache, at: Positions) -> Tensor:
    """See `token_math.attend`."""
    m, capacity = len(qkv_MN), cache.keys_MGPD.shape[2]
    kernel = kernel_for("decode_attention", qkv_MN)
    splits = min(
        -(-_BLOCKS * kernel.num_multiprocessors // (m * heads.num)),
        -(-capacity // _MIN_POSITIONS),
    )
    partial, finished = at.scratch_for(m * heads.num, splits, heads.size)
    cos_PD, sin_PD = (at.cos_PD, at.sin_PD) if heads.rotates else (None, None)
    y_MN = qkv_MN.new_empty(m, heads.num * heads.size)
    kernel.launch(
        m * heads.num * splits,
        qkv_MN=qkv_MN,
        keys=cache.keys_MGPD,
        values=cache.values_MGPD,
        cos_PD=cos_PD,
        sin_PD=sin_PD,
        position_M=at.position_M,
        first_M=at.first_M,
        slot_1=at.slot,
        q_norm_D=heads.q_norm_D,
        k_norm_D=heads.k_norm_D,
        epsilon=heads.epsilon,
        scale=heads.scaling / math.log(2),
        heads=heads.num,
        kv_heads=heads.num_keys,
        head_size=heads.size,
        capacity=capacity,
        window=heads.window,
        splits=splits,
        partial=partial,
        finished=finished,
        y_MN=y_MN,
    )
    return y_MN
