"""Pretraining of language models whose feedforward layers are sparse, and fast because of it."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sparsellm.ffn.accelerate import accelerate, restore
    from sparsellm.runs.pretrained import load

__all__ = ["__version__", "accelerate", "load", "restore"]
__version__ = "0.1.0"
_HOMES = {
    "accelerate": "sparsellm.ffn.accelerate",
    "load": "sparsellm.runs.pretrained",
    "restore": "sparsellm.ffn.accelerate",
}


def __getattr__(name: str) -> Any:
    """The public functions, imported at their first use: `sparsellm --help` needs no torch."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
