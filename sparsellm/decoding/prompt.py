"""Attention within the prompts, which fills the cache.

transformers' own forward of a model gives the same, but calls about twice as many operators; the
first token of a short prompt takes as long as queueing them.

Shapes: M sequences; T tokens of each prompt, R = M · T in all; H heads and G heads of keys, of D
numbers each; P positions of the cache.
"""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.decoding import token_kernels
from sparsellm.decoding.kv_cache import LayerCache, Positions
from sparsellm.decoding.token_math import Heads


class Prompt:
    """Where the tokens of the prompts are.

    Args:
        shape: M and T.
        after: where the tokens after the prompts are.
        is_padded: whether some prompt has padding, on its left.
    """

    def __init__(self, shape: torch.Size, after: Positions, *, is_padded: bool) -> None:
        self.m, self.t = shape
        self._after = after
        self._first_M = after.first_M if is_padded else None
        self._masks: dict[int, Tensor] = {}  # by window

    def attend(
        self, q_RN: Tensor, k_RN: Tensor, v_RN: Tensor, heads: Heads, cache: LayerCache
    ) -> Tensor:
        """Writes keys and values to a layer's cache; returns the attention, (R, H · D).

        Queries and keys are overwritten.
        """
        q = q_RN.view(self.m, self.t, -1, heads.size)
        keys, values = (memory[:, :, : self.t] for memory in cache)
        if token_kernels.computes(q_RN, heads):
            token_kernels.rotate_prompts(
                q_RN, k_RN, v_RN, self.t, heads, cache, self._first_M, self._after
            )
        else:
            k, v = (x_RN.view(self.m, self.t, -1, heads.size) for x_RN in (k_RN, v_RN))
            if heads.rotates:
                self._rotate(q, q)
                self._rotate(k, keys.transpose(1, 2))
            else:
                keys.copy_(k.transpose(1, 2))
            values.copy_(v.transpose(1, 2))
        mask = self._mask(heads.window)
        groups = heads.num // heads.num_keys
        if mask is not None and groups > 1:
            # On a GPU, torch's fast kernels have no groups of heads beside a mask.
            keys, values = (x.repeat_interleave(groups, 1) for x in (keys, values))
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            keys,
            values,
            attn_mask=mask,
            is_causal=mask is None,
            scale=heads.scaling,
            enable_gqa=mask is None and groups > 1,
        )
        return y.transpose(1, 2).reshape(self.m * self.t, -1).contiguous()

    @functools.cached_property
    def _slot_T(self) -> Tensor:
        return torch.arange(self.t, device=self._after.slot.device)

    @functools.cached_property
    def _rotary(self) -> tuple[Tensor, Tensor]:
        """Cosines and sines, (M or 1, T, 1, D); see `_rotate` for the sines' signs."""
        cos_PD, sin_PD = self._after.cos_PD, self._after.sin_PD
        lower, upper = sin_PD.chunk(2, 1)
        sin_PD = torch.cat((-lower, upper), 1)
        if self._first_M is None:  # the same positions in all prompts
            cos_MTD, sin_MTD = cos_PD[None, : self.t], sin_PD[None, : self.t]
        else:
            position_MT = (self._slot_T - self._first_M[:, None]).clamp(min=0)
            cos_MTD, sin_MTD = cos_PD[position_MT], sin_PD[position_MT]
        return cos_MTD[:, :, None], sin_MTD[:, :, None]

    def _rotate(self, heads_MTHD: Tensor, out_MTHD: Tensor) -> None:
        """RoPE, rounded as transformers' Llama does it; overwrites ``heads_MTHD``."""
        cos_MT1D, sin_MT1D = self._rotary
        turned = heads_MTHD.roll(heads_MTHD.shape[-1] // 2, -1).mul_(sin_MT1D)
        torch.add(heads_MTHD.mul_(cos_MT1D), turned, out=out_MTHD)

    def _mask(self, window: int) -> Tensor | None:
        """Which positions a token attends to, bool; None: to itself and all before it."""
        if window >= self.t:
            window = 0
        if self._first_M is None and not window:
            return None
        if window not in self._masks:
            slot_1T, slot_T1 = self._slot_T[None], self._slot_T[:, None]
            visible = slot_1T <= slot_T1
            if window:
                visible &= slot_1T > slot_T1 - window
            if self._first_M is not None:
                # Padding sees itself, since a softmax over nothing is NaN.
                visible = visible & (slot_1T >= self._first_M[:, None, None])
                visible |= slot_1T == slot_T1
            self._masks[window] = visible.view(-1, 1, self.t, self.t)
        return self._masks[window]
