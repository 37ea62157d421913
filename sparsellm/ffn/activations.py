"""The activations that an FFN can have, one entry each. Needs no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rectified:
    """An activation that is a function of r = relu(z), as the kernels and the reference compute it.

    The formats store its value a. The backward pass computes its slope, the derivative for z > 0,
    from a. L1 of an FFN without a gate is that of r, which is computed from a too: that of r² would
    hardly move a neuron which is barely active, and shrink the others instead (benchmarks/LOG.md).

    Raises:
        ValueError: the value is not r, and its inverse is not stated.
    """

    value: Callable[[Any], Any] = lambda r: r  # of a tensor r
    slope: Callable[[Any], Any] = lambda a: 1.0  # of a tensor a
    inverse: Callable[[Any], Any] = lambda a: a  # r of a tensor a
    # The same for an fp32 number in CUDA C++; they may call what `cuda/common/activation.cuh` has.
    device_value: str = "r"
    device_slope: str = "1.0f"
    device_inverse: str = "a"

    def __post_init__(self) -> None:
        if self.device_value != "r" and self.device_inverse == "a":
            raise ValueError(
                f"an activation of value {self.device_value} needs inverse and device_inverse: r "
                "as a function of a"
            )


@dataclass(frozen=True)
class Activation:
    """The activation function of an FFN."""

    # Hugging Face's `hidden_act`; without kernels `torch.nn.functional` has it under the same name.
    name: str
    title: str
    # Whether it has exact zeros, so that active neurons, and dead ones, can be counted.
    exact_zeros: bool
    kernels: Rectified | None = None  # how cuda/ computes it; None: layers cannot run sparse


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("relu", "ReLU", exact_zeros=True, kernels=Rectified()),
        Activation(
            "relu2",
            "ReLU²",
            exact_zeros=True,
            kernels=Rectified(
                value=lambda r: r.square(),
                slope=lambda a: 2 * a.sqrt(),
                inverse=lambda a: a.sqrt(),
                device_value="r*r",
                device_slope="2.0f*root(a)",
                device_inverse="root(a)",
            ),
        ),
        Activation("silu", "SiLU", exact_zeros=False),
    )
}
# What a recipe needs for anything that counts zeros, in the words of error messages.
WITH_EXACT_ZEROS = "ffn.activation: " + " or ".join(
    name for name, activation in ACTIVATIONS.items() if activation.exact_zeros
)
# How the kernels compute the activations that they support, by name; and these in error messages.
RECTIFIED = {name: of.kernels for name, of in ACTIVATIONS.items() if of.kernels is not None}
WITH_KERNELS = " or ".join(RECTIFIED)
