"""What a decoding step computes beside the FFNs, in plain torch: the specification of the kernels.

Shapes: M sequences, one token each; K hidden_size; H heads and G heads of keys, of D numbers each;
P positions of the cache.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.quantised import linear_of_few, scaled_product
from sparsellm.ffn.types import MAX_DECODE_TOKENS, Linear


class Heads(NamedTuple):
    """The heads of an attention layer."""

    num: int
    num_keys: int  # heads of keys and values
    size: int
    scaling: float
    rotates: bool = True  # by RoPE
    window: int = 0  # attends to so many of the last positions; 0: to all
    q_norm_D: Tensor | None = None  # weights of an RMSNorm of each head
    k_norm_D: Tensor | None = None
    epsilon: float = 0.0  # of these


def rms_norm(h: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """RMSNorm, rounded as transformers' Llama does it."""
    of_h = h.float()
    of_h = of_h * torch.rsqrt(of_h.square().mean(-1, keepdim=True) + epsilon)
    return weight * of_h.to(h.dtype)


def residual_norm(h_MK: Tensor, y_MK: Tensor | None, weight_K: Tensor, epsilon: float) -> Tensor:
    """Adds y to h in place; returns the RMSNorm of the sum."""
    if y_MK is not None:
        h_MK += y_MK
    return rms_norm(h_MK, weight_K, epsilon)


def linears(x_MK: Tensor, linears: tuple[Linear, ...]) -> Tensor:
    """The results of layers that multiply the same x, side by side."""
    parts = products(x_MK, linears)
    return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


def products(x_MK: Tensor, linears: tuple[Linear, ...]) -> list[Tensor]:
    """The results of layers that multiply the same x; in FP8, more than a few x are quantised."""
    parts, rows = [], None
    for weight_NK, bias_N, quantised in linears:
        if quantised is None:
            y_MN = F.linear(x_MK, weight_NK, bias_N)
        elif len(x_MK) <= MAX_DECODE_TOKENS:
            y_MN = linear_of_few(x_MK, quantised, bias_N)
        else:
            rows = quantised_rows(x_MK) if rows is None else rows
            y_MN = scaled_product(rows, quantised, x_MK.dtype)
            y_MN = y_MN if bias_N is None else y_MN + bias_N
        parts.append(y_MN)
    return parts


def rotated(heads_MHD: Tensor, cos_M1D: Tensor, sin_M1D: Tensor) -> Tensor:
    """RoPE."""
    lower, upper = heads_MHD.chunk(2, -1)
    return heads_MHD * cos_M1D + torch.cat((-upper, lower), -1) * sin_M1D


def attend(qkv_MN: Tensor, heads: Heads, cache: LayerCache, at: Positions) -> Tensor:
    """Writes the new tokens' keys and values to the cache; returns their attention, (M, H · D).

    Args:
        qkv_MN: queries, keys and values side by side.
        heads: H, G and D, and what is done to them.
        cache: of the layer.
        at: where the new tokens are.
    """
    m, size = len(qkv_MN), heads.size
    nums = (heads.num, heads.num_keys, heads.num_keys)
    q, k, v = (
        part.view(m, -1, size) for part in qkv_MN.split([num * size for num in nums], dim=-1)
    )
    if heads.q_norm_D is not None and heads.k_norm_D is not None:
        q = rms_norm(q, heads.q_norm_D, heads.epsilon)
        k = rms_norm(k, heads.k_norm_D, heads.epsilon)
    if heads.rotates:
        cos_M1D, sin_M1D = at.cos_PD[at.position_M, None], at.sin_PD[at.position_M, None]
        q, k = rotated(q, cos_M1D, sin_M1D), rotated(k, cos_M1D, sin_M1D)
    # Into the cache first: a token attends to itself too.
    slot = at.slot.long()
    cache.keys_MGPD.index_copy_(2, slot, k[:, :, None])
    cache.values_MGPD.index_copy_(2, slot, v[:, :, None])
    position_P = torch.arange(cache.keys_MGPD.shape[2], device=slot.device)
    # The cache is longer than what has been written, and prompts may be padded on the left.
    first_M1 = at.first_M[:, None]
    if heads.window:
        first_M1 = first_M1.clamp(min=slot + 1 - heads.window)
    visible_MP = (position_P >= first_M1) & (position_P <= slot)
    y_MH1D = F.scaled_dot_product_attention(
        q[:, :, None],
        *cache,
        attn_mask=visible_MP[:, None, None],
        scale=heads.scaling,
        enable_gqa=heads.num != heads.num_keys,
    )
    return y_MH1D.reshape(m, -1)
