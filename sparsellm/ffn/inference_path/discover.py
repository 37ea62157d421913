"""Finds the FFNs of a model that the kernels may take over, and notices whether one has changed.

The names of a module's parts propose an FFN; `formula` finds out what its forward computes.

A replaced forward calls none of the FFN's modules. So these must be plain `nn.Linear` and an
activation, without hooks, and hold no tensor that the formula does not use. Where that changes
later, the module's own forward runs again.

Shapes: K hidden_size, N intermediate_size.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sparsellm.ffn.activations import ACTIVATIONS
from sparsellm.ffn.inference_ops import beyond_limits
from sparsellm.ffn.kernels.compiler.gpu_architecture import unsupported
from sparsellm.ffn.reference import activation_function, stands_in
from sparsellm.ffn.types import ELEMENTS, FFNWeights


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


_NAMES = (
    Names("gate_proj", "up_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma, …
    Names("w1", "w3", "w2"),  # LFM2, and Llama as Meta published it
    Names("wi_0", "wi_1", "wo"),  # T5 1.1
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
_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_VALUES = (bool, int, float, str, type(None))
ACTIVATION_ATTRIBUTES = ("act_fn", "activation_fn", "activation", "act", "activation_func")


class Projections(NamedTuple):
    """The matrices of an FFN."""

    gate: nn.Linear | None
    up: nn.Linear
    down: nn.Linear

    @property
    def present(self) -> list[nn.Linear]:
        """The matrices that exist."""
        return [linear for linear in self if linear is not None]

    def tensors(self) -> Iterator[Tensor]:
        """The weights and biases, as they are now."""
        for linear in self.present:
            yield from (tensor for tensor in linear._parameters.values() if tensor is not None)

    def weights(self, formula: Formula) -> FFNWeights:
        """The weights and biases as they are now, for a formula."""
        gate_NK, b_gate_N = (None, None) if self.gate is None else _parameters(self.gate)
        up_NK, b_up_N = _parameters(self.up)
        down_KN, b_down_K = _parameters(self.down)
        biases = (b_gate_N, b_up_N, b_down_K)
        return FFNWeights(gate_NK, up_NK, down_KN, *biases, *formula)


def _parameters(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, read from ``_parameters``: attribute lookup takes a microsecond."""
    parameters = linear._parameters
    return parameters["weight"], parameters["bias"]  # type: ignore[return-value]


def check_model(model: object, function: str) -> None:
    """Raises ValueError if a public function was given something else, such as a path."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"sparsellm.{function} takes a model (a torch.nn.Module), not {type(model).__name__}: "
            "sparsellm.load(PATH).model, or transformers' from_pretrained, gives one"
        )


def find_ffns(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Everything in a model that looks like an FFN, by name, whether it can be served or not."""
    for name, module in model.named_modules():
        if names_in(module) is not None or fused_reason(module) is not None:
            yield name, module


def names_in(module: nn.Module) -> Names | None:
    """The names of its children, if they are those of an FFN."""
    children = module._modules
    for names in _NAMES:
        if all(name is None or children.get(name) is not None for name in names):
            return names
    return None


def class_name(module: nn.Module | None) -> str:
    """The name of a module's class; with its package if it is another Linear than torch's."""
    kind = type(module)
    return f"{kind.__module__}.Linear" if kind.__name__ == "Linear" else kind.__name__


def fused_reason(module: nn.Module) -> str | None:
    """Why an FFN cannot be taken apart: its matrices are fused; None if they are not."""
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
    for name in ACTIVATION_ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, str):
            value = activation_function(value) if value in ACTIVATIONS else None
        if callable(value):
            return value  # type: ignore[no-any-return]
    return None


