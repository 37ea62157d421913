"""Forward and backward of the FFN in the paper's hybrid format, for training.

Shapes: M tokens, K hidden_size, N intermediate_size, W width of the ELL matrix, R rows of the dense
backup; everything bf16 and contiguous; W_d is read transposed. ``cuda/common/hybrid.cuh`` has the
format, `formats.FORMATS` the specification.
"""

import torch
from torch import Tensor

from sparsellm.ffn.formats import ROUND_ROWS, Hybrid, empty_hybrid
from sparsellm.ffn.kernels import twell
from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.launch import Address
from sparsellm.ffn.types import (
    CONTROL_WORDS,
    DENSE_ROW_TILE,
    MAX_ELL_WIDTH,
    BackwardInputs,
    FFNStats,
    FFNWeights,
    MatrixGradients,
    Room,
)

# Rows of a block of threads; fewer where its list (cuda/common/walk.cuh) would not hold all their
# non-zeros.
_MOST_ROWS_EACH = 4
# With so many, the warps that run at a time read two slices: 17 MB each of x and ∇y at M 16,384.
_SEGMENTS_PER_MULTIPROCESSOR = 8


def _rows_of(saved: Hybrid) -> tuple[int, dict[str, object]]:
    """The blocks of threads that process the ELL rows, and these as kernels take them: by name."""
    m, width = saved.word.shape
    each = min(_MOST_ROWS_EACH, MAX_ELL_WIDTH // width)
    rows = {"word": saved.word, "count": saved.length, "width": width, "rows_each": each}
    return -(-m // each), rows


def forward(
    x_MK: Tensor, w: FFNWeights, room: Room, token_M: Tensor | None = None
) -> tuple[Tensor, FFNStats, Hybrid]:
    """y (M, K), statistics, and the input of `backward`; exact even if rows overflow.

    The memory of TwELL and of one round's dense activations is released when this returns.
    ``token_M``: (M,) int32, the token of each row of x; y and nnz are in the order of the tokens.
    """
    (m, k), n, gated = x_MK.shape, w.up_NK.shape[0], w.gate_NK is not None
    saved = empty_hybrid(x_MK, n, room, gated=gated)
    (blocks, rows), y_MK = _rows_of(saved), torch.empty_like(x_MK)
    # L1 of each block of rows, then of the dense rows.
    l1 = x_MK.new_zeros(blocks + twell.num_l1_parts(x_MK, w), dtype=torch.float32)
    backup = twell.KeptRows(
        gate=saved.backup_gate if gated else None,
        up=saved.backup_up,
        l1=Address(l1.data_ptr() + blocks * l1.itemsize),
        active_N=x_MK.new_zeros(n, dtype=torch.int32),
        active_bits=x_MK.new_empty(len(saved.table), -(-n // 32), dtype=torch.int32),
        union_sum=x_MK.new_zeros((), dtype=torch.int64),
    )
    # The gate in TwELL, then as it is kept: ELL rows, and the heavy rows in a list.
    gate = twell.Twell(twell.empty_words(m, n, x_MK.device), saved.row, saved.counted)
    twell.gate_twell(x_MK, w, gate)
    nnz_M = _fill(saved, gate, x_MK, backup, token_M)
    up = saved.up if gated else None
    if gated:
        kernel_for("hybrid_up", x_MK).launch(
            blocks, x_MK=x_MK, w_up_NK=w.up_NK, m=m, k=k, up=up, l1=l1, **rows
        )
    down = kernel_for("hybrid_down", x_MK, "relu" if gated else w.activation)
    slices = twell.column_slices(down, w.down_NK)
    down.launch(
        blocks * slices,
        up=up,
        w_down_NK=w.down_NK,
        m=m,
        k=k,
        slices=slices,
        token=token_M,
        l1=l1,
        y_MK=y_MK,
        **rows,
    )
    # Heavy rows are computed as dense ones, and as many of them kept as the backup has room for.
    twell.dense_rows(gate, x_MK, w, y_MK, backup, token_M=token_M)
    return y_MK, FFNStats(l1.sum(), nnz_M, backup.active_N, backup.union_sum), saved


def _fill(
    saved: Hybrid, gate: twell.Twell, x_MK: Tensor, backup: twell.KeptRows, token_M: Tensor | None
) -> Tensor:
    """Converts a gate in TwELL to the hybrid format, apart from up and the backup, and counts.

    Returns:
        Each token's non-zeros, (M,) int32. `dense_rows` completes the other statistics.
    """
    (m, width), (blocks, n) = saved.word.shape, saved.table.shape
    nnz_M = torch.empty_like(saved.length)
    kernel_for("hybrid_rows", x_MK).launch(
        blocks,
        twell_word=gate.word,
        m=m,
        n=n,
        token=token_M,
        width=width,
        backup=len(saved.backup_up),
        word=saved.word,
        count=saved.length,
        heavy=saved.heavy,
        list=saved.row,
        control=saved.counted,
        nnz_M=nnz_M,
        active_N=backup.active_N,
        active_bits=backup.active_bits,
        union_sum=backup.union_sum,
        table=saved.table,
    )
    return nnz_M


def backward(inputs: BackwardInputs, out: MatrixGradients, *, adds: bool) -> Tensor:
    """The gradient of x, in the order of its rows; those of the matrices are written to ``out``.

    Rows that did not fit into the backup are recomputed, without involving the host. With ``adds``
    the matrices' gradients are added to ``out``, which is then fp32.
    """
    inputs = inputs._replace(d_l1=inputs.d_l1.to(torch.float32))
    dy_MK, d_l1, x_MK, w, saved, token_M = inputs
    gated = w.gate_NK is not None
    pair, dx_MK = torch.empty_like(saved.word), torch.empty_like(x_MK)
    (blocks, rows), (m, k) = _rows_of(saved), x_MK.shape
    # ELL rows: ∇h at each non-zero, ∇x, the matrices' gradients. Heavy rows follow, dense.
    kernel_for("hybrid_grad", x_MK, w.activation).launch(
        blocks,
        dy_MK=dy_MK,
        up=saved.up if gated else None,
        w_down_NK=w.down_NK,
        l1=d_l1,
        m=m,
        k=k,
        token=token_M,
        pair=pair,
        **rows,
    )
    grad_x = kernel_for("hybrid_grad_x", x_MK)
    slices = twell.column_slices(grad_x, w.up_NK, w.gate_NK)
    grad_x.launch(
        blocks * slices,
        pair=pair,
        w_up_NK=w.up_NK,
        w_gate_NK=w.gate_NK,
        m=m,
        k=k,
        slices=slices,
        dx_MK=dx_MK,
        **rows,
    )
    # Each of the two uses other counters.
    control = saved.length.new_zeros(CONTROL_WORDS)
    _weight_grads(inputs, pair, out, control, adds=adds)
    _add_dense_rows(inputs, dx_MK, out, control)
    return dx_MK


def _weight_grads(
    inputs: BackwardInputs, pair: Tensor, out: MatrixGradients, control: Tensor, *, adds: bool
) -> None:
    """Weight gradients of the ELL rows, neuron by neuron."""
    dy_MK, _, x_MK, w, saved, token_M = inputs
    (m, k), (_, width), n = x_MK.shape, saved.word.shape, w.up_NK.shape[0]
    gated, blocks = w.gate_NK is not None, len(saved.table)
    before, first = torch.empty_like(saved.table, dtype=torch.int32), saved.length.new_empty(n + 1)
    source = torch.empty_like(saved.word)
    # Sorts the non-zeros by neuron: how many each block has, then the place of each.
    count = kernel_for("hybrid_count", x_MK)
    count.launch(
        -(-n // count.threads),
        n=n,
        blocks=blocks,
        table=saved.table,
        before=before,
        first=first,
        control=control,
    )
    kernel_for("hybrid_place", x_MK).launch(
        blocks,
        m=m,
        n=n,
        width=width,
        word=saved.word,
        count=saved.length,
        before=before,
        first=first,
        source=source,
    )
    # Segments have equally many non-zeros; `carry` has what a neuron sums in several of them.
    kernel = kernel_for("hybrid_weight_grad", x_MK)
    slices = -(-k // kernel.exported("chunk_columns"))
    segments = kernel.blocks_for(m * width, _SEGMENTS_PER_MULTIPROCESSOR)
    carry = torch.empty(segments, 2, 3, k, dtype=torch.float32, device=x_MK.device)
    sums = {
        "k": k,
        "n": n,
        "first": first,
        "segments": segments,
        "carry": carry,
        "is_float": out.up_NK.dtype == torch.float32,
        "adds": adds,
        **out._asdict(),
    }
    grid = -(-segments * slices // (kernel.threads // 32))
    kernel.launch(
        grid,
        x_MK=x_MK,
        dy_MK=dy_MK,
        word=saved.word,
        pair=pair,
        up=saved.up if gated else None,
        width=width,
        token=token_M,
        source=source,
        **sums,
    )
    kernel_for("hybrid_carry", x_MK).launch(grid, **sums)


def _add_dense_rows(
    inputs: BackwardInputs, dx_MK: Tensor, grads: MatrixGradients, control: Tensor
) -> None:
    """Adds the gradients of the rows in the backup, and of those beyond it."""
    dy_MK, d_l1, x_MK, w, saved, token_M = inputs
    (m, k), n, backup_rows = x_MK.shape, w.up_NK.shape[0], len(saved.backup_up)
    gated = w.gate_NK is not None
    # Rounds are whole row tiles; a round that does not lie wholly in the backup is recomputed.
    tile = DENSE_ROW_TILE
    room = min(ROUND_ROWS, max(-(-backup_rows // tile), 1) * tile)
    scratch = x_MK.new_empty(3, room, n)
    kernel = kernel_for("dense_rows_grad", x_MK, w.activation)
    kernel.launch(
        kernel.blocks_for(-(-n // (tile // 2)) * -(-m // tile)),
        x_MK=x_MK,
        dy_MK=dy_MK,
        first_NK=w.first[0],
        second_NK=w.second[0],
        w_down_NK=w.down_NK,
        l1=d_l1,
        n=n,
        k=k,
        token=token_M,
        list=saved.row,
        counted=saved.counted,
        control=control,
        room=room,
        gate=saved.backup_gate if gated else None,
        up=saved.backup_up,
        backup=backup_rows,
        scratch_gate=scratch[0],
        scratch_up=scratch[1],
        scratch_h=scratch[2],
        partial=twell.partial_sums(kernel, x_MK),
        dx_MK=dx_MK,
        is_float=grads.up_NK.dtype == torch.float32,
        **grads._asdict(),
    )
