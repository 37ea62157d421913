"""Launches the union kernels (``cuda/union.cuh`` has the format) on torch tensors.

M tokens, K hidden_size, N intermediate_size; everything bf16 and contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sparsellm.kernels import tensor_map
from sparsellm.kernels.compile import load_for, pointer
from sparsellm.reference import BLOCK_TOKENS

TILE_NEURONS = 256


@dataclass(frozen=True)
class Union:
    """An activation matrix of M × N in the union format."""

    count: Tensor  # (blocks, tiles) int32
    neuron: Tensor  # (blocks, tiles, 256) uint8
    value: Tensor  # (blocks, tiles, 256, 64) bf16
    entry: Tensor  # (blocks, tiles * 256) int32
    total: Tensor  # (blocks,) int32
    unit: Tensor  # (blocks * tiles, 2) int32
    order: Tensor  # (blocks, 2) int32
    control: Tensor  # (8,) int32


def empty_union(num_tokens: int, num_neurons: int, device: torch.device) -> Union:
    """Room for any pattern, uninitialised; reserved whole, touched where neurons fire."""
    blocks, tiles = -(-num_tokens // BLOCK_TOKENS), -(-num_neurons // TILE_NEURONS)

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return Union(
        count=empty(blocks, tiles),
        neuron=empty(blocks, tiles, TILE_NEURONS, dtype=torch.uint8),
        value=empty(blocks, tiles, TILE_NEURONS, BLOCK_TOKENS, dtype=torch.bfloat16),
        entry=empty(blocks, tiles * TILE_NEURONS),
        total=empty(blocks),
        unit=empty(blocks * tiles, 2),
        order=empty(blocks, 2),
        control=empty(8),
    )


def gate_union(  # noqa: PLR0917
    x_MK: Tensor,
    w_NK: Tensor,
    bias_N: Tensor | None,
    threshold: float,
    out: Union,
    observed: int = 0,
) -> None:
    """``out`` ← relu(x Wᵀ + bias); what is not above ``threshold`` counts as zero.

    ``observed`` as in `union_entries`.
    """
    (m, k), n = x_MK.shape, w_NK.shape[0]
    kernel, stream = load_for("gate_union", x_MK)
    clusters = min(kernel.num_multiprocessors // 2, -(-m // 256) * out.count.shape[1])
    kernel.launch(
        2 * clusters,
        384,
        (
            tensor_map.encode(x_MK.data_ptr(), m, k, 128),
            tensor_map.encode(w_NK.data_ptr(), n, k, 128),
            pointer(bias_N),
            np.int32(m),
            np.int32(n),
            np.int32(k),
            np.float32(threshold),
            out.count.data_ptr(),
            out.neuron.data_ptr(),
            out.value.data_ptr(),
            out.control.data_ptr(),
        ),
        stream,
    )
    union_entries(out, observed)


def union_entries(union: Union, observed: int = 0) -> None:
    """Strings the members of each token block together, from their counts and neurons.

    Args:
        union: as a gate kernel leaves it, ``control`` all zero.
        observed: address of an int32, pinned, for the mean number of members of a token block; 0
            for none.
    """
    kernel, stream = load_for("union_entries", union.count)
    blocks, tiles = union.count.shape
    kernel.launch(
        blocks,
        256,
        (
            union.count.data_ptr(),
            union.neuron.data_ptr(),
            np.int32(tiles),
            union.entry.data_ptr(),
            union.total.data_ptr(),
            union.unit.data_ptr(),
            union.order.data_ptr(),
            union.control.data_ptr(),
            observed,
        ),
        stream,
    )


class Kept(NamedTuple):
    """What `union_up` leaves for training, see ``cuda/columns.cuh``."""

    offset: Tensor  # (blocks + 1,) int32, is read
    up: Tensor  # (C, 64) bf16: x Wᵀ + bias
    l1: Tensor  # (blocks, tiles, 8) fp32, zero before: parts of Σ|h|


def union_up(
    x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None, gate: Union, kept: Kept | None = None
) -> None:
    """``gate`` ← gate * (x Wᵀ + bias), in place; and what training keeps."""
    m, k = x_MK.shape
    kernel, stream = load_for("union_up", x_MK)
    offset, up, l1 = kept or (None, None, None)
    kernel.launch(
        min(kernel.num_multiprocessors, gate.unit.shape[0]),
        384,
        (
            tensor_map.encode(x_MK.data_ptr(), m, k, BLOCK_TOKENS),
            w_NK.data_ptr(),
            pointer(bias_N),
            np.int32(k),
            np.int32(gate.count.shape[1]),
            gate.entry.data_ptr(),
            gate.unit.data_ptr(),
            gate.control.data_ptr(),
            gate.value.data_ptr(),
            pointer(offset),
            pointer(up),
            np.uint64(0 if up is None else len(up)),
            pointer(l1),
        ),
        stream,
    )


def union_down(h: Union, w_NK: Tensor, bias_K: Tensor | None, y_MK: Tensor) -> None:
    """``y`` ← h W + bias, the weight neuron by neuron: ``down_proj.weight`` transposed."""
    m, k = y_MK.shape
    kernel, stream = load_for("union_down", y_MK)
    kernel.launch(
        min(kernel.num_multiprocessors, h.total.shape[0] * -(-k // 512)),
        384,
        (
            w_NK.data_ptr(),
            pointer(bias_K),
            np.int32(m),
            np.int32(k),
            np.int32(h.count.shape[1]),
            h.entry.data_ptr(),
            h.order.data_ptr(),
            h.control.data_ptr(),
            h.value.data_ptr(),
            y_MK.data_ptr(),
        ),
        stream,
    )
