"""Inputs and results of an FFN, shared by the reference, the operators and the kernels.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.quantised import QuantisedRows

# The sizes of the formats; cuda/common/tiles.cuh has the same numbers.
BLOCK_TOKENS = 64
TILE_NEURONS = 256  # the column tile of the gate's GEMM
CONTROL_WORDS = 8  # counters of a call
MAX_NEURONS = 65_536  # 16-bit numbers
MAX_TOKENS = 65_536 * BLOCK_TOKENS  # 16-bit numbers of blocks
MAX_ELL_WIDTH = 1024  # of the hybrid format
DENSE_ROW_TILE = 128  # of the dense backup of the hybrid format
MAX_DECODE_TOKENS = 64  # for up to this many tokens the kernels need no format
# The types of tokens, weights and activations that the kernels take; training takes only bf16.
ELEMENTS = (torch.bfloat16, torch.float16)
# How kernels store an activation pattern: by the neurons active for any of 64 tokens
# (cuda/common/union.cuh), or each token by itself, as the paper does (cuda/common/twell.cuh).
Format = Literal["union", "twell"]
# The token of a block at each place of a column, `token_at` of cuda/common/union.cuh.
TOKEN_AT = [
    place // 16 * 16 + place // 2 % 2 * 8 + place % 16 // 4 * 2 + place % 2
    for place in range(BLOCK_TOKENS)
]


class FFNStats(NamedTuple):
    """Statistics of an FFN's activations. Only `l1_sum` carries a gradient."""

    # () fp32: Σ|h| over tokens and neurons, and without a gate Σ relu(z), h being its activation.
    l1_sum: Tensor
    nnz_M: Tensor  # (M,) int32, non-zero gate activations of each token
    active_N: Tensor  # (N,) int32, tokens for which each neuron was active
    union_sum: Tensor  # () int64, Σ over blocks of 64 tokens of the neurons active for any
    # () int64, tokens that the backward pass computes again; None for the union format, where the
    # capacity and `union_sum` tell whether it computes the whole pattern again.
    recomputed: Tensor | None = None


class Ramp(NamedTuple):
    """A mixture of activations: one is replaced by another over many steps."""

    activation: str  # the one that is replaced, a name of `activations.ACTIVATIONS`
    share: Tensor  # () fp32, of the activation that replaces it


class TokenOrder(NamedTuple):
    """A permutation of the tokens of a micro-batch, see `token_order.token_order`."""

    token_M: Tensor  # (M,) int32, the token of each row
    row_M: Tensor  # (M,) int64, the row of each token


class FFNWeights(NamedTuple):
    """What an FFN computes with, see `fatrelu_ffn`; as `nn.Linear` stores it."""

    gate_NK: Tensor | None  # None: the non-gated variant
    up_NK: Tensor
    down_KN: Tensor
    b_gate_N: Tensor | None = None  # biases are for inference alone
    b_up_N: Tensor | None = None
    b_down_K: Tensor | None = None
    threshold: float = 0.0  # FATReLU's: a gate that is not above it counts as zero; 0 is ReLU
    relu_up: bool = False  # dReLU: relu(gate) * relu(up); with a gate, and at inference only
    activation: str = "relu"  # a name of `activations.ACTIVATIONS` that has kernels
    # In FP8: the matrix whose product decides which neurons are active. That product, pattern and
    # values, is then computed from this; everything else from the matrices above.
    # See also `in_fp8`.
    quantised: QuantisedRows | None = None
    # W_d transposed and contiguous: the sparse kernels read this one.
    down_NK: Tensor | None = None

    @property
    def first(self) -> tuple[Tensor, Tensor | None]:
        """The matrix whose product decides which neurons are active, and its bias."""
        if self.gate_NK is None:
            return self.up_NK, self.b_up_N
        return self.gate_NK, self.b_gate_N

    @property
    def first_multiplied(self) -> tuple[Tensor | QuantisedRows, Tensor | None]:
        """`first` as it is multiplied: quantised, in FP8."""
        w_NK, bias_N = self.first
        return (w_NK if self.quantised is None else self.quantised), bias_N

    def in_fp8(self, rows: QuantisedRows) -> "FFNWeights":
        """With `first` as e4m3 numbers alone, which take its place: its shape is still read."""
        if self.gate_NK is None:
            return self._replace(up_NK=rows.values_MK, quantised=rows)
        return self._replace(gate_NK=rows.values_MK, quantised=rows)

    @property
    def second(self) -> tuple[Tensor | None, Tensor | None]:
        """With a gate, the matrix of up and its bias."""
        return (None, None) if self.gate_NK is None else (self.up_NK, self.b_up_N)


