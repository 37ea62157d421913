"""Tries what looks like an FFN: by which formula does its own forward compute?

Shapes: B sequences, T tokens of each, K hidden_size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.architecture import ACTIVATIONS, rectified_activations
from sparsellm.ffn.admission import ForeignFFN
from sparsellm.ffn.discover import Projections, further_arguments
from sparsellm.ffn.formula import (
    Formula,
    OtherFormula,
    computed_by,
    find_formula,
    in_fp32,
    probe_tokens,
)
from sparsellm.ffn.replace import weights_of

Activation = Callable[[Tensor], Any]


def formula_of(foreign: ForeignFFN, activation: Activation | None) -> Formula:
    """The formula that a module, or a layer's FFN, computes in evaluation mode.

    Raises:
        OtherFormula: the kernels do not support it; the message says why.
    """
    with torch.no_grad(), _evaluating(foreign.owner):
        return (_layer_formula if foreign.is_layer else _module_formula)(foreign, activation)


def own_formulas(activation: Activation | None, like: Tensor) -> list[Formula]:
    """The formulas of an FFN with this activation; all, where the module does not name one.

    Raises:
        OtherFormula: it is another activation.
    """
    if activation is None:
        return [Formula(0.0, relu_up=False, activation=name) for name in rectified_activations()]
    formula = computed_by(activation, like)
    if formula is None:
        name = getattr(activation, "__name__", type(activation).__name__)
        known = " or ".join(ACTIVATIONS[name].title for name in rectified_activations())
        raise OtherFormula(f"its activation is {name}, not {known}")
    return [formula]


def _module_formula(foreign: ForeignFFN, activation: Activation | None) -> Formula:
    """The formula of an FFN that is a module of its own; a matrix of tokens is tried too."""
    forward, ffn = foreign.owner.forward, foreign.ffn
    if required := further_arguments(forward):
        raise OtherFormula(f"its forward needs further arguments: {', '.join(required)}")
    formula = _formula(forward, ffn, activation)
    x_MK = probe_tokens(ffn.up.in_features, like=ffn.up.weight).flatten(0, 1)
    _formula_on(x_MK, forward, ffn, activation)
    return formula


def _layer_formula(foreign: ForeignFFN, activation: Activation | None) -> Formula:
    """The formula of an FFN that a layer computes itself: up, activation, down in a row."""
    ffn, (up, act, *_, down) = foreign.ffn, foreign.inside
    k = ffn.up.in_features
    if k == ffn.up.out_features:
        raise OtherFormula("its layer computes it, with an intermediate_size of hidden_size")
    formula = _formula(lambda x: down(act(up(x))), ffn, activation)
    _check_use(foreign.owner, [up, act, down], probe_tokens(k, like=ffn.up.weight))
    return formula


def _formula(
    forward: Callable[[Tensor], Any], ffn: Projections, activation: Activation | None
) -> Formula:
    """The formula that a forward computes, in its own type and in fp32."""
    x_BTK = probe_tokens(ffn.up.in_features, like=ffn.up.weight)
    formula = _formula_on(x_BTK, forward, ffn, activation)
    with in_fp32(ffn):
        x_BTK = probe_tokens(ffn.up.in_features, like=ffn.up.weight)
        _formula_on(x_BTK, forward, ffn, activation)
    return formula


def _formula_on(
    x: Tensor, forward: Callable[[Tensor], Any], ffn: Projections, activation: Activation | None
) -> Formula:
    known = [weights_of(ffn, own) for own in own_formulas(activation, like=x)]
    return find_formula(x, _try(forward, x), known)


def _check_use(layer: nn.Module, chain: list[nn.Module], x_BTK: Tensor) -> None:
    """Checks that a layer computes the chain in a row, and uses nothing but its result.

    Raises:
        OtherFormula: it does not.
    """
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda m, given, found: calls.append((m, given[0], found)))
        for module in chain
    ]
    try:
        expected = _layer_output(layer, x_BTK)
    finally:
        for hook in hooks:
            hook.remove()
    # The same tensor, not an equal one: a factor between them may happen to be 1.
    in_a_row = all(found is given for (*_, found), (_, given, _) in itertools.pairwise(calls))
    if [module for module, *_ in calls] != chain or not in_a_row:
        raise OtherFormula("its layer does more than up, activation, down in a row with it")
    y_BTK = calls[-1][-1]
    results = (lambda x: x, lambda x: x, lambda _: y_BTK)
    try:
        for module, result in zip(chain, results, strict=True):
            vars(module)["forward"] = result
        found = _layer_output(layer, x_BTK)
    finally:
        for module in chain:
            vars(module).pop("forward", None)
    if not torch.equal(found.nan_to_num(), expected.nan_to_num()):
        raise OtherFormula("its layer's output would change")


def _layer_output(layer: nn.Module, x_BTK: Tensor) -> Tensor:
    """The layer's output for these sequences; other required arguments are None."""
    others: dict[str, Any] = dict.fromkeys(further_arguments(layer.forward))
    found = _try(lambda x: layer(x, **others), x_BTK)
    output = found[0] if isinstance(found, tuple) else found
    if not isinstance(output, Tensor) or output.shape != x_BTK.shape:
        raise OtherFormula(f"its layer returns a {type(output).__name__}, not tokens")
    return output


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
