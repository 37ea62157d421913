"""Published figures with which ours are compared: the paper's models, and its authors' kernels.

Paper: arXiv 2603.23198, its λ = 2e-5, per GPU of a node of eight H100 (its energy implies SXM),
1,048,576 tokens per step.
"""

from typing import NamedTuple


class Comparison(NamedTuple):
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
    training: Comparison  # tokens/ms
    peak_gb: Comparison
    forward: Comparison  # tokens/ms


PAPER_MODELS = (
    PaperModel("0.5B", 8, Comparison(97.3, 95.9), Comparison(26.2, 21.2), Comparison(410, 480)),
    PaperModel("1B", 18, Comparison(48.6, 52.1), Comparison(44.5, 33.1), Comparison(185, 219)),
    PaperModel("1.5B", 28, Comparison(31.8, 35.5), Comparison(62.8, 45.1), Comparison(119, 141)),
    # The sparse 2B has a larger micro-batch.
    PaperModel("2B", 38, Comparison(22.4, 27.3), Comparison(46.7, 57.1), Comparison(87.8, 106)),
)


class KernelTimes(NamedTuple):
    """One pattern of activations."""

    pattern: str
    nnz: int
    forward: Comparison  # ms
    forward_backward: Comparison  # ms
    memory: Comparison  # MiB


# One H200, bf16, torch 2.11, 16,384 tokens at 2048/5632, only inputs where their results are right.
PUBLISHED_KERNELS = (
    KernelTimes(
        "uniform", 15, Comparison(1.693, 0.881), Comparison(4.83, 2.26), Comparison(660, 496)
    ),
    KernelTimes(
        "uniform", 30, Comparison(1.693, 1.085), Comparison(4.91, 3.07), Comparison(660, 496)
    ),
    KernelTimes(
        "skewed", 30, Comparison(1.697, 1.120), Comparison(4.85, 3.22), Comparison(660, 544)
    ),
    KernelTimes(
        "uniform", 60, Comparison(1.691, 1.575), Comparison(4.92, 4.94), Comparison(660, 497)
    ),
)
