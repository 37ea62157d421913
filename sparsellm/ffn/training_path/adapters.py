"""Linear layers that compute more than a product with their weight, such as LoRA's.

The sparse kernels read weights alone.
"""

from torch import nn


def beyond_weight(layer: nn.Module) -> str | None:
    """What such a layer is and has, for an error message; None for all other layers."""
    modules, parameters = layer._modules, layer._parameters
    extra = [name for name, p in parameters.items() if name != "weight" and p is not None]
    extra += [name for name in modules if name != "parametrizations"]
    if isinstance(layer, nn.Linear) and not extra:
        return None
    return f"a {type(layer).__name__}" + (f" with {extra[0]}" if extra else "")
