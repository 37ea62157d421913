"""Replaces the FFNs of a model by `SparseFFN` for training; the weights stay the same parameters.

Shapes: K hidden_size, N intermediate_size.
"""

import difflib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsellm.ffn.activations import RECTIFIED, WITH_KERNELS
from sparsellm.ffn.dispatch import Kernels
from sparsellm.ffn.inference_path.discover import (
    ForeignFFN,
    Names,
    Projections,
    Unsupported,
    activation_of,
    check_model,
    class_name,
    find_ffns,
    fused_reason,
    names_in,
)
from sparsellm.ffn.inference_path.formula import (
    evaluating,
    formula_of,
    probe_tokens,
    relative_error,
)
from sparsellm.ffn.training_path.module import SparseFFN
from sparsellm.sparsity.activation_in_config import set_in_configs
from sparsellm.words import listed, reasons

# Two orders of the same operations differ by less, in any type.
_TOLERANCE = 0.02
# Activations to be replaced, of FFNs that do not name theirs, since they call a function.
_FUNCTIONS = (F.silu, F.gelu, partial(F.gelu, approximate="tanh"), torch.sigmoid)


@dataclass
class Replacement:
    """What `replace_ffns` did, by the names of modules."""

    replaced: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)  # name → why
    # Of those replaced: the model's configuration does not say their new activation.
    not_in_config: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        lines = [f"{len(self.replaced)} FFNs replaced"]
        if self.not_in_config:
            lines.append(
                f"{listed(self.not_in_config)}: the model's configuration does not say their "
                "activation; after from_pretrained, call replace_ffns again as here"
            )
        lines += [f"left alone: {line}" for line in reasons(self.left_alone)]
        if not self.replaced and not self.left_alone:
            lines.append("nothing in this model looks like an FFN: give `names` and `projections`")
        return "\n".join(lines)


def replace_ffns(
    model: nn.Module,
    names: Iterable[str] | None = None,
    *,
    projections: tuple[str, ...] | None = None,
    activation: str | None = None,
    kernels: Kernels = "auto",
) -> Replacement:
    """Replaces FFNs of a model with `SparseFFN`, in place, so that any loop can train it.

    Parameters stay the same objects under the same names, so optimizers, checkpoints and
    `save_pretrained` work as before. Call it before DDP, FSDP2 or `torch.compile`.

    An FFN is a module whose children are two linear layers (up and down) or three (gate, up and
    down) without biases, and whose forward computes ``down(act(up(x)))`` or
    ``down(act(gate(x)) * up(x))``. On random tokens, its result must equal that of the formula.

    Args:
        model: a model of transformers or any other library.
        names: names of the FFNs, such as ``model.layers.0.mlp``; ``*`` stands for anything. None:
            all FFNs that are recognised by the names of their children.
        projections: the names of the children, in the order gate, up, down, or without a gate up,
            down. None: the names that the usual libraries use. For a model on the meta device,
            pass them and the activation, since its forward cannot be tried.
        activation: ``relu`` or ``relu2`` replaces the model's own activation. This changes what the
            model computes until it has been trained further. The model's configuration is changed
            too (``hidden_act``, or the name that `transformers` uses), unless other FFNs of the
            model keep their activation; the result then lists the FFNs that the configuration does
            not describe. None keeps the model's activation, which must be ``relu`` or ``relu2``.
        kernels: see `SparseFFN.use_kernels`.

    Returns:
        The FFNs that were replaced, and those that were not, with the reasons.

    Raises:
        ValueError: ``model`` is not a model; no module has one of the ``names``; an unknown
            activation; not two or three projections.
    """
    check_model(model, "replace_ffns")
    if activation is not None and activation not in RECTIFIED:
        raise ValueError(f"activation {activation!r} must be {WITH_KERNELS}")
    children = None
    if projections is not None:
        if len(projections) not in (2, 3):
            raise ValueError(f"projections {projections}: must be (up, down) or (gate, up, down)")
        gate = projections[0] if len(projections) == 3 else None
        children = Names(gate, projections[-2], projections[-1])
    # What does not fit stays as it is, and the result says why.
    result, activations = Replacement(), {}
    for name, module in list(_candidates(model, names)):
        try:
            if module is model:
                raise Unsupported(
                    "it cannot be replaced in place; put it into a module, such as nn.Sequential, "
                    "or build a SparseFFN and load its weights"
                )
            ffn = _sparse_ffn(module, children, activation, kernels)
        except Unsupported as reason:
            result.left_alone[name] = str(reason)
        else:
            _put(model, module, ffn)
            result.replaced.append(name)
            activations[name] = activation_of(module)
    if activation is not None:
        in_config = set_in_configs(model, activation, activations, result.left_alone)
        if hasattr(model, "save_pretrained"):
            result.not_in_config = [name for name in result.replaced if name not in in_config]
    return result