class Linear(NamedTuple):
    """A linear layer."""

    weight_NK: Tensor
    bias_N: Tensor | None
    quantised: QuantisedRows | None = None  # in FP8, read in place of the weight

    @property
    def stored(self) -> tuple[Tensor, Tensor | None]:
        """The weights that are read, and the scale of each row."""
        return (self.weight_NK, None) if self.quantised is None else self.quantised


class MatrixGradients(NamedTuple):
    """Memory of the gradients of an FFN's matrices; fp32 where micro-batches add them up."""

    gate_NK: Tensor | None
    up_NK: Tensor
    down_NK: Tensor  # of W_d, transposed

    @classmethod
    def empty(cls, w: FFNWeights, dtype: torch.dtype) -> "MatrixGradients":
        """Uninitialised memory for the gradients of an FFN's matrices."""
        down_NK = w.up_NK.new_empty(w.up_NK.shape, dtype=dtype)
        gate_NK = None if w.gate_NK is None else torch.empty_like(down_NK)
        return cls(gate_NK, torch.empty_like(down_NK), down_NK)


class StepShared(NamedTuple):
    """What the micro-batches of one optimizer step share, see `step_shared.py`."""

    weights: FFNWeights  # in the type of the step's products, see `step_shared.kernel_weights`
    sums: MatrixGradients | None  # None: gradients go through autograd


class Room(NamedTuple):
    """What a forward pass reserves for its pattern until the backward pass."""

    capacity: int  # columns of the union format; rows of the dense backup of the hybrid format
    ell_width: int = 0  # of the hybrid format's ELL matrix


class Columns(NamedTuple):
    """An activation pattern, compact: a column is 64 tokens × one neuron active for any.

    C columns are reserved (the capacity). The first E = ``offset[-1]`` are filled, block by block,
    neurons in ascending order (kernels may choose another). Where E > C only `offset` is valid.
    Place p of a column belongs to token ``TOKEN_AT[p]`` of the block; places beyond the last token
    are zero.
    """

    offset: Tensor  # (blocks + 1,) int32, first column of each block, then E
    neuron: Tensor  # (C,) int32
    mask: Tensor  # (C,) int64, bit t: the neuron is active for token t of the block
    gate: Tensor  # (C, 64), after the activation; (0, 64) without W_g
    up: Tensor  # (C, 64), x W_u of every token; without W_g its activation, which is h
    # (2,) int64, E again and the number of non-zeros. It is in host memory even for columns on a
    # GPU, since backward must know it before it launches; -1: the copy has not arrived. (0,) where
    # C is exactly enough for any pattern: a CUDA graph cannot return anything on the host.
    needed: Tensor

    @property
    def recomputed(self) -> None:
        """See `FFNStats`."""


class BackwardInputs(NamedTuple):
    """What the gradients of ``Σ dy * y + d_l1 * l1_sum`` are computed from."""

    dy_MK: Tensor  # in the order of the tokens
    d_l1: Tensor  # ()
    x_MK: Tensor
    w: FFNWeights
    saved: Any  # what forward kept in its format
    token_M: Tensor | None = None  # token of each row of x, see `TokenOrder`; None: row i is i
