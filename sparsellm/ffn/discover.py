"""Finds the FFNs of a model by the names and shapes of their parts.

Names only propose an FFN; `formula` finds out what its forward computes. Shapes: K hidden_size,
N intermediate_size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn

from sparsellm.architecture import ACTIVATIONS
from sparsellm.ffn.reference import activation_function


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


class Found(NamedTuple):
    """Something that looks like an FFN."""

    name: str  # the module's
    module: nn.Module
    names: Names | None  # None: it cannot be served; `reason` says why
    reason: str = ""


def find_ffns(model: nn.Module) -> Iterator[Found]:
    """Everything in a model that looks like an FFN, whether it can be served or not."""
    for name, module in model.named_modules():
        names = _names_in(module)
        if names is not None:
            reason = _not_linear(module, names)
            yield Found(name, module, None if reason else names, reason or "")
        elif reason := _fused(module):
            yield Found(name, module, None, reason)


def projections(module: nn.Module, names: Names) -> Projections:
    """The matrices as they are now; dictionaries, as getattr's search costs microseconds a call."""
    children: dict[str, Any] = module._modules
    gate = None if names.gate is None else children[names.gate]
    return Projections(gate, children[names.up], children[names.down])


def _names_in(module: nn.Module) -> Names | None:
    children = module._modules
    for names in _GATED + _PLAIN:
        if all(name is None or children.get(name) is not None for name in names):
            return names
    return None


def _not_linear(module: nn.Module, names: Names) -> str | None:
    for name in names:
        child = None if name is None else module._modules[name]
        if child is not None and type(child) is not nn.Linear:  # a subclass may do more
            return f"its {name} is a {type(child).__name__}, not an nn.Linear"
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


def is_layer(module: nn.Module, names: Names) -> bool:
    """Whether a module has other parameters beside its FFN's, as a layer of OPT has."""
    others = (child for name, child in module._modules.items() if name not in names)
    return any(True for child in others if child is not None for _ in child.parameters())


def further_arguments(forward: Callable[..., Any]) -> list[str]:
    """What a forward cannot be called without, beside its first argument."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]