def _candidates(model: nn.Module, names: Iterable[str] | None) -> Iterator[tuple[str, nn.Module]]:
    if names is None:
        yield from find_ffns(model)
        return
    modules = dict(model.named_modules())
    for pattern in [names] if isinstance(names, str) else names:
        matching = [name for name in modules if fnmatchcase(name, pattern)]
        if not matching:
            nearest = difflib.get_close_matches(pattern, modules, n=1)
            hint = f"; the nearest is {nearest[0]}" if nearest else ""
            raise ValueError(f"names: the model has no module {pattern!r}{hint}")
        for name in matching:
            yield name, modules[name]


def _sparse_ffn(
    module: nn.Module, projections: Names | None, activation: str | None, kernels: Kernels
) -> SparseFFN:
    """The FFN with the linear layers of a module.

    Raises:
        Unsupported: it does not compute such an FFN, or has more than its weights.
    """
    if isinstance(module, SparseFFN) and (activation is None or module.activation in RECTIFIED):
        raise Unsupported("it is a SparseFFN already")
    names = projections or names_in(module)
    if names is None:
        reason = (
            fused_reason(module) or "its children do not have the usual names: give projections"
        )
        raise Unsupported(reason)
    ffn = _projections(module, names)
    foreign = ForeignFFN(module, ffn, list(module.modules())[1:], is_layer=False)
    _check_parts(foreign, names)
    if not ffn.up.weight.is_meta:
        computed = _computed_activation(foreign, replaced=activation is not None)
        _check_training(foreign)
    elif projections and activation is not None:
        computed = activation  # there is nothing to try it with
    else:
        raise Unsupported(
            "its weights are on the meta device, where its forward cannot be tried: give "
            "projections and activation, or call replace_ffns once the weights are there"
        )
    n, k = ffn.up.weight.shape
    with torch.device("meta"):  # the module's own layers take the place of these
        sparse = SparseFFN(
            k,
            n,
            activation=activation or computed,
            gated=names.gate is not None,
            kernels=kernels,
            names=tuple(name for name in names if name is not None),
        )
    for name in sparse.names:
        setattr(sparse, name, module.get_submodule(name))
    return sparse.train(module.training)


def _projections(module: nn.Module, names: Names) -> Projections:
    layers: list[Any] = [None if name is None else module._modules.get(name) for name in names]
    for name, layer in zip(names, layers, strict=True):
        if name is not None and not isinstance(layer, nn.Linear):
            kind = "missing" if layer is None else f"a {class_name(layer)}, not an nn.Linear"
            if layer is not None and any(isinstance(part, nn.Linear) for part in layer.modules()):
                kind += "; call replace_ffns before you add adapters"
            raise Unsupported(f"its {name} is {kind}")
        if name is not None and layer.bias is not None:
            raise Unsupported(f"its {name} has a bias, which sparse training does not have")
        if name is not None and type(layer.weight) not in (nn.Parameter, Tensor):
            kind = type(layer.weight).__name__
            raise Unsupported(
                f"the weight of its {name} is a {kind}, which the kernels cannot read"
            )
    return Projections(*layers)


