"""Times of the kernels that the paper's authors published, measured once beside dense."""

from __future__ import annotations

from typing import NamedTuple

from sparsellm.report.published import Sides


class KernelTimes(NamedTuple):
    """One pattern of activations."""

    pattern: str
    nnz: int
    forward: Sides  # ms
    both: Sides  # ms, forward and backward
    memory: Sides  # MiB


# One H200, bf16, torch 2.11, 16,384 tokens at 2048/5632, only inputs where their results are right.
PUBLISHED_KERNELS = (
    KernelTimes("uniform", 15, Sides(1.693, 0.881), Sides(4.83, 2.26), Sides(660, 496)),
    KernelTimes("uniform", 30, Sides(1.693, 1.085), Sides(4.91, 3.07), Sides(660, 496)),
    KernelTimes("skewed", 30, Sides(1.697, 1.120), Sides(4.85, 3.22), Sides(660, 544)),
    KernelTimes("uniform", 60, Sides(1.691, 1.575), Sides(4.92, 4.94), Sides(660, 497)),
)
