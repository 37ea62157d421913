"""Launches the union kernels (``cuda/common/union.cuh`` has the format) on torch tensors.

M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS` and contiguous.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.kernels.compiler.compile import kernel_for
from sparsellm.ffn.kernels.compiler.gpu_architecture import architecture_of
from sparsellm.ffn.kernels.gate import compute_gate
from sparsellm.ffn.kernels.launch import NO_TENSOR_MAP, Address, tensor_map
from sparsellm.ffn.kernels.scratch import Array, Scratch, ScratchLayout
from sparsellm.ffn.types import BLOCK_TOKENS, CONTROL_WORDS, TILE_NEURONS, Columns, FFNWeights

_MOST_ZEROED = 4  # arrays that union_entries fills with zeros
MAX_PARTS = 32  # of all token blocks that are split
MAX_GATHERED = 2**35 - 1  # 32-bit numbers of eight values, cuda/sm90/gate.cuh


class Splits(NamedTuple):
    """How a kernel that sums over a block's members splits heavy token blocks (split-K).

    ``cuda/common/units.cuh`` (`Splitting`) decides which token blocks are split and where;
    ``cuda/common/row_sums.cuh`` adds up the parts. Results are deterministic, but their bits
    differ from those of an unsplit sum.
    """

    slices: int  # of the result's columns
    slice_columns: int
    workers: int  # blocks of threads that share the work


def splits_for(x_MK: Tensor, num_neurons: int, token_M: Tensor | None) -> Splits | None:
    """For the FFN of these tokens; None in the natural order, or if no token block can be heavy."""
    if token_M is None or len(token_M) <= BLOCK_TOKENS:
        return None
    units, down = kernel_for("column_units", x_MK), kernel_for("union_down", x_MK)
    if num_neurons <= units.exported("min_part"):
        return None
    columns, workers = down.exported("columns"), down.num_multiprocessors * down.exported("blocks")
    return Splits(-(-x_MK.shape[1] // columns), columns, workers)


def parts_of(blocks: int, splits: Splits | None) -> int:
    """Into how many parts so many token blocks are split at most."""
    return blocks if splits is None else blocks + MAX_PARTS


def work_arrays(num_units: int, blocks: int, splits: Splits | None) -> dict[str, Array]:
    """The arrays of work that union_entries or column_units divides, and of split sums."""
    arrays = {
        "unit": Array((num_units, 2)),
        "order": Array((parts_of(blocks, splits), 2)),
        "control": Array((CONTROL_WORDS,)),
    }
    if splits is not None:
        places, values = MAX_PARTS * splits.slices, BLOCK_TOKENS * splits.slice_columns
        arrays["split"] = Array((MAX_PARTS, 2))
        arrays["arrived"] = Array((places,))
        arrays["sums"] = Array((places, values), torch.float32)
    return arrays


def sharing_of(work: Scratch, splits: Splits | None) -> dict[str, object]:
    """Arguments of union_entries and column_units."""
    if splits is None:
        return {"split": None, "arrived": None, "max_parts": 0, "slices": 0, "workers": 1}
    sizes = {"max_parts": MAX_PARTS, "slices": splits.slices, "workers": splits.workers}
    return {**work("split", "arrived"), **sizes}


def sums_of(work: Scratch, splits: Splits | None) -> Mapping[str, object]:
    """Arguments of the kernel that sums."""
    names = ("split", "arrived", "sums")
    return dict.fromkeys(names) if splits is None else work(*names)


class Union(NamedTuple):
    """An activation matrix of M × N in the union format."""

    arrays: Scratch  # of `_union_layout`
    blocks: int  # of tokens
    tiles: int  # of neurons
    splits: Splits | None  # None: heavy blocks are not split


@functools.lru_cache
def _union_layout(
    blocks: int, tiles: int, splits: Splits | None, element: torch.dtype
) -> ScratchLayout:
    return ScratchLayout(
        {
            "count": Array((blocks, tiles)),
            "neuron": Array((blocks, tiles, TILE_NEURONS), torch.uint8),
            "value": Array((blocks, tiles, TILE_NEURONS, BLOCK_TOKENS), element),
            "entry": Array((blocks, tiles * TILE_NEURONS)),
            "total": Array((blocks,)),
            **work_arrays(blocks * tiles, blocks, splits),
        }
    )


def empty_union(x_MK: Tensor, num_neurons: int, splits: Splits | None = None) -> Union:
    """Uninitialised memory for any pattern: the worst case is reserved, little of it written."""
    blocks, tiles = -(-x_MK.shape[0] // BLOCK_TOKENS), -(-num_neurons // TILE_NEURONS)
    layout = _union_layout(blocks, tiles, splits, x_MK.dtype)
    return Union(Scratch(layout, x_MK.device), blocks, tiles, splits)


def gathers(x_MK: Tensor) -> bool:
    """Whether `gate_union` and `union_up` can gather x's rows in sorted order, on this GPU."""
    return architecture_of(x_MK.get_device()).makes_gate and x_MK.numel() <= MAX_GATHERED


