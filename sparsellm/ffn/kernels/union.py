"""Launches the union kernels (``cuda/common/union.cuh`` has the format) on torch tensors.

M tokens, K hidden_size, N intermediate_size; everything of one of `ELEMENTS` and contiguous.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from sparsellm.ffn.kernels import tensor_map
from sparsellm.ffn.kernels.compile import kernel_for
from sparsellm.ffn.kernels.gate import compute_gate
from sparsellm.ffn.kernels.gpu_architecture import architecture_of
from sparsellm.ffn.kernels.launch import Address
from sparsellm.ffn.quantised import QuantisedRows
from sparsellm.ffn.types import BLOCK_TOKENS, CONTROL_WORDS, TILE_NEURONS

_MOST_ZEROED = 4  # arrays that union_entries fills with zeros
MAX_PARTS = 32  # of all token blocks that are split
MAX_GATHERED = 2**35 - 1  # 32-bit numbers of eight values, cuda/sm90/gate.cuh


@dataclass(frozen=True)
class Splits:
    """Memory for the split sums (split-K) of a kernel that sums over a block's members; used once.

    ``cuda/common/units.cuh`` (`Splitting`) decides which token blocks are split and where;
    ``cuda/common/partial_sums.cuh`` adds up the parts. Results are deterministic, but their bits
    differ from those of an unsplit sum.
    """

    part: Tensor  # (32, 2) int32
    arrived: Tensor  # (32 · slices,) int32
    slices: int  # of the result's columns
    slice_columns: int
    workers: int  # blocks of threads that share the work


def sharing_of(splits: Splits | None) -> tuple[object, ...]:
    """The arguments of union_entries and column_units."""
    if splits is None:
        return (None, None, 0, 0, 1)
    return (splits.part, splits.arrived, MAX_PARTS, splits.slices, splits.workers)


def sums_of(splits: Splits | None) -> tuple[object, ...]:
    """The arguments of the kernel that sums, with memory for the sums of the parts."""
    if splits is None:
        return (None, None, None)
    size = MAX_PARTS * splits.slices * BLOCK_TOKENS * splits.slice_columns
    sums = torch.empty(size, dtype=torch.float32, device=splits.part.device)
    return (splits.part, splits.arrived, sums)


def allocate_splits(x_MK: Tensor, num_neurons: int) -> Splits | None:
    """Memory for the FFN of these tokens; None where no token block can be heavy."""
    num_tokens, hidden_size = x_MK.shape
    if num_tokens <= BLOCK_TOKENS:
        return None
    units, down = kernel_for("column_units", x_MK), kernel_for("union_down", x_MK)
    if num_neurons <= units.exported("min_part"):
        return None
    slice_columns = down.exported("columns")
    slices = -(-hidden_size // slice_columns)
    ints = torch.empty(MAX_PARTS * (2 + slices), dtype=torch.int32, device=x_MK.device)
    return Splits(
        part=ints[: 2 * MAX_PARTS].view(MAX_PARTS, 2),
        arrived=ints[2 * MAX_PARTS :],
        slices=slices,
        slice_columns=slice_columns,
        workers=down.num_multiprocessors * down.exported("blocks"),
    )


@dataclass(frozen=True)
class Union:
    """An activation matrix of M × N in the union format."""

    count: Tensor  # (blocks, tiles) int32
    neuron: Tensor  # (blocks, tiles, 256) uint8
    value: Tensor  # (blocks, tiles, 256, 64), elements
    entry: Tensor  # (blocks, tiles * 256) int32
    total: Tensor  # (blocks,) int32
    unit: Tensor  # (blocks * tiles, 2) int32
    order: Tensor  # (blocks, or blocks + 32 with splits, 2) int32
    control: Tensor  # (8,) int32
    splits: Splits | None  # None: heavy blocks are not split


def empty_union(
    num_tokens: int,
    num_neurons: int,
    device: torch.device,
    splits: Splits | None = None,
    element: torch.dtype = torch.bfloat16,
) -> Union:
    """Uninitialised memory for any pattern: the worst case is reserved, little of it written."""
    blocks, tiles = -(-num_tokens // BLOCK_TOKENS), -(-num_neurons // TILE_NEURONS)
    parts = blocks if splits is None else blocks + MAX_PARTS

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Union(
        count=empty(blocks, tiles),
        neuron=empty(blocks, tiles, TILE_NEURONS, dtype=torch.uint8),
        value=empty(blocks, tiles, TILE_NEURONS, BLOCK_TOKENS, dtype=element),
        entry=empty(blocks, tiles * TILE_NEURONS),
        total=empty(blocks),
        unit=empty(blocks * tiles, 2),
        order=empty(parts, 2),
        control=empty(CONTROL_WORDS),
        splits=splits,
    )


def gathers(x_MK: Tensor) -> bool:
    """Whether `gate_union` and `union_up` can gather x's rows in a token order, on this GPU."""
    return architecture_of(x_MK.get_device()).makes_gate and x_MK.numel() <= MAX_GATHERED


