"""The weights' gradients of a sparse FFN, summed over the pattern alone.

M tokens, K hidden_size, N intermediate_size, C capacity in columns; bf16 and contiguous. K is a
multiple of 8. CUDA graphs capture it like any op. The order of summation does not depend on the
order of execution, so results are deterministic.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compile import kernel_for
from sparsellm.ffn.kernels.launch import Kernel
from sparsellm.ffn.kernels.scratch import Array, Scratch, ScratchLayout
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


@functools.cache
def _geometry(plan_groups: Kernel) -> Geometry:
    return Geometry(*map(plan_groups.exported, Geometry._fields))


class Groups(NamedTuple):
    """The columns of a pattern, grouped by neuron; ``cuda/common/weight_grad.cuh`` says how."""

    geometry: Geometry
    num_groups: int
    arrays: Scratch  # of `_groups_layout`
    counters: Scratch  # of `_counters_layout`

    @property
    def num_units(self) -> int:
        """Of work, at most."""
        return self.num_groups + self.geometry.max_parts


@functools.lru_cache
def _groups_layout(num_neurons: int, capacity: int, geometry: Geometry) -> ScratchLayout:
    groups = -(-num_neurons // geometry.neurons)
    return ScratchLayout(
        {
            "order": Array((num_neurons,)),  # the neurons, group by group
            "member": Array((capacity, geometry.member_words)),
            "piece": Array((capacity + groups, 2)),
            "unit": Array((groups + geometry.max_parts, geometry.unit_words)),
            "rows": Array((groups,)),
            "first": Array((groups,)),
        }
    )


@functools.lru_cache
def _counters_layout(
    num_neurons: int, blocks: int, slices: int, geometry: Geometry
) -> ScratchLayout:
    """Arrays that begin with zero."""
    groups, line = -(-num_neurons // geometry.neurons), geometry.line
    return ScratchLayout(
        {
            "table": Array((num_neurons, -(-blocks // line) * line)),
            "count": Array((2 * num_neurons,)),
            "sample": Array((num_neurons,)),
            "group_sizes": Array((groups,)),
            "control": Array((geometry.control_words,)),
            "progress": Array((1 + geometry.max_parts * 2 * slices,)),  # zero before every use
        }
    )


class Operands(NamedTuple):
    """What the gradients of the weights are products of."""

    columns: Columns  # the pattern, gate and up; values of tokens that do not fire are not used
    d_gate: Tensor | None  # (C, 64): the loss's gradient by the gate before its relu, or None
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
        groups.num_units * 2 * slices,
        *(x_MK, given.dy_MK, k, num_neurons, *groups.arrays("order", "unit")),
        *(*groups.counters("control"), *pieces("work", "x_row", _dy_row(given), "values")),
        *(*groups.counters("progress"), sums),
        *(gated, out.up_NK.dtype == torch.float32),
        *(added_to is not None, *out),
    )
    return out


def group_columns(columns: Columns, num_neurons: int, hidden_size: int) -> Groups:
    """Sorts the columns of a pattern by neuron, and schedules the work of `weight_grads`."""
    blocks, capacity = columns.offset.numel() - 1, columns.neuron.numel()
    place, rank, plan = (
        kernel_for(name, columns.offset)
        for name in ("place_columns", "rank_neurons", "plan_groups")
    )
    geometry, device = _geometry(plan), columns.offset.device
    slices = -(-hidden_size // _unit_columns(columns.offset))
    result = Groups(
        geometry,
        -(-num_neurons // geometry.neurons),
        Scratch(_groups_layout(num_neurons, capacity, geometry), device),
        Scratch(_counters_layout(num_neurons, blocks, slices, geometry), device, torch.zeros),
    )
    table, count, sample, sizes = result.counters("table", "count", "sample", "group_sizes")
    order, *planned = result.arrays("order", "rows", "first", "member", "piece", "unit")
    place.launch_units(
        -(-blocks * num_neurons // place.threads),
        *(blocks, columns.offset, columns.neuron, columns.mask, table, count, sample),
    )
    rank.launch(result.num_groups, num_neurons, count, sample, order, sizes)
    plan.launch(
        result.num_groups,
        *(num_neurons, blocks, columns.mask, table, order, sizes, *planned),
        *result.counters("control"),
    )
    return result


def _dy_row(given: Operands) -> str:
    """The rows of dy; those of x where both have the same order."""
    return "x_row" if given.token_M is None else "dy_row"


def _fill_pieces(groups: Groups, given: Operands, num_nonzeros: int | None) -> Scratch:
    """The values of the pieces, and their rows; ``cuda/common/weight_grad.cuh`` says how."""
    d_up, gated, num_tokens = given.d_up, given.d_gate is not None, len(given.x_MK)
    geometry, num_groups, capacity = groups.geometry, groups.num_groups, len(d_up)
    rows = geometry.piece_rows
    # A group has at most all tokens as rows, and at most all tokens of its columns' blocks.
    most = min(num_groups * -(-num_tokens // rows), capacity + num_groups)
    if num_nonzeros is not None:  # each row has one; only a group's last piece may be part full
        most = min(most, num_nonzeros // rows + num_groups)
    arrays = {
        "work": Array((groups.num_units, 2)),
        "x_row": Array((most, rows)),
        # By piece, row and matrix, and 32 more that are not used.
        "values": Array((most * rows * (3 if gated else 2) + 1, geometry.neurons), d_up.dtype),
    }
    if given.token_M is not None:
        arrays["dy_row"] = Array((most, rows))
    pieces = Scratch(ScratchLayout(arrays), d_up.device)
    kernel_for("fill_pieces", d_up).launch_units(
        most,
        *(given.d_gate, d_up, given.columns.gate if gated else None, given.columns.up),
        *(gated, *groups.arrays("member", "piece", "unit"), *groups.counters("control")),
        *(*pieces("work"), given.token_M, *pieces("x_row", _dy_row(given), "values")),
    )
    return pieces


def _unit_columns(like: Tensor) -> int:
    """Columns of x or dy in a work unit."""
    return kernel_for("weight_grad", like).exported("columns")
