"""Token sorting: FFNs process the tokens of a micro-batch sorted, so that similar tokens are
adjacent.

An FFN computes each token independently. The union of the neurons active for 64 similar tokens
is far smaller than that of 64 neighbours in the text, and the cost of the sparse kernels is linear
in it. The sort key was chosen by measurement (benchmarks/LOG.md).
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from sparsellm.ffn.kernels.compiler.gpu_architecture import why_no_kernels
from sparsellm.ffn.types import TokenOrder

# Many more neurons are active for a sequence's first tokens than for later ones, whatever they are.
EARLY_POSITIONS = 16

# Bits of the key below the one for early positions, of 31 in all. Larger numbers lose bits, which
# makes the order a little worse.
_FREQUENCY_BITS, _ID_BITS = 13, 17
# Up to so many tokens the kernel, which compares each with all others, is faster than a sort.
_MAX_COMPARED = 32_768


def token_order(ids_BT: Tensor, vocab_size: int) -> TokenOrder:
    """Sorts the tokens of a micro-batch; on the device of the ids, without waiting for it.

    The key is: early positions first, then how often the id occurs in the micro-batch, then the id,
    then the position in the text. The same ids always give the same order.

    Args:
        ids_BT: token ids, int64, below ``vocab_size``.
        vocab_size: rows of the embedding.
    """
    id_M = ids_BT.reshape(-1)
    if _has_kernel(id_M):
        from sparsellm.ffn.kernels.sort_tokens import sort_tokens

        with torch.cuda.device(id_M.device):
            return sort_tokens(id_M, ids_BT.shape[-1], EARLY_POSITIONS, vocab_size)
    counts_V = id_M.new_zeros(vocab_size).scatter_add_(0, id_M, torch.ones_like(id_M))
    row_M = torch.arange(len(id_M), device=id_M.device)
    key_M = (row_M % ids_BT.shape[-1] >= EARLY_POSITIONS).int()
    key_M = key_M << _FREQUENCY_BITS | counts_V[id_M].clamp(max=2**_FREQUENCY_BITS - 1).int()
    key_M = key_M << _ID_BITS | (id_M & (2**_ID_BITS - 1)).int()
    token_M = key_M.sort(stable=True).indices
    return TokenOrder(token_M.int(), torch.empty_like(row_M).scatter_(0, token_M, row_M))


def _has_kernel(id_M: Tensor) -> bool:
    return (
        0 < len(id_M) <= _MAX_COMPARED
        and id_M.is_cuda
        and not torch.compiler.is_compiling()
        and id_M.dtype == torch.int64
        and why_no_kernels(id_M.device) is None
    )


def in_order(x_MK: Tensor, order: TokenOrder) -> Tensor:
    """The rows of x in the given order; its gradient is in the order of the tokens.

    The compiler can fuse a scatter into the kernel that computes x, so compiled code scatters rows.
    Without compilation they are gathered: PyTorch's kernel copies 16 bytes at a time then, where
    that of its scatter copies one number.

    Raises:
        ValueError: the order is of another number of tokens; compiled, the kernels check it.
    """
    if torch.compiler.is_compiling():
        return x_MK.new_empty(x_MK.shape).index_put((order.row_M,), x_MK)
    if len(order.token_M) != len(x_MK):
        shape, expected = tuple(order.token_M.shape), (len(x_MK),)
        raise ValueError(f"sparse_ffn: the order is {shape} but must be {expected}")
    return _InOrder.apply(x_MK, *order)


class _InOrder(torch.autograd.Function):
    """A gather whose gradient is a gather too: that of `index_select` would be a sum."""

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, token_M: Tensor, row_M: Tensor) -> Tensor:
        ctx.save_for_backward(row_M)
        return x_MK.index_select(0, token_M)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (row_M,) = ctx.saved_tensors
        return gradients[0].index_select(0, row_M), None, None


# Fewer tokens are not worth the sort and the permutation. At 16,384 tokens an FFN of 2048/5632
# takes 0.744 ms with sorted tokens and 0.802 ms without; at 2,048 tokens sorting costs more (H200).
MIN_TOKENS = 8192


class PrefillOrder:
    """The order of the tokens in the current forward pass, shared by all FFNs of a model.

    It is valid from the embedding of the ids to the end of the model's forward. There is none
    outside of that, for inputs given as embeddings, and for few tokens.
    """

    def __init__(self) -> None:
        self.order: TokenOrder | None = None
        self._handles: list[RemovableHandle] = []

    def watch(self, model: nn.Module) -> None:
        """Watches a model whose input embedding is known; any other keeps the natural order."""
        embedding = _input_embedding(model)
        if embedding is not None:
            self._handles = [
                embedding.register_forward_hook(self._sort),
                model.register_forward_hook(self.forget, always_call=True),
            ]

    def unwatch(self) -> None:
        """Undoes `watch`."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.order = [], None

    def token_M(self, x_MK: Tensor) -> Tensor | None:
        """The order for these tokens; None if the current order is for other tokens."""
        if self.order is None or len(self.order.token_M) != x_MK.shape[0]:
            return None
        return self.order.token_M.to(x_MK.device)

    def _sort(self, embedding: nn.Embedding, inputs: tuple[Any, ...], _: Tensor) -> None:
        ids_BT = inputs[0] if inputs else None
        self.order = None
        if isinstance(ids_BT, Tensor) and ids_BT.numel() >= MIN_TOKENS:
            self.order = token_order(ids_BT.long(), embedding.num_embeddings)

    def forget(self, *_: object) -> None:
        """Ends the forward pass; a hook, too."""
        self.order = None


