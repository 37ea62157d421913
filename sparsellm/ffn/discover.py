"""Finds the FFNs of a model by the names of their parts.

Names only propose an FFN; `formula` finds out what its forward computes.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparsellm.architecture import ACTIVATIONS
from sparsellm.ffn.reference import activation_function
from sparsellm.ffn.types import FFNWeights


class Unsupported(ValueError):
    """A module computes something that the kernels do not support; the message says what."""


class Formula(NamedTuple):
    """``act(fatrelu(gate, threshold)) * up``, or with ``relu_up`` (dReLU) ``… * relu(up)``."""

    threshold: float
    relu_up: bool
    activation: str


class Names(NamedTuple):
    """The children of a module that are its FFN's matrices."""

    gate: str | None
    up: str
    down: str


_GATED = (
    Names("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma, …
    Names("w1", "w3", "w2"),  # LFM2, and Llama as Meta published it
    Names("wi_0", "wi_1", "wo"),  # T5 1.1
)
_PLAIN = (
    Names(None, "up_proj", "down_proj"),  # Arcee, Nemotron
    Names(None, "fc1", "fc2"),  # OPT, BART, NLLB, Phi
    Names(None, "wi", "wo"),  # T5
    Names(None, "c_fc", "c_proj"),  # GPT-2, Starcoder2
    Names(None, "fc_in", "fc_out"),  # GPT-J
    Names(None, "dense_h_to_4h", "dense_4h_to_h"),  # GPT-NeoX, Bloom, Falcon
    Names(None, "linear1", "linear2"),  # torch.nn.TransformerEncoderLayer
    Names(None, "lin1", "lin2"),  # DistilBERT
    Names(None, "intermediate_dense", "output_dense"),  # wav2vec 2.0
)
_FUSED = ("gate_up_proj", "up_gate_proj")
_ACTIVATIONS = ("act_fn", "activation_fn", "activation", "act", "activation_func")


class Projections(NamedTuple):
    """The matrices of an FFN."""

    gate: nn.Linear | None
    up: nn.Linear
    down: nn.Linear

    @property
    def present(self) -> list[nn.Linear]:
        """The matrices that exist."""
        return [linear for linear in self if linear is not None]

    def weights(self, formula: Formula, down_NK: Tensor | None = None) -> FFNWeights:
        """The weights and biases as they are now, for a formula."""
        gate_NK, b_gate_N = (None, None) if self.gate is None else _parameters(self.gate)
        up_NK, b_up_N = _parameters(self.up)
        down_KN, b_down_K = _parameters(self.down)
        biases = (b_gate_N, b_up_N, b_down_K)
        return FFNWeights(gate_NK, up_NK, down_KN, *biases, *formula, down_NK=down_NK)


def _parameters(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, read from ``_parameters``: attribute lookup takes a microsecond."""
    parameters = linear._parameters
    return parameters["weight"], parameters["bias"]  # type: ignore[return-value]


def find_ffns(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Everything in a model that looks like an FFN, by name, whether it can be served or not."""
    for name, module in model.named_modules():
        if _names_in(module) is not None or _fused(module) is not None:
            yield name, module


def names_of(module: nn.Module) -> Names:
    """The names of an FFN's matrices.

    Raises:
        Unsupported: they are not `nn.Linear`, or are fused.
    """
    names = _names_in(module)
    if names is None:
        raise Unsupported(_fused(module))
    for name in names:
        child = None if name is None else module._modules[name]
        if child is not None and type(child) is not nn.Linear:  # a subclass may do more
            raise Unsupported(f"its {name} is a {type(child).__name__}, not an nn.Linear")
    return names


def _names_in(module: nn.Module) -> Names | None:
    children = module._modules
    for names in _GATED + _PLAIN:
        if all(name is None or children.get(name) is not None for name in names):
            return names
    return None


def _fused(module: nn.Module) -> str | None:
    for name, parameter in module._parameters.items():
        is_experts = name in _FUSED or "expert" in type(module).__name__.lower()
        if parameter is not None and parameter.ndim == 3 and is_experts:
            return (
                f"its {len(parameter)} experts are fused into 3-D weights ({name}); only FFNs of "
                "nn.Linear are served"
            )
    for name in _FUSED:
        if isinstance(module._modules.get(name), nn.Module) and "down_proj" in module._modules:
            return f"its gate and up are fused into one matrix ({name})"
    return None


def activation_of(module: nn.Module) -> Callable[[Tensor], Any] | None:
    """The activation that a module names; None if it names none."""
    for name in _ACTIVATIONS:
        value = getattr(module, name, None)
        if isinstance(value, str):
            value = activation_function(value) if value in ACTIVATIONS else None
        if callable(value):
            return value  # type: ignore[no-any-return]
    return None
