"""Pretraining of language models whose feedforward layers are sparse, and fast because of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from os import PathLike

    import torch
    from torch import nn

    from sparsellm.ffn.accelerate import Acceleration
    from sparsellm.ffn.dispatch import Kernels
    from sparsellm.ffn.types import Format
    from sparsellm.runs.load import Loaded

__all__ = ["__version__", "accelerate", "load", "restore"]
__version__ = "0.1.0"


def load(
    path_or_id: str | PathLike[str],
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    *,
    accelerate: bool = True,
) -> Loaded:
    """See `sparsellm.runs.load.load`; a function, so that the import takes no torch."""
    from sparsellm.runs import load

    return load.load(path_or_id, device, dtype, accelerate=accelerate)


def accelerate(
    model: nn.Module,
    threshold: float = 0.0,
    kernels: Kernels = "auto",
    format: Format = "union",
    token_order: Literal["auto", "none"] = "auto",
    *,
    precision: Literal["own", "fp8"] = "own",
) -> Acceleration:
    """See `sparsellm.ffn.accelerate.accelerate`; a function, so that the import takes no torch."""
    from sparsellm.ffn import accelerate

    return accelerate.accelerate(
        model, threshold, kernels, format, token_order, precision=precision
    )


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`."""
    from sparsellm.ffn import accelerate

    accelerate.restore(model)