def _check_parts(foreign: ForeignFFN, names: Names) -> None:
    """Raises Unsupported where something besides the linear layers would be lost."""
    module, ffn = foreign.owner, foreign.ffn
    other_children = {n: child for n, child in module.named_children() if n not in names}
    if any(True for child in other_children.values() for _ in child.parameters()):
        raise Unsupported(
            "its layer computes it, with other parameters beside it: there is no FFN to replace"
        )
    if module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module):
        raise Unsupported("it has hooks or its own forward, which would be lost")
    foreign.check()
    for name, child in other_children.items():
        if isinstance(child, nn.Dropout) and child.p > 0:
            raise Unsupported(f"its dropout of {child.p:g} ({name}) would be lost; set it to 0")
    (n, k), down = ffn.up.weight.shape, tuple(ffn.down.weight.shape)
    if down != (k, n):
        raise Unsupported(f"its shapes are not those of an FFN: up {(n, k)}, down {down}")
    dtypes = sorted({str(layer.weight.dtype) for layer in ffn.present})
    if len(dtypes) > 1:  # of T5 in fp16, transformers keeps `wo` in fp32
        raise Unsupported(f"its weights are {' and '.join(dtypes)}; convert them to one type")
    if ffn.up.weight.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise Unsupported(f"its weights are {dtypes[0]}, not fp32, bf16 or fp16")


def _computed_activation(foreign: ForeignFFN, *, replaced: bool) -> str:
    """The activation that a module computes with, by name; any if it is to be ``replaced``."""
    activation = activation_of(foreign.owner)
    try:
        formula = formula_of(foreign, activation)
    except Unsupported as reason:
        could_be = _computes_any(foreign, activation)
        if replaced and could_be:
            return ""
        remedy = "; activation='relu' replaces it" if could_be else ""
        raise Unsupported(f"{reason}{remedy}") from None
    if formula.threshold or formula.relu_up:
        kind = "FATReLU" if formula.threshold else "dReLU"
        raise Unsupported(f"it computes {kind}, which sparse training does not have")
    return formula.activation


def _computes_any(foreign: ForeignFFN, activation: Callable[[Tensor], Any] | None) -> bool:
    """Whether a module computes the formula of an FFN with its activation, whichever it is."""
    gate, up, down = foreign.ffn
    x = probe_tokens(foreign.ffn)
    with torch.no_grad(), evaluating(foreign.owner):
        try:
            y = foreign.owner(x)
            for act in _FUNCTIONS if activation is None else (activation,):
                h = act(up(x)) if gate is None else act(gate(x)) * up(x)
                if relative_error(y, down(h)) < _TOLERANCE:
                    return True
        except Exception:  # a foreign module may raise anything
            return False
    return False


def _check_training(foreign: ForeignFFN) -> None:
    """Raises Unsupported if a module does more while it trains, such as dropout by a function."""
    module, x = foreign.owner, probe_tokens(foreign.ffn)
    devices = [x.device] if x.is_cuda else []
    with torch.no_grad(), torch.random.fork_rng(devices), evaluating(module):
        expected = module(x)
        module.train()
        y = module(x)
        if not torch.equal(y.nan_to_num(), expected.nan_to_num()):
            raise Unsupported(
                "in training mode it computes something else, such as dropout, which would be "
                "lost; set its dropout to 0"
            )


def _put(model: nn.Module, module: nn.Module, ffn: SparseFFN) -> None:
    """Puts an FFN wherever the module is."""
    for parent in list(model.modules()):
        # Unlike `named_children`, with every name of a child that has several.
        for name, child in list(parent._modules.items()):
            if child is module:
                setattr(parent, name, ffn)