@dataclass
class ForeignFFN:
    """An FFN, and the modules that its replaced forward does not call."""

    owner: nn.Module  # the FFN itself, or the layer that computes it
    ffn: Projections
    inside: list[nn.Module]  # those not called; in a layer: up, activation, its parts, down
    is_layer: bool
    # The state with which `unchanged` compares the present one.
    _inside: list[tuple[nn.Module, type, bool]] = field(default_factory=list)
    _children: list[tuple[nn.Module, tuple[str, ...], tuple[nn.Module | None, ...]]] = field(
        default_factory=list
    )
    _values: list[tuple[nn.Module, str, Any]] = field(default_factory=list)

    def check(self) -> None:
        """Raises Unsupported if a forward that uses these modules may not be replaced."""
        used = {id(tensor) for tensor in self.ffn.tensors()}
        for module in self.inside if self.is_layer else [self.owner, *self.inside]:
            kind = type(module).__name__
            if module is not self.owner and (module._forward_hooks or module._forward_pre_hooks):
                raise Unsupported(f"its {kind} has hooks, which the kernels would not call")
            if module is not self.owner and "forward" in vars(module):
                raise Unsupported(
                    f"its {kind} has its own forward, which the kernels would not call"
                )
            attributes = {**module._parameters, **module._buffers, **vars(module)}
            for name, value in attributes.items():
                if isinstance(value, Tensor) and id(value) not in used:
                    raise Unsupported(
                        f"its {kind} has a tensor that the formula does not use ({name})"
                    )

    def remember(self) -> None:
        """Makes the present state the one that `unchanged` compares with."""
        other_modules = [module for module in self.inside if module not in self.ffn]
        self._inside = [(module, type(module), "forward" in vars(module)) for module in self.inside]
        for module in [self.owner, *other_modules]:
            children = {n: child for n, child in module._modules.items() if child in self.inside}
            self._children.append((module, tuple(children), tuple(children.values())))
        self._values = [
            (module, name, value)
            for module in ([] if self.is_layer else [self.owner]) + other_modules
            for name, value in _values_in(module)
        ]
        # While it trains, a module may do more than the formula, such as drop activations.
        self._values += [(module, "training", False) for module in [self.owner, *other_modules]]

    @torch.compiler.assume_constant_result  # a compiled model asks once, while it is traced
    def unchanged(self) -> bool:
        """Whether nothing but the weights' values has changed, and no module trains."""
        for module, kind, is_replaced in self._inside:
            attributes = module.__dict__
            if (
                type(module) is not kind
                or attributes["_forward_hooks"]
                or attributes["_forward_pre_hooks"]
                or ("forward" in attributes) is not is_replaced
            ):
                return False
        for linear in self.ffn:
            if linear is not None and type(linear._parameters["weight"]) is not nn.Parameter:
                return False
        for module, names, children in self._children:
            if tuple(map(module._modules.get, names)) != children:
                return False
        for module, name, value in self._values:
            now = module.__dict__.get(name)
            if now is not value and (type(now) is not type(value) or now != value):
                return False
        return True


def _values_in(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """What a forward may use besides tensors and children: numbers, text, functions."""
    for name, value in vars(module).items():
        is_plain = isinstance(value, _VALUES) or callable(value)
        if is_plain and name not in _OF_EVERY_MODULE and name != "forward":
            yield name, value


def foreign_ffn(module: nn.Module) -> ForeignFFN:
    """What a module that looks like an FFN consists of.

    Raises:
        Unsupported: its matrices are not `nn.Linear`, or are fused; its forward, or the forward of
            one of its parts, may not be replaced.
    """
    names = names_in(module)
    children: dict[str, Any] = module._modules
    if names is None:
        raise Unsupported(fused_reason(module))
    linears: list[Any] = [None if name is None else children[name] for name in names]
    for name, child in zip(names, linears, strict=True):
        if child is not None and type(child) is not nn.Linear:  # a subclass may do more
            raise Unsupported(f"its {name} is a {class_name(child)}, not an nn.Linear")
    ffn = Projections(*linears)
    # Where a module has other parameters besides its FFN's, it is a layer, as of OPT.
    other_children = (child for name, child in children.items() if name not in names)
    if not any(
        child is not None and any(True for _ in child.parameters()) for child in other_children
    ):
        foreign = ForeignFFN(module, ffn, list(module.modules())[1:], is_layer=False)
    else:
        activation = activation_of(module)
        if ffn.gate is not None or not isinstance(activation, nn.Module):
            raise Unsupported(
                "its layer computes it, and not as up, activation module, down in a row: there is "
                "no forward to replace"
            )
        inside = [ffn.up, *activation.modules(), ffn.down]
        foreign = ForeignFFN(module, ffn, inside, is_layer=True)
    foreign.check()
    return foreign


def check_weights_of(ffn: Projections) -> None:
    """Raises Unsupported if the kernels cannot take an FFN's weights as they are."""
    k, n = ffn.up.in_features, ffn.up.out_features
    tensors = list(ffn.tensors())
    first = tensors[0]
    dtypes = {tensor.dtype for tensor in tensors}
    reason = None
    if (ffn.down.in_features, ffn.down.out_features) != (n, k):
        reason = "its shapes are not those of an FFN"
    elif limit := beyond_limits(k, n):
        reason = limit
    elif len(dtypes) > 1 or first.dtype not in ELEMENTS:
        dtype_names = " and ".join(sorted(map(str, dtypes)))
        reason = (
            f"its weights are {dtype_names}, not all torch.bfloat16 or all torch.float16; "
            "load the model with dtype=torch.bfloat16 (model.bfloat16() would also round RoPE's "
            "frequencies)"
        )
    elif any(tensor.is_meta for tensor in tensors):
        reason = "its weights are offloaded"
    elif other := next((t for t in tensors if type(t) is not nn.Parameter), None):
        reason = f"its weights are {type(other).__name__}s, not plain tensors"
    elif len({tensor.device for tensor in tensors}) > 1:
        reason = "its weights are on several devices"
    elif not first.is_cuda and not stands_in(first.device):
        reason = (
            f"its weights are on {first.device}, where the kernels do not run; call accelerate "
            "after model.cuda()"
        )
    elif first.is_cuda and (too_old := unsupported(first.device)):
        reason = too_old
    elif not all(tensor.is_contiguous() for tensor in tensors if tensor is not ffn.down.weight):
        reason = "its weights are not contiguous"
    if reason is not None:
        raise Unsupported(reason)
