"""The activations and model architectures that a recipe can name, one entry each.

Classes are given by name, so that reading a recipe imports neither torch nor transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rectified:
    """A function of r = relu(z), as the kernels and the reference compute it.

    The formats keep its value a, so the backward pass has its slope, the derivative where z > 0,
    from that.
    """

    value: Callable[[Any], Any] = lambda r: r  # of a tensor r
    slope: Callable[[Any], Any] = lambda a: 1.0  # of a tensor a
    # The same of an fp32 number in CUDA C++; `cuda/common/activation.cuh` has what they may call.
    device_value: str = "r"
    device_slope: str = "1.0f"


@dataclass(frozen=True)
class Activation:
    """The function between the two halves of an FFN."""

    # Hugging Face's `hidden_act`; without kernels `torch.nn.functional` has it under the same name.
    name: str
    title: str
    exact_zeros: bool  # its zeros are exact: neurons can be dead, be initialised anew, be counted
    kernels: Rectified | None = None  # how cuda/ computes it: layers can run sparse


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
                device_value="r*r",
                device_slope="2.0f*root(a)",
            ),
        ),
        Activation("silu", "SiLU", exact_zeros=False),
    )
}
# What a recipe needs for whatever counts zeros, as errors say it.
WITH_EXACT_ZEROS = "ffn.activation: " + " or ".join(
    name for name, activation in ACTIVATIONS.items() if activation.exact_zeros
)


def rectified_activations() -> dict[str, Rectified]:
    """How the kernels compute the activations that they do, by name."""
    return {name: of.kernels for name, of in ACTIVATIONS.items() if of.kernels is not None}


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face model whose blocks can hold our FFN."""

    name: str  # `model.family` of the recipe; without one, the first that is gated, or not
    gated: bool  # as `ffn.gated` of the recipe
    config_class: str  # of transformers
    model_class: str  # of transformers
    ffn_matrices: tuple[str, ...]  # of its FFN, all hidden_size × intermediate_size
    formula: str  # of the FFN's hidden activations, for people
    usual_activation: (
        str  # the only one of llama.cpp and of vLLM's own model, whatever is configured
    )


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture(
            name="llama",
            gated=True,
            config_class="LlamaConfig",
            model_class="LlamaForCausalLM",
            ffn_matrices=("gate_proj", "up_proj", "down_proj"),
            formula="act(x W_g) * (x W_u)",
            usual_activation="silu",
        ),
        Architecture(
            name="arcee",
            gated=False,
            config_class="ArceeConfig",
            model_class="ArceeForCausalLM",
            ffn_matrices=("up_proj", "down_proj"),
            formula="act(x W_u)",
            usual_activation="relu2",
        ),
    )
}
