"""Published figures with which ours are compared.

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
    nnz: float | None  # mean non-zeros per token; None where the paper does not say
    training: Sides  # tokens/ms
    peak_gb: Sides
    forward: Sides  # tokens/ms
    energy: Sides  # mJ per token of the forward
    accuracy: Sides  # mean of seven tasks, %


PAPER_MODELS = (
    PaperModel(
        "0.5B",
        8,
        39,
        Sides(97.3, 95.9),
        Sides(26.2, 21.2),
        Sides(410, 480),
        Sides(1.63, 1.43),
        Sides(40.4, 40.4),
    ),
    PaperModel(
        "1B",
        18,
        None,
        Sides(48.6, 52.1),
        Sides(44.5, 33.1),
        Sides(185, 219),
        Sides(3.71, 3.17),
        Sides(44.6, 44.7),
    ),
    PaperModel(
        "1.5B",
        28,
        29,
        Sides(31.8, 35.5),
        Sides(62.8, 45.1),
        Sides(119, 141),
        Sides(5.73, 4.87),
        Sides(46.4, 46.2),
    ),
    PaperModel(
        "2B",
        38,
        24,
        Sides(22.4, 27.3),
        Sides(46.7, 57.1),  # sparse with a larger micro-batch
        Sides(87.8, 106),
        Sides(7.85, 6.51),
        Sides(49.1, 48.8),
    ),
)
PAPER_WIDTH = 5632  # neurons of a gated FFN


class PaperRun(NamedTuple):
    """A 1.5B model of the paper."""

    name: str
    nnz: float  # mean non-zeros per token
    loss: float  # cross-entropy; its vocabulary is not ours, so only ratios compare
    accuracy: float  # mean of seven tasks, %
    forward: float | None  # speed over dense; None where it is not said


PAPER_DENSE = PaperRun("dense ReLU", 911, 2.255, 46.4, 1.0)
PAPER_RUNS = (
    PAPER_DENSE,
    PaperRun("λ 2e-5", 29, 2.297, 46.2, 1.179),
    PaperRun("λ 2e-5, re-initialised", 29, 2.298, 46.6, 1.191),
    PaperRun("SiLU", 5632, 2.240, 47.1, None),
)
PAPER_CORRELATION = -0.996  # correlation of a layer's mean non-zeros with its speed-up
