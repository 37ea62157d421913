"""Pretraining of language models whose feedforward layers are sparse, and fast because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn

    from sparsellm.acceleration import Acceleration
    from sparsellm.dispatch import Kernels

__version__ = "0.1.0"


def accelerate(model: nn.Module, threshold: float = 0.0, kernels: Kernels = "auto") -> Acceleration:
    """See `sparsellm.acceleration.accelerate`; a function, so that the import takes no torch."""
    from sparsellm import acceleration

    return acceleration.accelerate(model, threshold, kernels)


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`."""
    from sparsellm import acceleration

    acceleration.restore(model)
