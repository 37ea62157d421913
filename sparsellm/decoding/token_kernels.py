"""Launches the kernels of decoding beside those of the FFN and the linear layers.

Shapes: M sequences, one token each; R tokens of prompts; K hidden_size; H heads and G heads of
keys, of D numbers each.
"""

import math

import torch
from torch import Tensor

from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.decoding.token_math import Heads
from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.compiler.gpu_architecture import has_kernels

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


def computes(x: Tensor, heads: Heads) -> bool:
    """Whether `attend` and `rotate_prompts` compute these heads."""
    return has_kernels(x) and heads.size in HEAD_SIZES


def attend(qkv_MN: Tensor, heads: Heads, cache: LayerCache, at: Positions) -> Tensor:
    """See `token_math.attend`."""
    m, capacity = len(qkv_MN), cache.keys_MGPD.shape[2]
    kernel = kernel_for("decode_attention", qkv_MN)
    # Few tokens would leave most multiprocessors idle: their positions are divided among blocks,
    # of which the last one to finish adds the parts up.
    splits = min(
        -(-_BLOCKS * kernel.num_multiprocessors // (m * heads.num)), -(-capacity // _MIN_POSITIONS)
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


def rotate_prompts(  # noqa: PLR0917
    q_RN: Tensor,
    k_RN: Tensor,
    v_RN: Tensor,
    num_tokens: int,
    heads: Heads,
    cache: LayerCache,
    first_M: Tensor | None,
    after: Positions,
) -> None:
    """See `prompt.Prompt.attend`; each argument's rows may be part of longer ones."""
    cos_PD, sin_PD = (after.cos_PD, after.sin_PD) if heads.rotates else (None, None)
    kernel_for("rotate_prompts", q_RN).launch(
        len(q_RN),
        q=q_RN,
        k=k_RN,
        v=v_RN,
        q_stride=q_RN.stride(0),
        k_stride=k_RN.stride(0),
        v_stride=v_RN.stride(0),
        keys=cache.keys_MGPD,
        values=cache.values_MGPD,
        cos_PD=cos_PD,
        sin_PD=sin_PD,
        first_M=first_M,
        tokens=num_tokens,
        heads=heads.num,
        kv_heads=heads.num_keys,
        head_size=heads.size,
        capacity=cache.keys_MGPD.shape[2],
    )
