"""Sorts a micro-batch's tokens by their ids (``cuda/common/sort_tokens.cu``)."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import exported_like, launch_for, threads_of
from sparsellm.ffn.types import TokenOrder


def sort_tokens(id_M: Tensor, length: int, early: int, vocab_size: int) -> TokenOrder:
    """What `token_order.token_order` specifies.

    Args:
        id_M: int64 and contiguous, at least one, on a GPU.
        length: of a sequence.
        early: positions of a sequence that come first.
        vocab_size: ids are below it.
    """
    m, device = len(id_M), id_M.device
    tokens_each = exported_like("rank_tokens", "tokens", id_M)
    blocks = -(-m // tokens_each)
    padded = blocks * tokens_each
    count = torch.zeros(vocab_size, dtype=torch.int32, device=device)
    key = torch.empty(padded, dtype=torch.int32, device=device)
    order = TokenOrder(
        torch.empty(m, dtype=torch.int32, device=device),
        torch.empty(m, dtype=torch.int64, device=device),
    )
    of_keys = (np.int32(m), np.int32(padded))
    launch_for(
        "count_ids", id_M, -(-m // threads_of("count_ids", id_M)), *(id_M, np.int32(m), count)
    )
    launch_for(
        "make_keys",
        id_M,
        -(-padded // threads_of("make_keys", id_M)),
        *(id_M, *of_keys, np.int32(length), np.int32(early), count, key),
    )
    launch_for("rank_tokens", id_M, blocks, *(key, *of_keys, *order))
    return order
