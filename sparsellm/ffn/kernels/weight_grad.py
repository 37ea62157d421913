"""The weights' gradients of a sparse FFN, summed over the pattern alone.

M tokens, K hidden_size, N intermediate_size, C capacity in columns; bf16 and contiguous. K is a
multiple of 8. CUDA graphs capture it like any op. The order of summation does not depend on the
order of execution, so results are deterministic.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import kernel_for
from sparsellm.ffn.types import Columns, GradientSums


class Geometry(NamedTuple):
    """Sizes that plan_groups exports (``cuda/common/weight_grad.cuh``, group_columns.cu)."""

    neurons: int  # of a group
    line: int  # to which a line of the table is padded
    piece_rows: int  # of a piece
    max_parts: int  # of all groups that are split
    min_part: int  # pieces of a part
    member_words: int
    unit_words: int
    control_words: int


def _geometry(like: Tensor) -> Geometry:
    return Geometry(*map(kernel_for("plan_groups", like).exported, Geometry._fields))


@dataclass(frozen=True)
class Groups:
    """The columns of a pattern, grouped by neuron; ``cuda/common/weight_grad.cuh`` says how."""

    geometry: Geometry
    order: Tensor  # (N,) int32: the neurons, group by group
    member: Tensor  # (C, member_words) int32
    piece: Tensor  # (C + groups, 2) int32
    unit: Tensor  # (groups + max_parts, unit_words) int32
    control: Tensor  # (control_words,) int32
    progress: Tensor  # (1 + max_parts · 2 · slices,) int32; zero before every use of the groups


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
) -> GradientSums:
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
    x_MK, gated = given.x_MK, given.d_gate is not None
    assert dtype in (torch.float32, torch.bfloat16), dtype
    (num_tokens, k), columns = x_MK.shape, _unit_columns(x_MK)
    groups = group_columns(given.columns, num_neurons, k)
    geometry = groups.geometry
    slices, matrices = -(-k // columns), 3 if gated else 2
    out = added_to
    if out is None:
        new = [
            torch.empty(num_neurons, k, dtype=dtype, device=x_MK.device) for _ in range(matrices)
        ]
        out = GradientSums(new[0] if gated else None, new[-2], new[-1])
    # Nothing is split where no group can have so many rows.
    parts = geometry.max_parts if num_tokens > geometry.min_part * geometry.piece_rows else 0
    sums = torch.empty(
        parts * slices * matrices * geometry.neurons * columns,
        dtype=torch.float32,
        device=x_MK.device,
    )
    pieces = _fill_pieces(groups, given, num_nonzeros)
    kernel_for("weight_grad", x_MK).launch_units(
        groups.unit.shape[0] * 2 * slices,
        *(x_MK, given.dy_MK, k, num_neurons),
        *(groups.order, groups.unit, groups.control, *pieces, groups.progress, sums),
        *(gated, out.up_NK.dtype == torch.float32),
        *(added_to is not None, *out),
    )
    return out


def group_columns(columns: Columns, num_neurons: int, hidden_size: int) -> Groups:
    """Sorts the columns of a pattern by neuron, and schedules the work of `weight_grads`."""
    blocks, capacity = columns.offset.numel() - 1, columns.neuron.numel()
    geometry, device = _geometry(columns.offset), columns.offset.device
    groups = -(-num_neurons // geometry.neurons)

    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    rows, first = empty(groups), empty(groups)
    sizes = (
        num_neurons * -(-blocks // geometry.line) * geometry.line,
        2 * num_neurons,
        num_neurons,
        groups,
        geometry.control_words,
        1 + geometry.max_parts * 2 * -(-hidden_size // _unit_columns(columns.offset)),
    )
    zeroed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
    table, count, sample, group_sizes, control, progress = zeroed.split(sizes)
    result = Groups(
        geometry,
        order=empty(num_neurons),
        member=empty(capacity, geometry.member_words),
        piece=empty(capacity + groups, 2),
        unit=empty(groups + geometry.max_parts, geometry.unit_words),
        control=control,
        progress=progress,
    )
    place, rank, plan = (
        kernel_for(name, columns.offset)
        for name in ("place_columns", "rank_neurons", "plan_groups")
    )
    place.launch_units(
        -(-blocks * num_neurons // place.threads),
        *(blocks, columns.offset, columns.neuron, columns.mask, table, count, sample),
    )
    rank.launch(groups, num_neurons, count, sample, result.order, group_sizes)
    plan.launch(
        groups,
        *(num_neurons, blocks, columns.mask, table, result.order, group_sizes, rows, first),
        *(result.member, result.piece, result.unit, control),
    )
    return result


class _Pieces(NamedTuple):
    """The pieces' values; ``cuda/common/weight_grad.cuh`` says how."""

    work: Tensor  # (groups + max_parts, 2) int32
    x_row: Tensor  # (pieces, piece_rows) int32
    dy_row: Tensor  # likewise; the same tensor where both have the same order
    values: Tensor  # (pieces, piece_rows, 3 or 2, 32) bfloat16, and 32 more that are not used


def _fill_pieces(groups: Groups, given: Operands, num_nonzeros: int | None) -> _Pieces:
    d_up, gated, num_tokens = given.d_up, given.d_gate is not None, len(given.x_MK)
    geometry, num_units, capacity = groups.geometry, len(groups.unit), len(groups.member)
    num_groups, rows = num_units - geometry.max_parts, geometry.piece_rows
    # A group has at most all tokens as rows, and at most all tokens of its columns' blocks.
    most = min(num_groups * -(-num_tokens // rows), capacity + num_groups)
    if num_nonzeros is not None:  # each row has one; only a group's last piece may be part full
        most = min(most, num_nonzeros // rows + num_groups)
    x_row = torch.empty(most, rows, dtype=torch.int32, device=d_up.device)
    pieces = _Pieces(
        torch.empty(num_units, 2, dtype=torch.int32, device=d_up.device),
        x_row,
        x_row if given.token_M is None else torch.empty_like(x_row),
        d_up.new_empty((most * rows * (3 if gated else 2) + 1) * geometry.neurons),
    )
    kernel_for("fill_pieces", d_up).launch_units(
        most,
        *(given.d_gate, d_up, given.columns.gate if gated else None, given.columns.up),
        *(gated, groups.member, groups.piece, groups.unit, groups.control, pieces.work),
        *(given.token_M, pieces.x_row, pieces.dy_row, pieces.values),
    )
    return pieces


def _unit_columns(like: Tensor) -> int:
    """Columns of x or dy in a work unit."""
    return kernel_for("weight_grad", like).exported("columns")
