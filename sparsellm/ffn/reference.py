"""Every op in plain torch: the specification, the CPU path and the tests' oracle.

Shapes: M tokens, K hidden_size, N intermediate_size. Weights are stored as `nn.Linear` stores
them, (out, in): w_gate_NK, w_up_NK, w_down_KN.
"""

import os
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from sparsellm.ffn.activations import ACTIVATIONS, RECTIFIED, WITH_KERNELS, Rectified
from sparsellm.ffn.quantised import linear, linear_of_few
from sparsellm.ffn.types import (
    BLOCK_TOKENS,
    MAX_DECODE_TOKENS,
    TOKEN_AT,
    Columns,
    FFNStats,
    FFNWeights,
    Ramp,
    Room,
)
from sparsellm.paths import REFERENCE_VARIABLE

Product = Callable[[Tensor], Tensor]  # (M, in) → (M, out)


def stands_in(device: torch.device) -> bool:
    """Whether the functions here stand in for the sparse kernels on a device, as tests ask."""
    return device.type == "cpu" and bool(os.environ.get(REFERENCE_VARIABLE))


def activation_function(name: str) -> Callable[[Tensor], Tensor]:
    """The function of an entry of `activations.ACTIVATIONS`."""
    kernels = ACTIVATIONS[name].kernels
    if kernels is None:
        function: Callable[[Tensor], Tensor] = getattr(F, name)
        return function
    return lambda z: kernels.value(F.relu(z))


def rectified(w: FFNWeights) -> Rectified:
    """How the kernels compute the activation of an FFN.

    Raises:
        ValueError: the kernels do not support it.
    """
    kernels = RECTIFIED.get(w.activation)
    if kernels is None:
        raise ValueError(f"sparse_ffn: activation {w.activation} must be {WITH_KERNELS}")
    return kernels


