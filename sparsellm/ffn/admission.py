"""Which FFNs the kernels may take over, and whether one that they took over has changed.

A replaced forward calls none of the FFN's modules. So these must be plain `nn.Linear` and an
activation, without hooks, and hold no tensor that the formula does not use. Where that changes
later, the module's own forward runs again.

Shapes: K hidden_size, N intermediate_size.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.ffn.discover import Names, Projections, Unsupported, activation_of, names_of
from sparsellm.ffn.inference_ops import beyond_limits
from sparsellm.ffn.kernels.gpu_architecture import unsupported
from sparsellm.ffn.reference import stands_in
from sparsellm.ffn.types import ELEMENTS

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, str, type(None))


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
        used = {id(tensor) for tensor in self.tensors()}
        for module in self.inside if self.is_layer else [self.owner, *self.inside]:
            kind = type(module).__name__
            if module is not self.owner and (module._forward_hooks or module._forward_pre_hooks):
                raise Unsupported(f"its {kind} has hooks, which the kernels would not call")
            if module is not self.owner and "forward" in vars(module):
                raise Unsupported(
                    f"its {kind} has a forward of its own, which the kernels would not call"
                )
            own = {**module._parameters, **module._buffers, **vars(module)}
            for name, value in own.items():
                if isinstance(value, Tensor) and id(value) not in used:
                    raise Unsupported(
                        f"its {kind} has a tensor that the formula does not use ({name})"
                    )

    def tensors(self) -> Iterator[Tensor]:
        """The weights and biases, as they are now."""
        for linear in self.ffn.present:
            yield from (tensor for tensor in linear._parameters.values() if tensor is not None)

    def remember(self) -> None:
        """Makes the present state the one that `unchanged` compares with."""
        others = [module for module in self.inside if module not in self.ffn]
        self._inside = [(module, type(module), "forward" in vars(module)) for module in self.inside]
        for module in [self.owner, *others]:
            children = {n: child for n, child in module._modules.items() if child in self.inside}
            self._children.append((module, tuple(children), tuple(children.values())))
        self._values = [
            (module, name, value)
            for module in ([] if self.is_layer else [self.owner]) + others
            for name, value in _values_in(module)
        ]
        # While it trains, a module may do more than the formula, such as drop activations.
        self._values += [(module, "training", False) for module in [self.owner, *others]]

    @torch.compiler.assume_constant_result  # a compiled model asks once, while it is traced
    def unchanged(self) -> bool:
        """Whether nothing but the weights' values has changed, and no module trains."""
        for module, kind, is_replaced in self._inside:
            own = module.__dict__
            if (
                type(module) is not kind
                or own["_forward_hooks"]
                or own["_forward_pre_hooks"]
                or ("forward" in own) is not is_replaced
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
        is_plain = isinstance(value, _PLAIN) or callable(value)
        if is_plain and name not in _OF_EVERY_MODULE and name != "forward":
            yield name, value


def foreign_ffn(module: nn.Module) -> ForeignFFN:
    """What a module that looks like an FFN consists of.

    Raises:
        Unsupported: its forward, or the forward of one of its parts, may not be replaced.
    """
    names = names_of(module)
    # Reads the dictionary: getattr's search costs microseconds per call.
    children: dict[str, Any] = module._modules
    gate = None if names.gate is None else children[names.gate]
    ffn = Projections(gate, children[names.up], children[names.down])
    if not _is_layer(module, names):
        foreign = ForeignFFN(module, ffn, list(module.modules())[1:], is_layer=False)
    else:
        activation = activation_of(module)
        if gate is not None or not isinstance(activation, nn.Module):
            raise Unsupported(
                "its layer computes it, and not as up, activation module, down in a row: there is "
                "no forward to replace"
            )
        inside = [ffn.up, *activation.modules(), ffn.down]
        foreign = ForeignFFN(module, ffn, inside, is_layer=True)
    foreign.check()
    return foreign


def _is_layer(module: nn.Module, names: Names) -> bool:
    """Whether a module has other parameters besides its FFN's, as a layer of OPT does."""
    others = (child for name, child in module._modules.items() if name not in names)
    return any(True for child in others if child is not None for _ in child.parameters())


def check_weights_of(ffn: Projections) -> None:
    """Raises Unsupported if the kernels cannot take an FFN's weights as they are."""
    k, n = ffn.up.in_features, ffn.up.out_features
    tensors = [t for linear in ffn.present for t in (linear.weight, linear.bias) if t is not None]
    first = tensors[0]
    dtypes = {tensor.dtype for tensor in tensors}
    reason = None
    if (ffn.down.in_features, ffn.down.out_features) != (n, k):
        reason = "its shapes are not those of an FFN"
    elif limit := beyond_limits(k, n):
        reason = limit
    elif len(dtypes) > 1 or first.dtype not in ELEMENTS:
        found = " and ".join(sorted(map(str, dtypes)))
        reason = (
            f"its weights are {found}, not all torch.bfloat16 or all torch.float16; "
            "model.bfloat16() or model.half() converts them"
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
    elif not all(tensor.is_contiguous() for tensor in tensors):
        reason = "its weights are not contiguous"
    if reason is not None:
        raise Unsupported(reason)