def gate_union(  # noqa: PLR0917
    x_MK: Tensor,
    w_NK: Tensor | QuantisedRows,
    bias_N: Tensor | None,
    threshold: float,
    out: Union,
    observed: int = 0,
    *,
    token_M: Tensor | None = None,
    zeroed: Sequence[Tensor] = (),
    activation: str = "relu",
) -> None:
    """`compute_gate` in the union format; ``observed`` and ``zeroed`` as in `union_entries`."""
    arrays = (out.count, out.neuron, out.value, out.control)
    compute_gate("union", x_MK, w_NK, bias_N, threshold, arrays, token_M, activation)
    union_entries(out, observed, zeroed)


def union_entries(union: Union, observed: int = 0, zeroed: Sequence[Tensor] = ()) -> None:
    """Concatenates the members of each token block, from their counts and neurons.

    Args:
        union: as a gate kernel leaves it, ``control`` all zero.
        observed: address of an int32, pinned, for the mean number of members of a token block; 0
            for none.
        zeroed: at most four tensors of 4 bytes or 8 per element, for the next kernels to count in.
    """
    arrays = [*zeroed, *(None,) * (_MOST_ZEROED - len(zeroed))]
    words = [(array, 0 if array is None else array.nbytes // 4) for array in arrays]
    blocks, tiles = union.count.shape
    kernel_for("union_entries", union.count).launch(
        blocks,
        *(union.count, union.neuron, tiles, union.entry, union.total, union.unit, union.order),
        *sharing_of(union.splits),
        *(union.control, Address(observed), *chain.from_iterable(words)),
    )


def tokens_of(matrix_MK: Tensor, token_M: Tensor | None) -> tuple[object, ...]:
    """A kernel's arguments for a matrix of tokens, in a token order or the natural one."""
    m, k = matrix_MK.shape
    as_map = tensor_map.NONE
    if architecture_of(matrix_MK.get_device()).tensor_maps:
        as_map = tensor_map.encode(matrix_MK.data_ptr(), m, k, BLOCK_TOKENS)
    return (as_map, matrix_MK, token_M, m)


class Kept(NamedTuple):
    """What `union_up` stores for training, see ``cuda/common/columns.cuh``."""

    offset: Tensor  # (blocks + 1,) int32, is read
    up: Tensor  # (C, 64) bf16: x Wᵀ + bias
    l1: Tensor  # (blocks, tiles, 8) fp32, zero before: parts of Σ|h|


def union_up(
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    gate: Union,
    kept: Kept | None = None,
    *,
    relu_up: bool = False,
    token_M: Tensor | None = None,
) -> None:
    """``gate`` ← gate * (x Wᵀ + bias), in place; also stores ``kept`` for training.

    With ``relu_up`` gate * relu(x Wᵀ + bias). ``token_M`` as in `gate_union`.
    """
    offset, up, l1 = kept or (None, None, None)
    kernel_for("union_up", x_MK).launch_units(
        gate.unit.shape[0],
        *(*tokens_of(x_MK, token_M), w_NK, bias_N, x_MK.shape[1], gate.count.shape[1]),
        *(gate.entry, gate.unit, gate.control, gate.value),
        *(offset, up, 0 if up is None else len(up), l1, relu_up),
    )


def union_down(
    h: Union,
    w_NK: Tensor | None,
    bias_K: Tensor | None,
    y_MK: Tensor,
    token_M: Tensor | None = None,
) -> None:
    """``y`` ← h W + bias, the weight neuron by neuron: ``down_proj.weight`` transposed.

    ``token_M``: (M,) int32, the row of y that each row of h becomes; None where it is the same.
    """
    (m, k), kernel = y_MK.shape, kernel_for("union_down", y_MK)
    kernel.launch_units(
        h.order.shape[0] * -(-k // kernel.exported("columns")),
        *(w_NK, bias_K, m, k, h.count.shape[1]),
        *(h.entry, h.order, *sums_of(h.splits), h.control, h.value, token_M, y_MK),
    )
