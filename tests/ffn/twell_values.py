"""The values that TwELL holds; for tests."""

import torch
from torch import Tensor


def unpack_twell(word: Tensor, num_neurons: int) -> tuple[Tensor, Tensor]:
    """The (M, N) values that TwELL holds, bf16, and (M, T) counts of all non-zeros."""
    m, _, width = word.shape
    count = word[:, :, 0].long()
    held = torch.arange(width - 1, device=word.device) < count[:, :, None]
    row, tile, slot = held.nonzero(as_tuple=True)
    stored = word[row, tile, slot + 1]
    gate_MN = torch.zeros(m, num_neurons, dtype=torch.bfloat16, device=word.device)
    value = (stored >> 16).to(torch.int16).view(torch.bfloat16)
    gate_MN[row, (stored & 0xFFFF).long()] = value
    return gate_MN, count
