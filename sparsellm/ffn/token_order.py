"""The order in which a micro-batch passes through the FFNs: like tokens together.

An FFN treats every token alone, and 64 like tokens fire far fewer neurons between them than 64
neighbours; that union is what the sparse kernels pay for. The key was chosen by measurement
(``sparsellm bench token-order``, benchmarks/LOG.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparsellm.ffn.types import TokenOrder

# A sequence's first tokens fire many more neurons than later ones, whatever they are.
EARLY_POSITIONS = 16

# Bits of the key: early or not, then these; 63 in all.
_FREQUENCY_BITS, _ID_BITS = 22, 20


def token_order(ids_BT: Tensor, vocab_size: int) -> TokenOrder:
    """Sorts the tokens of a micro-batch; on the device of the ids, without waiting for it.

    Early positions come first, then tokens by how often their id occurs in the micro-batch, by id,
    by the id before them, and by position: the same order for the same ids, every time.

    Args:
        ids_BT: token ids, int64, below ``vocab_size``.
        vocab_size: rows of the embedding.
    """
    num_tokens, length = ids_BT.numel(), ids_BT.shape[-1]
    id_M = ids_BT.reshape(-1)
    counts_V = id_M.new_zeros(vocab_size).scatter_add_(0, id_M, torch.ones_like(id_M))
    row_M = torch.arange(num_tokens, device=id_M.device)
    position_M = row_M % length
    before_M = torch.where(position_M > 0, id_M.roll(1) + 1, 0)
    key_M = (position_M >= EARLY_POSITIONS).long()
    key_M = key_M << _FREQUENCY_BITS | counts_V[id_M].clamp(max=2**_FREQUENCY_BITS - 1)
    key_M = key_M << _ID_BITS | id_M & (2**_ID_BITS - 1)
    key_M = key_M << _ID_BITS | before_M & (2**_ID_BITS - 1)
    token_M = key_M.sort(stable=True).indices
    return TokenOrder(token_M.int(), torch.empty_like(row_M).scatter_(0, token_M, row_M))


def in_order(x_MK: Tensor, order: TokenOrder) -> Tensor:
    """The rows of x in the order; its gradient comes back in that of the tokens.

    Rows are scattered, not gathered: a compiler then lets the kernel that makes x write them where
    they belong, and the gradient of a scatter is a gather, where that of a gather would be a sum.
    """
    return x_MK.new_empty(x_MK.shape).index_put((order.row_M,), x_MK)
