"""Tries what looks like an FFN: by which formula does its own forward compute?

Shapes: B sequences, T tokens of each, K hidden_size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.ffn.admission import ForeignFFN
from sparsellm.ffn.discover import Projections, further_arguments
from sparsellm.ffn.formula import (
    Formula,
    OtherFormula,
    differs,
    find_formula,
    in_fp32,
    probe_tokens,
    threshold_of,
)
from sparsellm.ffn.reference import fatrelu_ffn
from sparsellm.ffn.replace import weights_of

Activation = Callable[[Tensor], Any]


def formula_of(foreign: ForeignFFN, activation: Activation | None) -> Formula:
    """The formula that a module, or a layer's FFN, computes in evaluation mode.

    Raises:
        OtherFormula: the kernels do not support it; the message says why.
    """
    with torch.no_grad(), _evaluating(foreign.owner):
        return (_layer_formula if foreign.is_layer else _module_formula)(foreign, activation)


def own_threshold(activation: Activation | None, like: Tensor) -> float:
    """The threshold of an activation that is ReLU or FATReLU; else raises OtherFormula."""
    if activation is None:
        return 0.0  # the formula says whether it is ReLU
    threshold = threshold_of(activation, like)
    if threshold is None:
        name = getattr(activation, "__name__", type(activation).__name__)
        raise OtherFormula(f"its activation is {name}, not ReLU")
    return threshold


def _formula(
    forward: Callable[[Tensor], Any], ffn: Projections, activation: Activation | None, x: Tensor
) -> Formula:
    """By which a forward computes an FFN, judged in the type of x."""
    own = Formula(own_threshold(activation, x), relu_up=False)
    return find_formula(x, _try(forward, x), weights_of(ffn, own))


def _module_formula(foreign: ForeignFFN, activation: Activation | None) -> Formula:
    """Of an FFN that is a module of its own: tried in its own type, in fp32, and as a matrix."""
    module, ffn = foreign.owner, foreign.ffn
    if required := further_arguments(module.forward):
        raise OtherFormula(f"its forward needs further arguments: {', '.join(required)}")
    x_BTK = probe_tokens(ffn.up.in_features, like=ffn.up.weight)
    _formula(module.forward, ffn, activation, x_BTK.flatten(0, 1))
    formula = _formula(module.forward, ffn, activation, x_BTK)
    with in_fp32(module):
        x_BTK = probe_tokens(ffn.up.in_features, like=ffn.up.weight)
        _formula(module.forward, ffn, activation, x_BTK)
    return formula


def _layer_formula(foreign: ForeignFFN, activation: Activation | None) -> Formula:
    """Of an FFN that a layer's own forward computes, as up, activation, down in a row."""
    layer, ffn, (up, act, *_, down) = foreign.owner, foreign.ffn, foreign.inside
    k = ffn.up.in_features
    if k == ffn.up.out_features:
        raise OtherFormula("its layer computes it, with an intermediate_size of hidden_size")

    def in_a_row(x: Tensor) -> Any:
        return down(act(up(x)))

    x_BTK = probe_tokens(k, like=ffn.up.weight)
    formula = _formula(in_a_row, ffn, activation, x_BTK)
    if not _runs_in_a_row(layer, [up, act, down], x_BTK):
        raise OtherFormula("its layer does more than up, activation, down in a row with it")
    with in_fp32(layer):
        x_BTK = probe_tokens(k, like=ffn.up.weight)
        w = weights_of(ffn, _formula(in_a_row, ffn, activation, x_BTK))
        expected = _layer_output(layer, x_BTK)
        with ExitStack() as forwards:
            for module in (up, act):
                forwards.enter_context(_forward_of(module, lambda x: x))
            forwards.enter_context(_forward_of(down, lambda x: fatrelu_ffn(x, w)))
            found = _layer_output(layer, x_BTK)
    if differs(found, expected):
        raise OtherFormula("its layer's output would change")
    return formula


@contextmanager
def _forward_of(module: nn.Module, forward: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """A module that has no forward of its own computes this."""
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]


def _layer_output(layer: nn.Module, x_BTK: Tensor) -> Tensor:
    """The layer's output for these sequences; other required arguments are None."""
    others: dict[str, Any] = dict.fromkeys(further_arguments(layer.forward))
    found = _try(lambda x: layer(x, **others), x_BTK)
    output = found[0] if isinstance(found, tuple) else found
    if not isinstance(output, Tensor) or output.shape != x_BTK.shape:
        raise OtherFormula(f"its layer returns a {type(output).__name__}, not tokens")
    return output


def _runs_in_a_row(layer: nn.Module, chain: list[nn.Module], x_BTK: Tensor) -> bool:
    """Whether a layer calls each of these once, on the very tensor that the previous one gave."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda m, given, found: calls.append((m, given[0], found)))
        for module in chain
    ]
    try:
        _layer_output(layer, x_BTK)
    finally:
        for hook in hooks:
            hook.remove()
    in_order = [module for module, _, _ in calls] == chain
    return in_order and all(
        found is given for (_, _, found), (_, given, _) in itertools.pairwise(calls)
    )


def _try(forward: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return forward(x)
    except Exception as error:  # a foreign module may raise anything
        first_line = str(error).partition("\n")[0]
        raise OtherFormula(
            f"its forward could not be tried: {type(error).__name__}: {first_line}"
        ) from error


@contextmanager
def _evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout."""
    training = [m for m in module.modules() if m.training]
    module.eval()
    try:
        yield
    finally:
        for m in training:
            m.training = True
