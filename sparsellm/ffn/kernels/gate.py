"""The gate's GEMM on Hopper (``cuda/sm90/gate.cuh``): its launch, whatever its epilogue packs."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from sparsellm.ffn.kernels import tensor_map
from sparsellm.ffn.kernels.compile import exported_like, for_activation, grid_size
from sparsellm.ffn.kernels.gpu_architecture import Source
from sparsellm.ffn.kernels.quantise import quantise_rows
from sparsellm.ffn.quantised import QuantisedRows
from sparsellm.ffn.types import TILE_NEURONS


class GateLaunch(NamedTuple):
    """What differs from call to call."""

    kernel: str
    grid: int  # whole clusters
    sizes: tuple[np.int32, np.int32, np.int32]  # M, N, K
    map_of_x: bytes
    map_of_w: bytes
    x_scale: tuple[Tensor, ...]  # of FP8, otherwise nothing
    w_scale: tuple[Tensor, ...]
    x_MK: Tensor  # what `map_of_x` points to


def gate_launch(  # noqa: PLR0917
    kernel: Source,
    kernel_fp8: Source,
    x_MK: Tensor,
    w_NK: Tensor | QuantisedRows,
    token_M: Tensor | None = None,
    activation: str = "relu",
) -> GateLaunch:
    """The launch of a kernel that computes the gate of x with these weights.

    For weights in e4m3 it is the second one, and x is quantised here, in the order of ``token_M``.
    """
    name, like = kernel.kernel, x_MK
    x_scale: list[Tensor] = []
    w_scale: list[Tensor] = []
    if isinstance(w_NK, QuantisedRows):
        name, (w_NK, *w_scale) = kernel_fp8.kernel, w_NK
        x_MK, *x_scale = quantise_rows(x_MK, token_M)
    name = for_activation(name, activation)
    (m, k), n = x_MK.shape, w_NK.shape[0]
    tokens, cluster = (exported_like(name, what, like) for what in ("tokens", "cluster"))
    pairs = -(-m // (cluster * tokens)) * -(-n // TILE_NEURONS)  # tiles of a cluster
    # Each block of a cluster loads its share of the neurons.
    of_x, of_w = (x_MK, m, tokens), (w_NK, n, TILE_NEURONS // cluster)
    map_of_x, map_of_w = (
        tensor_map.encode(matrix.data_ptr(), rows, k, box, matrix.element_size())
        for matrix, rows, box in (of_x, of_w)
    )
    grid = grid_size(name, like, cluster * pairs) // cluster * cluster
    sizes = (np.int32(m), np.int32(n), np.int32(k))
    scales = tuple(x_scale), tuple(w_scale)
    return GateLaunch(name, grid, sizes, map_of_x, map_of_w, *scales, x_MK)