def gate_union(
    x_MK: Tensor,
    w: FFNWeights,
    out: Union,
    observed: int = 0,
    *,
    token_M: Tensor | None = None,
    zeroed: Sequence[Tensor] = (),
) -> None:
    """`compute_gate` in the union format; ``observed`` and ``zeroed`` as in `union_entries`."""
    arrays = out.arrays("count", "neuron", "value", "control")
    compute_gate("union", x_MK, w, arrays, token_M)
    union_entries(out, observed, zeroed)


def union_entries(union: Union, observed: int = 0, zeroed: Sequence[Tensor] = ()) -> None:
    """Concatenates the members of each token block, from their counts and neurons.

    Args:
        union: as a gate kernel leaves it, ``control`` all zero.
        observed: address of an int32, pinned, for the mean number of members of a token block; 0
            for none.
        zeroed: at most four tensors of 4 bytes or 8 per element, for the next kernels to count in.
    """
    kernel_for("union_entries", union.arrays.memory).launch(
        union.blocks,
        tiles_n=union.tiles,
        observed=Address(observed),
        **union.arrays("count", "neuron", "entry", "total", "unit", "order", "control"),
        **sharing_of(union.arrays, union.splits),
        **(_arrays_to_zero(zeroed) if zeroed else _NOTHING_TO_ZERO),
    )


def _arrays_to_zero(arrays: Sequence[Tensor]) -> dict[str, object]:
    arguments: dict[str, object] = {}
    for i in range(_MOST_ZEROED):
        array = arrays[i] if i < len(arrays) else None
        arguments |= {f"zeroed_{i}": array, f"words_{i}": 0 if array is None else array.nbytes // 4}
    return arguments


_NOTHING_TO_ZERO = _arrays_to_zero(())


def map_of(matrix_MK: Tensor) -> bytes:
    """The tensor map of a matrix of tokens; none where kernels do not read it."""
    m, k = matrix_MK.shape
    if not architecture_of(matrix_MK.get_device()).tensor_maps:
        return NO_TENSOR_MAP
    return tensor_map(matrix_MK.data_ptr(), m, k, BLOCK_TOKENS)


def union_up(
    x_MK: Tensor,
    w: FFNWeights,
    gate: Union,
    columns: Columns | None = None,
    l1: Tensor | None = None,
    *,
    token_M: Tensor | None = None,
) -> None:
    """``gate`` ← gate * (x W_uᵀ + b_u), in place.

    With ``relu_up`` gate * relu(x W_uᵀ + b_u). ``token_M`` as in `gate_union`.

    In training it also stores x W_uᵀ + b_u in the ``up`` of ``columns``, whose offsets it reads,
    and parts of Σ|h| in ``l1``: (blocks, tiles, 8) fp32, zero before.
    """
    offset, up = (None, None) if columns is None else (columns.offset, columns.up)
    kernel_for("union_up", x_MK).launch_units(
        gate.blocks * gate.tiles,
        map_of_x=map_of(x_MK),
        x_MK=x_MK,
        token_M=token_M,
        m=x_MK.shape[0],
        w_NK=w.up_NK,
        bias_N=w.b_up_N,
        k=x_MK.shape[1],
        tiles_n=gate.tiles,
        offset=offset,
        up=up,
        capacity=0 if up is None else len(up),
        l1=l1,
        relu_up=w.relu_up,
        **gate.arrays("entry", "unit", "control", "value"),
    )


def union_down(h: Union, w: FFNWeights, y_MK: Tensor, token_M: Tensor | None = None) -> None:
    """``y`` ← h W_dᵀ + b_d; W_d is read transposed.

    ``token_M``: (M,) int32, the row of y that each row of h becomes; None where it is the same.
    """
    (m, k), kernel = y_MK.shape, kernel_for("union_down", y_MK)
    kernel.launch_units(
        parts_of(h.blocks, h.splits) * -(-k // kernel.exported("columns")),
        w_NK=w.down_NK,
        bias_K=w.b_down_K,
        m=m,
        k=k,
        tiles_n=h.tiles,
        token_M=token_M,
        y_MK=y_MK,
        **h.arrays("entry", "order", "control", "value"),
        **sums_of(h.arrays, h.splits),
    )
