"""Sorts a micro-batch's tokens by their ids (``cuda/common/sort_tokens.cu``)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import launch_for, threads_of
from sparsellm.ffn.types import TokenOrder

_BLOCK_TOKENS = 128


def sort_tokens(id_M: Tensor, length: int, early: int, vocab_size: int) -> TokenOrder:
    """What `token_order.token_order` specifies.

    Args:
        id_M: int64 and contiguous, at least one, on a GPU.
        length: of a sequence.
        early: positions of a sequence that come first.
        vocab_size: ids are below it.
    """
    m, device = len(id_M), id_M.device
    blocks = -(-m // _BLOCK_TOKENS)
    padded = blocks * _BLOCK_TOKENS
    count = torch.zeros(vocab_size, dtype=torch.int32, device=device)
    key = torch.empty(padded, dtype=torch.int32, device=device)
    order = TokenOrder(
        torch.empty(m, dtype=torch.int32, device=device),
        torch.empty(m, dtype=torch.int64, device=device),
    )
    sizes = tuple(map(np.int32, (m, padded, length, early)))
    threads = threads_of("sort_tokens", id_M)
    for number, grid in enumerate((-(-m // threads), -(-padded // threads), blocks)):
        arguments = (np.int32(number), id_M, *sizes, count, key, *order)
        launch_for("sort_tokens", id_M, grid, *arguments)
    return order
