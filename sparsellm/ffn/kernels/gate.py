"""The gate's GEMM on Hopper (``cuda/sm90/gate.cuh``): its launch, whatever its epilogue packs."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from sparsellm.ffn.kernels import tensor_map
from sparsellm.ffn.kernels.compile import exported_like, grid_size
from sparsellm.ffn.types import TILE_NEURONS


class GateLaunch(NamedTuple):
    """What differs from call to call."""

    grid: int  # whole clusters
    map_of_x: bytes
    map_of_w: bytes


def gate_launch(kernel: str, x_MK: Tensor, w_NK: Tensor) -> GateLaunch:
    """The launch of a kernel that computes the gate of x with these weights."""
    (m, k), n = x_MK.shape, w_NK.shape[0]
    tokens, cluster = (exported_like(kernel, name, x_MK) for name in ("tokens", "cluster"))
    pairs = -(-m // (cluster * tokens)) * -(-n // TILE_NEURONS)  # tiles of a cluster
    return GateLaunch(
        grid_size(kernel, x_MK, cluster * pairs) // cluster * cluster,
        tensor_map.encode(x_MK.data_ptr(), m, k, tokens),
        # Each block of a cluster loads its share of the neurons.
        tensor_map.encode(w_NK.data_ptr(), n, k, TILE_NEURONS // cluster),
    )
