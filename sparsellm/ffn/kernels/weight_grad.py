"""The weights' gradients of a sparse FFN, summed over the pattern alone.

M tokens, K hidden_size, N intermediate_size, C capacity in columns; bf16 and contiguous. K is a
multiple of 8. CUDA graphs capture it like any op. The order of summation does not depend on the
order of execution, so results are deterministic.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.launch import Address, Kernel
from sparsellm.ffn.kernels.scratch import Array, Scratch, ScratchLayout
from sparsellm.ffn.types import BackwardInputs, Columns, MatrixGradients


class Groups(NamedTuple):
    """The columns of a pattern, grouped by neuron; ``cuda/common/weight_grad.cuh`` says how."""

    plan: Kernel  # plan_groups, which exports the sizes of groups, pieces and parts
    num_groups: int
    num_units: int  # of work, at most
    arrays: Scratch
    counters: Scratch  # begin with zero


@functools.lru_cache
def _layouts(
    plan: Kernel, num_neurons: int, capacity: int, blocks: int, slices: int
) -> tuple[ScratchLayout, ScratchLayout]:
    """Layouts of the arrays and the counters of `Groups`."""
    size = plan.exported
    groups, line, parts = -(-num_neurons // size("neurons")), size("line"), size("max_parts")
    arrays = {
        "order": Array((num_neurons,)),  # the neurons, group by group
        "member": Array((capacity, size("member_words"))),
        "piece": Array((capacity + groups, 2)),
        "unit": Array((groups + parts, size("unit_words"))),
        "group_rows": Array((groups,)),
        "group_first": Array((groups,)),
    }
    counters = {
        "table": Array((num_neurons, -(-blocks // line) * line)),
        "count": Array((2 * num_neurons,)),
        "sample": Array((num_neurons,)),
        "group_columns": Array((groups,)),
        "control": Array((size("control_words"),)),
        "progress": Array((1 + parts * 2 * slices,)),  # zero before every use
    }
    return ScratchLayout(arrays), ScratchLayout(counters)


def weight_grads(
    inputs: BackwardInputs,
    d_gate: Tensor | None,
    d_up: Tensor,
    out: MatrixGradients,
    *,
    adds: bool,
    num_nonzeros: int | None = None,
) -> None:
    """The gradients of W_gate, W_up and W_down, each neuron by neuron.

    Σ d_gate x (N, K); Σ d_up x (N, K); Σ bf16(gate · up) dy (N, K), or without a gate Σ up dy. Rows
    of neurons that are never active are zero.

    Args:
        inputs: values where a neuron is not active for a token are not used. A token whose row of x
            is not finite spoils the gradients of the groups of 32 that are active for it, as it
            does in a dense product.
        d_gate: (C, 64): the loss's gradient by the gate before its relu; None without a gate.
        d_up: (C, 64): by ``up``; without a gate, before its relu.
        out: float32 or bfloat16; sums are float32.
        adds: the results are added to ``out``, which is float32.
        num_nonzeros: an upper bound on the non-zeros of the pattern, by which scratch memory is
            reserved. None: the worst case.
    """
    x_MK, dtype, gated = inputs.x_MK, out.up_NK.dtype, d_gate is not None
    assert dtype in (torch.float32, torch.bfloat16), dtype
    (num_tokens, k), n, kernel = x_MK.shape, len(out.up_NK), kernel_for("weight_grad", x_MK)
    columns = kernel.exported("columns")  # of x or dy in a work unit
    slices = -(-k // columns)
    groups = group_columns(inputs.saved, n, slices)
    # Nothing is split where no group can have so many rows.
    size = groups.plan.exported
    parts = size("max_parts") if num_tokens > size("min_part") * size("piece_rows") else 0
    sums = torch.empty(
        parts * slices * (3 if gated else 2) * size("neurons") * columns,
        dtype=torch.float32,
        device=x_MK.device,
    )
    pieces = _fill_pieces(groups, inputs, d_gate, d_up, num_nonzeros)
    kernel.launch_units(
        groups.num_units * 2 * slices,
        x_MK=x_MK,
        dy_MK=inputs.dy_MK,
        k=k,
        n=n,
        sums=sums,
        gated=gated,
        is_float=dtype == torch.float32,
        adds=adds,
        **groups.arrays("order", "unit"),
        **groups.counters("control", "progress"),
        **_piece_arrays(pieces),
        **out._asdict(),
    )


def group_columns(columns: Columns, num_neurons: int, slices: int) -> Groups:
    """Sorts the columns of a pattern by neuron, and schedules the work of `weight_grads`.

    ``slices``: of the columns of x and dy.
    """
    blocks, capacity = columns.offset.numel() - 1, columns.neuron.numel()
    place, rank, plan = (
        kernel_for(name, columns.offset)
        for name in ("place_columns", "rank_neurons", "plan_groups")
    )
    device, num_groups = columns.offset.device, -(-num_neurons // plan.exported("neurons"))
    layout, of_counters = _layouts(plan, num_neurons, capacity, blocks, slices)
    arrays, counters = Scratch(layout, device), Scratch(of_counters, device, torch.zeros)
    # Count each neuron's columns, order the neurons by that, and divide groups of similar neurons
    # into units of work.
    place.launch_units(
        -(-blocks * num_neurons // place.threads),
        blocks=blocks,
        offset=columns.offset,
        neuron=columns.neuron,
        mask=columns.mask,
        **counters("table", "count", "sample"),
    )
    rank.launch(
        num_groups, n=num_neurons, **counters("count", "sample", "group_columns"), **arrays("order")
    )
    plan.launch(
        num_groups,
        n=num_neurons,
        blocks=blocks,
        mask=columns.mask,
        **arrays("order", "group_rows", "group_first", "member", "piece", "unit"),
        **counters("table", "group_columns", "control"),
    )
    return Groups(plan, num_groups, num_groups + plan.exported("max_parts"), arrays, counters)


def _piece_arrays(pieces: Scratch) -> dict[str, Address]:
    """Arguments; the rows of dy are those of x where both have the same order."""
    arrays = pieces("work", "piece_x", "piece_values")
    by_order = "piece_dy" if "piece_dy" in pieces.layout.arrays else "piece_x"
    return arrays | {"piece_dy": pieces[by_order]}


def _fill_pieces(
    groups: Groups,
    inputs: BackwardInputs,
    d_gate: Tensor | None,
    d_up: Tensor,
    num_nonzeros: int | None,
) -> Scratch:
    """The values of the pieces, and their rows; ``cuda/common/weight_grad.cuh`` says how."""
    saved, gated, num_tokens = inputs.saved, d_gate is not None, len(inputs.x_MK)
    num_groups, capacity, rows = groups.num_groups, len(d_up), groups.plan.exported("piece_rows")
    # A group has at most all tokens as rows, and at most all tokens of its columns' blocks.
    most = min(num_groups * -(-num_tokens // rows), capacity + num_groups)
    if num_nonzeros is not None:  # each row has one; only a group's last piece may be part full
        most = min(most, num_nonzeros // rows + num_groups)
    # By piece, row and matrix, and 32 more that are not used.
    num_values = most * rows * (3 if gated else 2) + 1
    arrays = {
        "work": Array((groups.num_units, 2)),
        "piece_x": Array((most, rows)),
        "piece_values": Array((num_values, groups.plan.exported("neurons")), d_up.dtype),
    }
    if inputs.token_M is not None:
        arrays["piece_dy"] = Array((most, rows))
    pieces = Scratch(ScratchLayout(arrays), d_up.device)
    kernel_for("fill_pieces", d_up).launch_units(
        most,
        d_gate=d_gate,
        d_up=d_up,
        gate=saved.gate if gated else None,
        up=saved.up,
        gated=gated,
        token_M=inputs.token_M,
        **groups.arrays("member", "piece", "unit"),
        **groups.counters("control"),
        **_piece_arrays(pieces),
    )
    return pieces
