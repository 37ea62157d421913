"""The weights' gradients of a sparse FFN, summed over the pattern alone (cuda/sm90/weight_grad.cu).

M tokens, K hidden_size, N intermediate_size, C capacity in columns; bf16 and contiguous. K is a
multiple of 8. CUDA graphs capture it like any op. The order of summation does not depend on the
order of execution, so results are deterministic.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import exported_like, grid_size, launch_for, launch_source
from sparsellm.ffn.kernels.gpu_architecture import GPUArchitecture, architecture_of
from sparsellm.ffn.types import BLOCK_TOKENS, Columns, GradientSums

# cuda/common/weight_grad.cuh
_BF16, _FP32, _ADDED_TO_FP32 = range(3)  # `output` in cuda/common/weight_sums.cuh
_GROUP_NEURONS, _MAX_PARTS, _MIN_PART = 32, 60, 16
_MEMBER_WORDS, _UNIT_WORDS, _CONTROL_WORDS = 8, 8, 2
# cuda/common/group_columns.cu
_PLACE_BLOCKS, _LINE_BLOCKS = 4, 8
# cuda/common/fill_pieces.cu
_FILL_BLOCKS = 5


@dataclass(frozen=True)
class Groups:
    """The columns of a pattern, grouped by neuron; ``cuda/common/weight_grad.cuh`` says how."""

    order: Tensor  # (N,) int32: the neurons in groups of 32
    member: Tensor  # (C, 8) int32
    piece: Tensor  # (C + groups, 2) int32
    unit: Tensor  # (groups + 60, 8) int32
    control: Tensor  # (2,) int32
    progress: Tensor  # (1 + 60 · 2 · slices,) int32; zero before every use of the groups


class Operands(NamedTuple):
    """What the gradients of the weights are products of."""

    columns: Columns  # the pattern, gate and up; values of tokens that do not fire are not used
    d_gate: Tensor | None  # (C, 64): the loss's gradient by the gate before its relu; None without
    d_up: Tensor  # (C, 64): by ``up``; without a gate, before its relu
    x_MK: Tensor  # the FFN's input
    dy_MK: Tensor  # the loss's gradient by the FFN's output
    token_M: Tensor | None = None  # (M,) int32: the row of dy for each row of x; None: the same


def weight_grads(
    given: Operands,
    num_neurons: int,
    dtype: torch.dtype,
    *,
    added_to: GradientSums | None = None,
    num_nonzeros: int | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """The gradients of W_gate, W_up and W_down, each neuron by neuron.

    Args:
        given: a token whose row of x is not finite spoils the gradients of all neurons in the
            groups of 32 that it fires, as it does in a dense product.
        num_neurons: N.
        dtype: float32 or bfloat16, of the results; sums are float32.
        added_to: float32 matrices to which the results are added; they are then returned.
        num_nonzeros: an upper bound on the non-zeros of the pattern, by which scratch memory is
            reserved. None: the worst case.

    Returns:
        Σ d_gate x (N, K), or None; Σ d_up x (N, K); Σ bf16(gate · up) dy (N, K), or Σ up dy. Rows
        of neurons that never fire are zero.
    """
    groups = group_columns(given.columns, num_neurons, given.x_MK.shape[1])
    return sum_groups(
        groups, given, num_neurons, dtype, added_to=added_to, num_nonzeros=num_nonzeros
    )


def group_columns(columns: Columns, num_neurons: int, hidden_size: int) -> Groups:
    """Sorts the columns of a pattern by neuron, and schedules the work of `sum_groups`."""
    blocks, capacity = columns.offset.numel() - 1, columns.neuron.numel()
    groups = -(-num_neurons // _GROUP_NEURONS)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=columns.offset.device)

    rows, first = empty(groups), empty(groups)
    progress_words = 1 + _MAX_PARTS * 2 * _slices(hidden_size, _architecture(columns))
    sizes = (
        num_neurons * -(-blocks // _LINE_BLOCKS) * _LINE_BLOCKS,
        2 * num_neurons,
        num_neurons,
        groups,
        _CONTROL_WORDS,
        progress_words,
    )
    zeroed = torch.zeros(sum(sizes), dtype=torch.int32, device=columns.offset.device)
    table, count, sample, group_sizes, control, progress = zeroed.split(sizes)
    result = Groups(
        order=empty(num_neurons),
        member=empty(capacity, _MEMBER_WORDS),
        piece=empty(capacity + groups, 2),
        unit=empty(groups + _MAX_PARTS, _UNIT_WORDS),
        control=control,
        progress=progress,
    )
    place_threads = exported_like("group_columns", "place_threads", columns.offset)
    most = -(-blocks * num_neurons // place_threads)
    placing = grid_size("group_columns", columns.offset, most, _PLACE_BLOCKS)
    launches = ((placing, place_threads), (groups, None), (groups, None))
    for number, (grid, threads) in enumerate(launches):
        launch_for(
            "group_columns",
            columns.offset,
            grid,
            np.int32(number),
            np.int32(num_neurons),
            np.int32(blocks),
            columns.offset,
            columns.neuron,
            columns.mask,
            count,
            sample,
            result.order,
            group_sizes,
            table,
            rows,
            first,
            result.member,
            result.piece,
            result.unit,
            control,
            threads=threads,
        )
    return result


def sum_groups(
    groups: Groups,
    given: Operands,
    num_neurons: int,
    dtype: torch.dtype,
    *,
    added_to: GradientSums | None = None,
    num_nonzeros: int | None = None,
) -> tuple[Tensor | None, Tensor, Tensor]:
    """`weight_grads` of a grouped pattern; ``groups`` cannot be used again."""
    x_MK, gated = given.x_MK, given.d_gate is not None
    assert dtype in (torch.float32, torch.bfloat16), dtype
    (num_tokens, k), architecture = x_MK.shape, _architecture(given.columns)
    slices = _slices(k, architecture)

    def empty() -> Tensor:
        return torch.empty(num_neurons, k, dtype=dtype, device=x_MK.device)

    if added_to is None:
        gate_NK, up_NK, down_NK = empty() if gated else None, empty(), empty()
        output = _FP32 if dtype == torch.float32 else _BF16
    else:
        (gate_NK, up_NK, down_NK), output = added_to, _ADDED_TO_FP32
    # Nothing is split where no group can have so many rows.
    parts = _MAX_PARTS if num_tokens > _MIN_PART * BLOCK_TOKENS else 0
    matrices = 3 if gated else 2
    sums = torch.empty(
        parts * slices * matrices * _GROUP_NEURONS * architecture.unit_columns,
        dtype=torch.float32,
        device=x_MK.device,
    )
    pieces = _fill_pieces(groups, given, num_nonzeros)
    launch_source(
        architecture.weight_grad,
        x_MK,
        groups.unit.shape[0] * 2 * slices,
        x_MK,
        given.dy_MK,
        np.int32(k),
        np.int32(num_neurons),
        groups.order,
        groups.unit,
        groups.control,
        pieces.work,
        pieces.x_row,
        pieces.dy_row,
        pieces.values,
        groups.progress,
        sums,
        np.int32(gated),
        np.int32(output),
        gate_NK,
        up_NK,
        down_NK,
    )
    return gate_NK, up_NK, down_NK


@dataclass(frozen=True)
class _Pieces:
    """The pieces' values; ``cuda/common/weight_grad.cuh`` says how."""

    work: Tensor  # (groups + 60, 2) int32
    x_row: Tensor  # (pieces, 64) int32
    dy_row: Tensor  # likewise; the same tensor where both have the same order
    values: Tensor  # (pieces, 64, 3 or 2, 32) bfloat16, and 32 more that are read and not used


