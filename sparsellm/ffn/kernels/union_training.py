"""Forward and backward of the FFN on its sparsity pattern, for training.

Shapes: M tokens, K hidden_size, N intermediate_size, C capacity in columns; everything bf16 and
contiguous; W_d is read transposed. `formats.FORMATS` is the specification.
"""

import functools
import time

import torch
from torch import Tensor

from sparsellm.ffn.kernels import union
from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.scratch import Scratch, ScratchLayout
from sparsellm.ffn.kernels.weight_grad import weight_grads
from sparsellm.ffn.reference import empty_columns
from sparsellm.ffn.types import (
    TILE_NEURONS,
    BackwardInputs,
    Columns,
    FFNStats,
    FFNWeights,
    MatrixGradients,
    Room,
)

_POLL_SECONDS = 2e-5


def forward(
    x_MK: Tensor, w: FFNWeights, room: Room, token_M: Tensor | None = None
) -> tuple[Tensor, FFNStats, Columns]:
    """y (M, K), statistics, and the input of `backward`; exact at any capacity.

    The M × N scratch memory is released when this returns; only the columns stay until the backward
    pass. ``token_M``: (M,) int32, the token of each row of x; y and nnz are in the order of the
    tokens.
    """
    n = w.up_NK.shape[0]
    gate = union.empty_union(x_MK, n, union.splits_for(x_MK, n, token_M))
    columns, stats = _activations(x_MK, w, room, gate, token_M)
    y_MK = torch.empty_like(x_MK)
    union.union_down(gate, w, y_MK, token_M)
    return y_MK, stats, columns


