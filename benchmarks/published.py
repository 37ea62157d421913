"""Published figures with which ours are compared: the paper's models, and its authors' kernels.

Paper: arXiv 2603.23198, its λ = 2e-5, per GPU of a node of eight H100 (its energy implies SXM),
1,048,576 tokens per step.
"""

from __future__ import annotations

from typing import NamedTuple


class Sides(NamedTuple):
    """One quantity for the dense and the sparse model."""

    dense: float
    sparse: float

    @property
    def ratio(self) -> float:
        """Sparse over dense."""
        return self.sparse / self.dense


class PaperModel(NamedTuple):
    """A model size of the paper; figures per GPU."""

    name: str
    layers: int
    training: Sides  # tokens/ms
    peak_gb: Sides
    forward: Sides  # tokens/ms


PAPER_MODELS = (
    PaperModel("0.5B", 8, Sides(97.3, 95.9), Sides(26.2, 21.2), Sides(410, 480)),
    PaperModel("1B", 18, Sides(48.6, 52.1), Sides(44.5, 33.1), Sides(185, 219)),
    PaperModel("1.5B", 28, Sides(31.8, 35.5), Sides(62.8, 45.1), Sides(119, 141)),
    # The sparse 2B has a larger micro-batch.
    PaperModel("2B", 38, Sides(22.4, 27.3), Sides(46.7, 57.1), Sides(87.8, 106)),
)


class KernelTimes(NamedTuple):
    """One pattern of activations."""

    pattern: str
    nnz: int
    forward: Sides  # ms
    forward_backward: Sides  # ms
    memory: Sides  # MiB


# One H200, bf16, torch 2.11, 16,384 tokens at 2048/5632, only inputs where their results are right.
PUBLISHED_KERNELS = (
    KernelTimes("uniform", 15, Sides(1.693, 0.881), Sides(4.83, 2.26), Sides(660, 496)),
    KernelTimes("uniform", 30, Sides(1.693, 1.085), Sides(4.91, 3.07), Sides(660, 496)),
    KernelTimes("skewed", 30, Sides(1.697, 1.120), Sides(4.85, 3.22), Sides(660, 544)),
    KernelTimes("uniform", 60, Sides(1.691, 1.575), Sides(4.92, 4.94), Sides(660, 497)),
)
