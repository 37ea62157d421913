"""Pretrains language models whose feedforward layers compute only the active neurons."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsellm.ffn.inference_path.accelerate import accelerate, restore
    from sparsellm.ffn.training_path.module import SparseFFN
    from sparsellm.runs.huggingface.pretrained import load
    from sparsellm.sparsity.controller import SparsityController
    from sparsellm.sparsity.conversion import replace_ffns
    from sparsellm.training.from_python import train

__all__ = [
    "SparseFFN",
    "SparsityController",
    "__version__",
    "accelerate",
    "load",
    "replace_ffns",
    "restore",
    "train",
]
__version__ = "0.1.0"
_HOMES = {
    "SparseFFN": "sparsellm.ffn.training_path.module",
    "SparsityController": "sparsellm.sparsity.controller",
    "accelerate": "sparsellm.ffn.inference_path.accelerate",
    "load": "sparsellm.runs.huggingface.pretrained",
    "replace_ffns": "sparsellm.sparsity.conversion",
    "restore": "sparsellm.ffn.inference_path.accelerate",
    "train": "sparsellm.training.from_python",
}


def __getattr__(name: str) -> Any:
    """The public names, imported at their first use: `sparsellm --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
