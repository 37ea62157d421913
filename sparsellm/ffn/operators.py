"""Registers this package's operators, ``torch.ops.sparsellm.…``.

It does not use `torch.library.custom_op` and its `register_autograd`: their wrappers cost the host
20 to 30 µs per call, more than all kernel launches together.
"""

from collections.abc import Callable
from typing import Any

import torch

_library = torch.library.Library("sparsellm", "FRAGMENT")


def define(name: str, schema: str, compute: Callable[..., Any], fake: Callable[..., Any]) -> None:
    """An operator for a CPU and a GPU; ``fake`` makes its results' shapes and types."""
    _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    for device in ("CPU", "CUDA"):
        _library.impl(name, compute, device)
    torch.library.register_fake(f"sparsellm::{name}", fake, lib=_library)


def define_differentiable(
    name: str, schema: str, compute: Callable[..., Any], autograd: Callable[..., Any]
) -> None:
    """An operator that compiled code does not call: both functions are plain torch, and traced.

    An `autograd.Function` alone does not suffice: graphs into which Dynamo traces one bypass the
    cache on disk, and in torch 2.11 gradients were wrong if two arguments were the same tensor.
    """
    _library.define(name + schema, tags=torch.Tag.pt2_compliant_tag)
    _library.impl(name, autograd, "Autograd")
    _library.impl(name, compute, "CompositeExplicitAutograd")