def _fill_pieces(groups: Groups, given: Operands, num_nonzeros: int | None) -> _Pieces:
    d_up, gated, num_tokens = given.d_up, given.d_gate is not None, len(given.x_MK)
    num_units = groups.unit.shape[0]
    num_groups, capacity = num_units - _MAX_PARTS, groups.member.shape[0]
    matrices = 3 if gated else 2
    # A group's rows are at most all tokens, and at most all tokens of its columns' blocks.
    most = min(num_groups * -(-num_tokens // BLOCK_TOKENS), capacity + num_groups)
    if num_nonzeros is not None:  # each row of a group has one, and a group's last piece any number
        most = min(most, num_nonzeros // BLOCK_TOKENS + num_groups)
    x_row = torch.empty(most, BLOCK_TOKENS, dtype=torch.int32, device=d_up.device)
    pieces = _Pieces(
        torch.empty(num_units, 2, dtype=torch.int32, device=d_up.device),
        x_row,
        x_row if given.token_M is None else torch.empty_like(x_row),
        d_up.new_empty(most * BLOCK_TOKENS * matrices * _GROUP_NEURONS + _GROUP_NEURONS),
    )
    launch_for(
        "fill_pieces",
        d_up,
        grid_size("fill_pieces", d_up, most, _FILL_BLOCKS),
        given.d_gate,
        d_up,
        given.columns.gate if gated else None,
        given.columns.up,
        np.int32(gated),
        groups.member,
        groups.piece,
        groups.unit,
        groups.control,
        pieces.work,
        given.token_M,
        pieces.x_row,
        pieces.dy_row,
        pieces.values,
    )
    return pieces


def _architecture(columns: Columns) -> GPUArchitecture:
    return architecture_of(columns.offset.get_device())


def _slices(hidden_size: int, architecture: GPUArchitecture) -> int:
    return -(-hidden_size // architecture.unit_columns)
