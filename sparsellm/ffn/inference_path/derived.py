"""Buffers that are computed from weights, and again once those have changed.

Shapes: K in_features, N out_features.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.quantised import E4M3, QuantisedRows

_QUANTISED = ("sparsellm_values_NK", "sparsellm_scale_N")  # in FP8


class Derived:
    """Buffers of a module, which ``compute`` returns by name, given the weights."""

    def __init__(
        self, module: nn.Module, compute: Callable[..., dict[str, Tensor]], *weights: Tensor
    ) -> None:
        self._compute, self._versions = compute, _versions_of(weights)
        buffers = compute(*weights)
        self._names = list(buffers)
        # A buffer moves with the module, and a non-persistent one is not saved with it.
        for name, tensor in buffers.items():
            module.register_buffer(name, tensor, persistent=False)

    def __getstate__(self) -> dict[str, Any]:
        """Without the weights: those of a copy, on disk too, count their versions anew."""
        return {**vars(self), "_versions": []}

    def update(self, module: nn.Module, *weights: Tensor) -> None:
        """Computes the buffers again if the weights have changed, as by an optimizer's step."""
        if torch.compiler.is_compiling() or self._are_of(weights):
            return
        with torch.inference_mode():  # a buffer made in inference mode can be written only there
            for name, tensor in self._compute(*weights).items():
                module.get_buffer(name).copy_(tensor)
        self._versions = _versions_of(weights)

    def _are_of(self, weights: tuple[Tensor, ...]) -> bool:
        for (weight, version), now in zip(self._versions, weights, strict=False):
            if weight is not now or (version is not None and version != now._version):
                return False
        return bool(self._versions)

    def remove(self, module: nn.Module) -> None:
        """Takes the buffers from the module, if it has them."""
        for name in self._names:
            if name in module._buffers:
                delattr(module, name)


def _versions_of(weights: tuple[Tensor, ...]) -> list[tuple[Tensor, int | None]]:
    # The version changes with the weight, except through `.data`. One of inference mode has none.
    return [(weight, None if weight.is_inference() else weight._version) for weight in weights]


def quantised_buffers(weight_NK: Tensor) -> dict[str, Tensor]:
    """A matrix in e4m3 as buffers, of integers: moving a module to another type casts others."""
    values_NK, scale_N = quantised_rows(weight_NK.detach())
    integers = values_NK.view(torch.uint8), scale_N.view(torch.int32)
    return dict(zip(_QUANTISED, integers, strict=True))


def quantised_of(module: nn.Module) -> QuantisedRows:
    """The matrix that `quantised_buffers` made buffers of."""
    values_NK, scale_N = (module._buffers[name] for name in _QUANTISED)
    assert values_NK is not None
    assert scale_N is not None
    return QuantisedRows(values_NK.view(E4M3), scale_N.view(torch.float32))
