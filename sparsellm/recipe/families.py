"""The model families whose blocks can hold our FFN, one entry each.

Classes are given by name, so that reading a recipe imports neither torch nor transformers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any


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
    # Fields of `model.huggingface` that its classes read, besides those that all families read.
    fields: tuple[str, ...] = ("attention_bias",)

    @property
    def config_class(self) -> str:
        """The name of transformers' class of its configuration."""
        return f"{self.prefix}Config"

    @property
    def model_class(self) -> str:
        """The name of transformers' class of its model."""
        return f"{self.prefix}ForCausalLM"


_WINDOWS = ("layer_types", "sliding_window", "use_sliding_window")
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
        Architecture(
            "mistral", "Mistral", defaults=(("sliding_window", None),), fields=("sliding_window",)
        ),
        Architecture("qwen2", "Qwen2", attention_biases="qkv", fields=_WINDOWS),
        Architecture("qwen3", "Qwen3", query_key_norms=True, fields=("attention_bias", *_WINDOWS)),
        Architecture("smollm3", "SmolLM3", fields=("attention_bias", "no_rope_layers", *_WINDOWS)),
    )
}
_OPTIONAL_FIELDS = {field for family in ARCHITECTURES.values() for field in family.fields}
# For each `model_type` of the paper's published checkpoints, whose own code is not run, the family
# whose blocks they have: with a gated and with a non-gated ReLU FFN (None: not supported).
PUBLISHED: dict[str, tuple[str, str | None]] = {
    "llama_sparse_relu": ("llama", "arcee"),
    "qwen2_sparse_relu": ("qwen2", None),
}


def unread_fields(architecture: Architecture, fields: Iterable[str]) -> list[str]:
    """Those of these fields of `model.huggingface` that would not change the family's model."""
    return sorted(_OPTIONAL_FIELDS.intersection(fields).difference(architecture.fields))
