"""The linear layers around accelerated FFNs, in FP8 at inference: those of attention, and the head.

Their own weights are read only for gradients, and in another type than that of FP8's tokens.

Shapes: M tokens, K in_features, N out_features.
"""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn

from sparsellm.ffn.fp8 import fp8_linear
from sparsellm.ffn.inference_path.derived import Derived, quantised_buffers, quantised_of
from sparsellm.ffn.inference_path.memory_layout import move
from sparsellm.ffn.quantised import QuantisedRows
from sparsellm.ffn.reference import stands_in
from sparsellm.ffn.types import ELEMENTS

_INSTALLED = "sparsellm_fp8"


def find_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The layers that FP8 can compute, by name.

    They return the logits, or belong to modules whose class is called ``…Attention``, as all of
    transformers are.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    for name, module in model.named_modules():
        parent = model.get_submodule(name.rpartition(".")[0])
        is_attention = type(parent).__name__.endswith("Attention")
        if (is_attention or module is head) and type(module) is nn.Linear and _fits(module):
            yield name, module


def _fits(module: nn.Linear) -> bool:
    weight = module.weight
    return (
        type(weight) is nn.Parameter
        and weight.dtype in ELEMENTS
        and not any(size % 16 for size in weight.shape)
        and (weight.is_cuda or stands_in(weight.device))
        and "forward" not in vars(module)
    )


def use_fp8(module: nn.Linear) -> None:
    """Installs a forward that computes in FP8 where no gradient is needed."""
    attributes = vars(module)
    attributes[_INSTALLED] = Derived(module, quantised_buffers, module.weight)
    attributes["forward"] = partial(_forward, module)  # not a closure, as in `replace`


def is_fp8(module: nn.Module) -> bool:
    """Whether `use_fp8` replaced the module's forward."""
    return _INSTALLED in vars(module)


def quantised_weight(module: nn.Linear) -> QuantisedRows | None:
    """The weight in e4m3, if `use_fp8` was called and the weight is still of a type of FP8's."""
    derived: Derived | None = vars(module).get(_INSTALLED)
    if derived is None or module.weight.dtype not in ELEMENTS:
        return None
    derived.update(module, module.weight)
    return quantised_of(module)


def put_back(module: nn.Module) -> None:
    """Restores a layer's own forward, if `use_fp8` replaced it."""
    derived: Derived | None = vars(module).pop(_INSTALLED, None)
    if derived is not None:
        assert isinstance(module, nn.Linear)
        move(module.weight, quantised_of(module).values_MK.device)
        derived.remove(module)
        del vars(module)["forward"]


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    weight_NK, bias_N = module.weight, module.bias
    gradient = torch.is_grad_enabled() and (x.requires_grad or weight_NK.requires_grad)
    # After `model.float()` the types differ.
    same_type = x.dtype == weight_NK.dtype and x.dtype in ELEMENTS
    if gradient or module.training or not same_type:
        move(weight_NK, x.device)
        return nn.Linear.forward(module, x)
    derived: Derived = vars(module)[_INSTALLED]
    derived.update(module, weight_NK)
    y_MN = fp8_linear(x.reshape(-1, x.shape[-1]), quantised_of(module), bias_N)
    return y_MN.view(*x.shape[:-1], -1)
