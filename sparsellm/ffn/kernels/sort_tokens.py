"""Sorts a micro-batch's tokens by their ids (``cuda/common/sort_tokens.cu``)."""

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for
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
    count_ids, make_keys, rank_tokens = (
        kernel_for(name, id_M) for name in ("count_ids", "make_keys", "rank_tokens")
    )
    tokens_each = rank_tokens.exported("tokens")
    blocks = -(-m // tokens_each)
    padded = blocks * tokens_each
    count = torch.zeros(vocab_size, dtype=torch.int32, device=device)
    key = torch.empty(padded, dtype=torch.int32, device=device)
    order = TokenOrder(
        torch.empty(m, dtype=torch.int32, device=device),
        torch.empty(m, dtype=torch.int64, device=device),
    )
    # A key is the place of an id in the order. Each token is compared with all others, which for so
    # few is faster than a general sort.
    count_ids.launch(-(-m // count_ids.threads), id_M=id_M, m=m, count=count)
    grid = -(-padded // make_keys.threads)
    make_keys.launch(
        grid, id_M=id_M, m=m, padded=padded, length=length, early=early, count=count, key=key
    )
    rank_tokens.launch(
        blocks, key=key, m=m, padded=padded, token_M=order.token_M, row_M=order.row_M
    )
    return order