def backward(inputs: BackwardInputs, out: MatrixGradients, *, adds: bool) -> Tensor:
    """The gradient of x, in the order of its rows; those of the matrices are written to ``out``.

    A pattern that did not fit into its columns is recomputed. With ``adds`` the matrices' gradients
    are added to ``out``, which is then fp32.

    Raises:
        ValueError: a CUDA graph is being captured, and the pattern might not fit.
    """
    dy_MK, d_l1, x_MK, w, saved, token_M = inputs
    (m, k), n = x_MK.shape, w.up_NK.shape[0]
    blocks, capacity = len(saved.offset) - 1, len(saved.neuron)
    # A capacity of the worst case fits every pattern, and the host need not ask.
    num_nonzeros = None
    if capacity < blocks * n:
        needed, num_nonzeros = _needed(saved, blocks * n)
        if needed > capacity:
            saved, _ = _activations(x_MK, w, Room(needed), union.empty_union(x_MK, n), token_M)
            capacity = needed
    gate = None if w.gate_NK is None else saved.gate
    splits = union.splits_for(x_MK, n, token_M)
    # Divides the columns among blocks of threads.
    units = kernel_for("column_units", x_MK)
    num_units = capacity // units.exported("members") + blocks
    work = Scratch(_work_layout(num_units, blocks, splits), x_MK.device)
    units.launch(
        1,
        offset=saved.offset,
        blocks=blocks,
        **work("unit", "order", "control"),
        **union.sharing_of(work, splits),
    )

    # ∇h on the pattern, and from it the gradients of both projections.
    d_up, d_gate = torch.empty_like(saved.up), None if gate is None else torch.empty_like(gate)
    kernel_for("columns_grad", x_MK, w.activation).launch_units(
        num_units,
        map_of_dy=union.map_of(dy_MK),
        dy_MK=dy_MK,
        token_M=token_M,
        m=m,
        w_down_NK=w.down_NK,
        k=k,
        offset=saved.offset,
        neuron=saved.neuron,
        gate=gate,
        up=saved.up,
        l1=d_l1.to(torch.float32),
        d_gate=d_gate,
        d_up=d_up,
        **work("unit", "control"),
    )
    # These times the weights: ∇x.
    dx_MK = torch.empty_like(x_MK)
    columns = kernel_for("union_down", x_MK).exported("columns")
    kernel_for("columns_down", x_MK).launch_units(
        union.parts_of(blocks, splits) * -(-k // columns),
        w_up_NK=w.up_NK,
        w_gate_NK=w.gate_NK,
        m=m,
        k=k,
        offset=saved.offset,
        neuron=saved.neuron,
        d_up=d_up,
        d_gate=d_gate,
        dx_MK=dx_MK,
        **work("order", "control"),
        **union.sums_of(work, splits),
    )
    inputs = inputs._replace(saved=saved)
    weight_grads(inputs, d_gate, d_up, out, adds=adds, num_nonzeros=num_nonzeros)
    return dx_MK


@functools.lru_cache
def _work_layout(num_units: int, blocks: int, splits: union.Splits | None) -> ScratchLayout:
    return ScratchLayout(union.work_arrays(num_units, blocks, splits))


def _needed(saved: Columns, worst: int) -> tuple[int, int | None]:
    """Columns and non-zeros of a pattern; None for the latter where the host does not know it.

    Waits until forward has counted its columns, but not for kernels queued after it.

    The host usually runs ahead: when it begins the backward pass, with the last layer, that layer's
    forward may still be queued on the GPU. A copy from the GPU here would wait for the head and the
    loss too, and the GPU would run out of work.
    """
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(
            f"sparse_ffn: backward in a CUDA graph needs room for any pattern: capacity {worst:,}"
        )
    while min(words := saved.needed.tolist()) < 0:
        if torch.cuda.current_stream().query():  # also raises the error of a failed kernel
            # Forward was captured in a CUDA graph, or ran elsewhere.
            return int(saved.offset[-1]), None
        time.sleep(_POLL_SECONDS)
    return words[0], words[1]


def _activations(
    x_MK: Tensor, w: FFNWeights, room: Room, scratch: union.Union, token_M: Tensor | None
) -> tuple[Columns, FFNStats]:
    """h in ``scratch``; its columns and statistics."""
    m, n, blocks, tiles = x_MK.shape[0], w.up_NK.shape[0], scratch.blocks, scratch.tiles
    gated = w.gate_NK is not None
    columns = empty_columns(x_MK, n, room, gated=gated)
    values = columns.gate if gated else columns.up
    active_N = torch.empty(n, dtype=torch.int32, device=x_MK.device)
    nnz_M = torch.empty(m, dtype=torch.int32, device=x_MK.device)
    needed = torch.empty(2, dtype=torch.int64, device=x_MK.device)
    # As many blocks of threads as fit on the GPU, or as have work.
    kernel = kernel_for("union_columns", x_MK, "relu" if gated else w.activation)
    warps = kernel.threads // 32
    most = -(-blocks * tiles * TILE_NEURONS // (kernel.exported("batch") * warps))
    grid = kernel.blocks_for(most, kernel.exported("blocks"))
    # Parts of L1, which union_up adds up, or without a gate union_columns.
    zeroed = [needed, active_N, nnz_M]
    if gated:
        parts = kernel_for("union_up", x_MK).exported("parts")
        l1 = torch.empty(blocks, tiles * parts, device=x_MK.device)
        zeroed.append(l1)
    else:
        l1 = torch.empty(grid, warps, device=x_MK.device)
    union.gate_union(x_MK, w, scratch, zeroed=zeroed)
    kernel.launch(
        grid,
        tiles_n=tiles,
        m=m,
        capacity=len(values),
        offset=columns.offset,
        neuron=columns.neuron,
        mask=columns.mask,
        columns=values,
        active_N=active_N,
        token_M=token_M,
        nnz_M=nnz_M,
        needed=needed,
        l1=None if gated else l1,
        **scratch.arrays("entry", "total", "value"),
    )
    if gated:
        union.union_up(x_MK, w, scratch, columns, l1)
    if room.capacity != blocks * n:
        columns = columns._replace(needed=_on_the_host(needed))
    # In two steps: a single reduction would run on one block of threads (H200: 12 µs).
    return columns, FFNStats(l1.sum(1).sum(), nnz_M, active_N, union_sum=needed[0])


def _on_the_host(counts: Tensor) -> Tensor:
    """An asynchronous copy on the host: -1 until it arrives, and in the capture of a CUDA graph."""
    if torch.cuda.is_current_stream_capturing():
        return torch.full(counts.shape, -1)
    copy = torch.full(counts.shape, -1, pin_memory=True)
    return copy.copy_(counts, non_blocking=True)
