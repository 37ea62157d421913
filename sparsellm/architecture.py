"""The activations and model architectures that a recipe can name, one entry each.

Classes are given by name, so that reading a recipe imports neither torch nor transformers.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Activation:
    """The function between the two halves of an FFN."""

    name: str  # Hugging Face's `hidden_act`; `torch.nn.functional` has it under the same name
    title: str
    exact_zeros: bool  # its zeros are exact: neurons can be dead, be initialised anew, be counted
    kernels: bool = False  # cuda/ computes it: layers can run sparse


ACTIVATIONS = {
    activation.name: activation
    for activation in (
        Activation("relu", "ReLU", exact_zeros=True, kernels=True),
        Activation("silu", "SiLU", exact_zeros=False),
    )
}


@dataclass(frozen=True)
class Architecture:
    """A Hugging Face model whose blocks can hold our FFN."""

    name: str  # `model.family` of the recipe; without one, the first that is gated, or not
    gated: bool  # as `ffn.gated` of the recipe
    config_class: str  # of transformers
    model_class: str  # of transformers
    ffn_matrices: tuple[str, ...]  # of its FFN, all hidden_size × intermediate_size
    formula: str  # of the FFN's hidden activations, for people


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
        ),
        Architecture(
            name="arcee",
            gated=False,
            config_class="ArceeConfig",
            model_class="ArceeForCausalLM",
            ffn_matrices=("up_proj", "down_proj"),
            formula="act(x W_u)",
        ),
    )
}