def ffn_stats(
    l1_MN: Tensor | None, gate_MN: Tensor, token_M: Tensor | None = None, *, counts: bool = True
) -> FFNStats:
    """L1 of what `FFNStats.l1_sum` says (None: zero), and the pattern of the gate.

    A neuron counts as active where its *gate* is non-zero: a sparse format stores that pattern, and
    it decides which columns of W_u and W_d are read. ``token_M``: the order of the tokens in which
    blocks, and so unions, are formed. Without ``counts`` all neurons are taken to be active.
    """
    full = partial(torch.full, device=gate_MN.device)
    if l1_MN is None:
        l1_sum = full((), 0.0, dtype=torch.float32)
    else:
        # fp32 keeps the result independent of how the batch is split, to fp32 rounding; float64
        # inputs (tests) stay float64.
        l1_sum = l1_MN.abs().sum(dtype=torch.promote_types(l1_MN.dtype, torch.float32))
    if not counts:
        m, n = gate_MN.shape
        blocks = (m + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        return FFNStats(
            l1_sum=l1_sum,
            nnz_M=full((m,), n, dtype=torch.int32),
            active_N=full((n,), m, dtype=torch.int32),
            union_sum=full((), blocks * n, dtype=torch.int64),
        )
    active_MN = gate_MN.detach() != 0
    # Counting by block first reads the pattern only once.
    in_blocks_MN = active_MN if token_M is None else active_MN[token_M]
    active_BN = blocks_of(in_blocks_MN).sum(dim=1, dtype=torch.int32)
    return FFNStats(
        l1_sum=l1_sum,
        nnz_M=active_MN.sum(dim=1, dtype=torch.int32),
        active_N=active_BN.sum(dim=0, dtype=torch.int32),
        union_sum=(active_BN > 0).sum(),
    )


def dense_ffn(  # noqa: PLR0917
    x_MK: Tensor,
    gate: Product | None,
    up: Product,
    down: Product,
    activation: str = "relu",
    token_M: Tensor | None = None,
    ramp: Ramp | None = None,
    *,
    l1: bool = True,
) -> tuple[Tensor, FFNStats]:
    """``y = (act(x W_g) * (x W_u)) W_d`` (paper, section 2, eq. 1) with its statistics.

    Without a gate ``y = act(x W_u) W_d`` (paper's non-gated variant): the up-projection is its own
    gate.

    Args:
        x_MK: the tokens.
        gate: computes ``x W_g``, such as an `nn.Linear`.
        up: ``x W_u``.
        down: ``h W_d``.
        activation: a name of `activations.ACTIVATIONS`.
        token_M: see `ffn_stats`.
        ramp: y is that of a mixture of activations; the statistics, and so L1 and what counts as
            active, remain those of ``activation``.
        l1: whether the loss has L1 of this FFN. Otherwise it is not computed.

    Returns:
        y of shape (M, K) and `ffn_stats`; of an activation without exact zeros all neurons are
        active, and nothing is counted.
    """
    z_MN = (up if gate is None else gate)(x_MK)
    gate_MN = activation_function(activation)(z_MN)
    up_MN = None if gate is None else up(x_MK)
    h_MN = mixed_MN = gate_MN if up_MN is None else gate_MN * up_MN
    # Only y is that of the mixture; the statistics below are of the activation itself.
    if ramp is not None:
        before_MN = activation_function(ramp.activation)(z_MN)
        mixed_MN = before_MN + ramp.share * (gate_MN - before_MN)
        mixed_MN = mixed_MN if up_MN is None else mixed_MN * up_MN
    l1_MN = None
    if l1:
        l1_MN = F.relu(z_MN) if gate is None and activation in RECTIFIED else h_MN
    counts = ACTIVATIONS[activation].exact_zeros
    return down(mixed_MN), ffn_stats(l1_MN, gate_MN, token_M, counts=counts)


def fatrelu_ffn(x_MK: Tensor, w: FFNWeights) -> Tensor:
    """``(act(fatrelu(x W_g + b_g)) * (x W_u + b_u)) W_d + b_d``; y of (M, K).

    Without W_g ``act(fatrelu(x W_u + b_u)) W_d + b_d``; act changes nothing for ReLU. With
    ``relu_up`` the up projection goes through relu too (dReLU, Turbo Sparse, arXiv 2406.05955,
    eq. 2). NaN passes, as through relu.

    In FP8, up to `MAX_DECODE_TOKENS` tokens are not quantised: a call then takes as long as reading
    the weights.
    """
    if w.quantised is not None and len(x_MK) <= MAX_DECODE_TOKENS:
        gate_MN = linear_of_few(x_MK, w.quantised, w.first[1])
    else:
        gate_MN = linear(x_MK, *w.first_multiplied)
    h_MN = gate_MN = rectified(w).value(torch.where(gate_MN <= w.threshold, 0, gate_MN))
    if w.gate_NK is not None:
        up_MN = F.linear(x_MK, w.up_NK, w.b_up_N)
        h_MN = gate_MN * (F.relu(up_MN) if w.relu_up else up_MN)
    return F.linear(h_MN, w.down_KN, w.b_down_K)


def empty_columns(x_MK: Tensor, num_neurons: int, room: Room, *, gated: bool) -> Columns:
    """Uninitialised columns for the pattern of these tokens."""
    blocks, capacity = (x_MK.shape[0] + BLOCK_TOKENS - 1) // BLOCK_TOKENS, room.capacity
    needed = torch.empty(2, dtype=torch.int64)
    if capacity == blocks * num_neurons:  # as a CUDA graph needs it
        needed = x_MK.new_empty(0, dtype=torch.int64)
    return Columns(
        offset=x_MK.new_empty(blocks + 1, dtype=torch.int32),
        neuron=x_MK.new_empty(capacity, dtype=torch.int32),
        mask=x_MK.new_empty(capacity, dtype=torch.int64),
        gate=x_MK.new_empty(capacity if gated else 0, BLOCK_TOKENS),
        up=x_MK.new_empty(capacity, BLOCK_TOKENS),
        needed=needed,
    )


def columns_of(gate_MN: Tensor | None, up_MN: Tensor, capacity: int) -> Columns:
    """The pattern of a gate after its activation, and both activations on it, in C = ``capacity``
    columns.

    Without a gate ``up`` is after the activation, and the pattern is that of ``up``.
    """
    up_BNP = _by_place(up_MN)
    gate_BNP = up_BNP if gate_MN is None else _by_place(gate_MN)
    active_BNP = gate_BNP != 0
    member_BN = active_BNP.any(2)
    offset = F.pad(member_BN.sum(1).cumsum(0), (1, 0)).int()
    block, neuron = (index[:capacity] for index in member_BN.nonzero(as_tuple=True))
    needed = torch.stack([offset[-1], active_BNP.sum()])

    def filled(values: Tensor) -> Tensor:
        return F.pad(values, (0, 0) * (values.ndim - 1) + (0, capacity - len(values)))

    bit_P = 1 << torch.tensor(TOKEN_AT, device=up_MN.device)
    gate_CP = up_MN.new_empty(0, BLOCK_TOKENS)
    if gate_MN is not None:
        gate_CP = filled(gate_BNP[block, neuron])
    return Columns(
        offset=offset,
        neuron=filled(neuron.int()),
        mask=filled((active_BNP[block, neuron] * bit_P).sum(1)),
        gate=gate_CP,
        up=filled(up_BNP[block, neuron]),
        needed=needed[: 2 if capacity < member_BN.numel() else 0],
    )


def dense_of(columns: Columns, values_CP: Tensor, num_tokens: int, num_neurons: int) -> Tensor:
    """The dense (M, N) matrix of values stored in columns; zero where there is no column."""
    blocks, filled = columns.offset.numel() - 1, int(columns.offset[-1])
    block = torch.arange(blocks, device=values_CP.device)
    block = block.repeat_interleave(columns.offset.diff().long())
    values_BPN = values_CP.new_zeros(blocks, BLOCK_TOKENS, num_neurons)
    token_P = torch.tensor(TOKEN_AT, device=values_CP.device)
    neuron = columns.neuron[:filled].long()
    values_BPN[block[:, None], token_P, neuron[:, None]] = values_CP[:filled]
    return values_BPN.flatten(0, 1)[:num_tokens]


def activations_in(columns: Columns, x_MK: Tensor, w: FFNWeights) -> tuple[Tensor | None, Tensor]:
    """`activations` from columns, dense; a pattern that did not fit is recomputed from x."""
    num_columns, (m, n) = int(columns.offset[-1]), (len(x_MK), len(w.up_NK))
    if num_columns > columns.neuron.numel():
        columns = columns_of(*activations(x_MK, w), num_columns)
    gate_MN = None if w.gate_NK is None else dense_of(columns, columns.gate, m, n)
    return gate_MN, dense_of(columns, columns.up, m, n)


def blocks_of(values_MN: Tensor) -> Tensor:
    """(blocks, 64, N), missing tokens zero."""
    m, n = values_MN.shape
    blocks = -(-m // BLOCK_TOKENS)
    if missing := blocks * BLOCK_TOKENS - m:
        values_MN = F.pad(values_MN, (0, 0, 0, missing))
    return values_MN.reshape(blocks, BLOCK_TOKENS, n)


def _by_place(values_MN: Tensor) -> Tensor:
    """(blocks, N, 64): a column for every neuron."""
    return blocks_of(values_MN)[:, TOKEN_AT].transpose(1, 2)


def output_of(
    gate_MN: Tensor | None, up_MN: Tensor, w: FFNWeights, token_M: Tensor | None
) -> tuple[Tensor, FFNStats]:
    """y and statistics of `activations`.

    ``token_M``: the token of each row, see `TokenOrder`; y and statistics per token are then in the
    order of the tokens. None if rows are tokens.
    """
    h_MN = up_MN if gate_MN is None else gate_MN * up_MN
    y_MK = F.linear(h_MN, w.down_KN)
    if gate_MN is None:
        stats = ffn_stats(rectified(w).inverse(up_MN), up_MN)
    else:
        stats = ffn_stats(h_MN, gate_MN)
    if token_M is not None:
        y_MK = torch.empty_like(y_MK).index_put((token_M.long(),), y_MK)
        nnz_M = torch.empty_like(stats.nnz_M).index_put((token_M.long(),), stats.nnz_M)
        stats = stats._replace(nnz_M=nnz_M)
    return y_MK, stats


def activations(x_MK: Tensor, w: FFNWeights) -> tuple[Tensor | None, Tensor]:
    """Gate after its activation, and up. Without a gate: None, and up after the activation."""
    first_MN = rectified(w).value(F.relu(linear(x_MK, *w.first_multiplied)))
    if w.gate_NK is None:
        return None, first_MN
    return first_MN, F.linear(x_MK, w.up_NK)


def gradients_on(  # noqa: PLR0917
    gate_MN: Tensor | None, up_MN: Tensor, dy_MK: Tensor, d_l1: Tensor, x_MK: Tensor, w: FFNWeights
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """Gradients of ``Σ dy * y + d_l1 * l1_sum`` on the pattern (paper, section on training).

    They are those of x, W_g (if there is one), W_u and W_d, in their shapes.

    ``∇h = ∇y W_dᵀ`` where the neuron is active, plus ``d_l1 * sign(h)``; ``∇h_u = ∇h * h_g``,
    ``∇h_g = ∇h * h_u``, or without a gate ``∇h_u = ∇h * slope(h) + d_l1``, where ∇h is without L1;
    ``∇x = ∇h_u W_uᵀ + ∇h_g W_gᵀ``; ``∇W_u = xᵀ ∇h_u``, ``∇W_g = xᵀ ∇h_g``,
    ``∇W_d = hᵀ ∇y``. As on tensor cores, factors are rounded to the type of x and sums are fp32
    (float64 for float64); ∇x has x's type, and the weights' gradients are not rounded. ∇y is by row
    of x. The activations are those of `activations`; up need not be known where the gate is zero.
    """
    wide = torch.promote_types(x_MK.dtype, torch.float32)
    h_MN = up_MN if gate_MN is None else gate_MN * up_MN
    dy_MK, x_wide_MK = dy_MK.to(wide), x_MK.to(wide)
    l1_MN = d_l1.to(wide) * h_MN.sign().to(wide)
    dh_MN, slope = dy_MK @ w.down_KN.to(wide), rectified(w).slope
    # Nothing flows where a neuron is not active: the derivative of relu at 0 is taken as 0.
    if gate_MN is None:
        d_up_MN = torch.where(up_MN != 0, dh_MN * slope(up_MN.to(wide)) + l1_MN, 0)
    else:
        dh_MN = torch.where(gate_MN != 0, dh_MN + l1_MN, 0)
        d_up_MN = dh_MN * gate_MN
    # Rounded as it is for tensor cores.
    d_up_MN = d_up_MN.to(x_MK.dtype).to(wide)
    dx_MK = d_up_MN @ w.up_NK.to(wide)
    d_gate_NK = None
    if gate_MN is not None and w.gate_NK is not None:
        d_gate_MN = (dh_MN * up_MN * slope(gate_MN.to(wide))).to(x_MK.dtype).to(wide)
        dx_MK += d_gate_MN @ w.gate_NK.to(wide)
        d_gate_NK = d_gate_MN.t() @ x_wide_MK
    d_down_KN = dy_MK.t() @ h_MN.to(wide)
    return dx_MK.to(x_MK.dtype), d_gate_NK, d_up_MN.t() @ x_wide_MK, d_down_KN