class TrainingOrder:
    """The order of a micro-batch's tokens in training, shared by all FFNs of a model.

    Each forward pass in training computes it where the ids are embedded.

    Args:
        embedding: called with the ids, int64 (batch, length), of all tokens that the FFNs compute.

    Raises:
        ValueError: it is no `nn.Embedding`.
    """

    def __init__(self, embedding: nn.Embedding) -> None:
        if not isinstance(embedding, nn.Embedding):
            raise ValueError(
                f"embedding: {type(embedding).__name__} is not an nn.Embedding; give the module "
                "that is called with the token ids, such as model.get_input_embeddings()"
            )
        self._order: TokenOrder | None = None
        # After its forward, which refuses ids that it has no row for.
        self._handle = embedding.register_forward_hook(self._sort, with_kwargs=True)

    def unwatch(self) -> None:
        """Leaves the embedding alone, and tokens in their order."""
        self._handle.remove()
        self._order = None

    def is_of(self, num_tokens: int) -> bool:
        """Whether the embedding was last called with so many tokens, in training."""
        return self._order is not None and len(self._order.token_M) == num_tokens

    def of(self, num_tokens: int, device: torch.device) -> TokenOrder | None:
        """The order of so many tokens: that of the text if the current order is of other tokens.

        None where no gradient is needed. Else it is always an order: activation checkpointing may
        repeat a forward pass after another one, and must then save as many tensors as before.
        """
        if not torch.is_grad_enabled():
            return None
        if self._order is None or not self.is_of(num_tokens):
            row_M = torch.arange(num_tokens, device=device)
            return TokenOrder(row_M.int(), row_M)
        return self._order

    def _sort(
        self,
        embedding: nn.Embedding,
        inputs: tuple[Tensor, ...],
        keywords: dict[str, Tensor],
        _: Tensor,
    ) -> None:
        self._order = None
        if embedding.training and torch.is_grad_enabled():
            ids_BT = inputs[0] if inputs else keywords["input"]
            self._order = token_order(ids_BT.long(), embedding.num_embeddings)


def is_of_order(hook: object) -> bool:
    """Whether a module's hook only computes the order of tokens, and leaves its output as it is."""
    return isinstance(getattr(hook, "__self__", None), PrefillOrder | TrainingOrder)


def _input_embedding(model: nn.Module) -> nn.Embedding | None:
    get = getattr(model, "get_input_embeddings", None)
    try:
        embedding = get() if callable(get) else None
    except NotImplementedError:  # what transformers says of a model without one
        return None
    return embedding if isinstance(embedding, nn.Embedding) else None
