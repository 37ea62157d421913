"""The activations and model architectures that a recipe can name, one entry each.

Classes are given by name, so that reading a recipe imports neither torch nor transformers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Rectified:
    """An activation that is a function of r = relu(z), as the kernels and the reference compute it.

    The formats store its value a. The backward pass computes its slope, the derivative for z > 0,
    from a.
    """

    value: Callable[[Any], Any] = lambda r: r  # of a tensor r
    slope: Callable[[Any], Any] = lambda a: 1.0  # of a tensor a
    # The same for an fp32 number in CUDA C++; they may call what `cuda/common/activation.cuh` has.
    device_value: str = "r"
    device_slope: str = "1.0f"


@dataclass(frozen=True)
class Activation:
    """The activation function of an FFN."""

    # Hugging Face's `hidden_act`; without kernels `torch.nn.functional` has it under the same name.
    name: str
    title: str
    # Whether it has exact zeros, so that neurons that fire, and dead ones, can be counted.
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
                device_value="r*r",
                device_slope="2.0f*root(a)",
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


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face model whose blocks can hold our FFN."""

    # Hugging Face's `model_type`, and `model.family` of the recipe. A recipe that names no family
    # has the first one below whose `gated` is the recipe's.
    name: str
    prefix: str  # of transformers' classes
    gated: bool = True  # as `ffn.gated` of the recipe
    # The FFN's matrices, all of hidden_size × intermediate_size.
    ffn_matrices: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    formula: str = "act(x W_g) * (x W_u)"  # of the FFN's hidden activations, for people
    # The only activation that llama.cpp and vLLM's own model have, whatever is configured.
    usual_activation: str = "silu"
    # Defaults that replace those of transformers' configuration class.
    defaults: tuple[tuple[str, Any], ...] = ()
    # Those of its attention's projections q, k, v and o that have a bias, whatever is configured.
    attention_biases: str = ""
    query_key_norms: bool = False  # an RMSNorm over each head of queries and of keys

    @property
    def config_class(self) -> str:
        """Of transformers."""
        return f"{self.prefix}Config"

    @property
    def model_class(self) -> str:
        """Of transformers."""
        return f"{self.prefix}ForCausalLM"


ARCHITECTURES = {
    architecture.name: architecture
    for architecture in (
        Architecture("llama", "Llama"),
        Architecture(
            "arcee",
            "Arcee",
            gated=False,
            ffn_matrices=("up_proj", "down_proj"),
            formula="act(x W_u)",
            usual_activation="relu2",
        ),
        Architecture("mistral", "Mistral", defaults=(("sliding_window", None),)),
        Architecture("qwen2", "Qwen2", attention_biases="qkv"),
        Architecture("qwen3", "Qwen3", query_key_norms=True),
        Architecture("smollm3", "SmolLM3"),
    )
}
# For each `model_type` of the paper's published checkpoints, whose own code is not run, the family
# whose blocks they have: with a gated and with a non-gated ReLU FFN (None: not supported).
PUBLISHED: dict[str, tuple[str, str | None]] = {
    "llama_sparse_relu": ("llama", "arcee"),
    "qwen2_sparse_relu": ("qwen2", None),
}
