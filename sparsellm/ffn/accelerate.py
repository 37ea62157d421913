"""`sparsellm.accelerate`: the sparse kernels under any Hugging Face model with ReLU FFNs.

`discover` proposes FFNs by their names, `formula` finds out what they compute, and `replace` swaps
their forward for the kernels.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sparsellm.ffn.discover import (
    Found,
    Names,
    activation_module,
    activation_of,
    cannot_compute,
    find_ffns,
    further_arguments,
    is_layer,
    projections,
)
from sparsellm.ffn.dispatch import Dispatch, Kernels, Path, new_dispatch
from sparsellm.ffn.formula import (
    Formula,
    OtherFormula,
    differs,
    find_formula,
    probe_tokens,
    threshold_of,
)
from sparsellm.ffn.prefill_order import PrefillOrder
from sparsellm.ffn.replace import (
    is_replaced,
    put_back,
    replace_forward,
    replace_in_layer,
    stop_ordering,
    take_order_from,
    weights_of,
)
from sparsellm.ffn.types import Format

TokenOrder = Literal["auto", "none"]


@dataclass
class Acceleration:
    """What `accelerate` did, by module name."""

    accelerated: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)  # name → why
    dispatches: dict[str, Dispatch] = field(default_factory=dict, repr=False)
    prefill: PrefillOrder = field(default_factory=PrefillOrder, repr=False)

    def paths(self) -> dict[str, dict[int, Path]]:
        """What each FFN runs now: by number of tokens (upper end of a bucket)."""
        return {name: dispatch.paths() for name, dispatch in self.dispatches.items()}

    def reasons(self) -> list[str]:
        """Why FFNs were not accelerated, one line per reason."""
        by_reason = defaultdict(list)
        for name, why in self.left_alone.items():
            by_reason[why].append(name or "the model itself")
        return [
            f"{names[0]}{f' and {len(names) - 1} more' if len(names) > 1 else ''}: {why}"
            for why, names in by_reason.items()
        ]

    def __str__(self) -> str:
        lines = [f"{len(self.accelerated)} FFNs accelerated"]
        lines += [f"left alone: {line}" for line in self.reasons()]
        if not self.accelerated and not self.left_alone:
            lines.append("nothing in this model looks like an FFN")
        return "\n".join(lines)


def accelerate(
    model: nn.Module,
    threshold: float = 0.0,
    kernels: Kernels = "auto",
    format: Format = "union",
    token_order: TokenOrder = "auto",
) -> Acceleration:
    """Runs every FFN that the sparse kernels support on them. Changes the model in place.

    Supported are gate/up/down with ReLU, FATReLU (its threshold is read from the module) or dReLU
    (``relu(gate) * relu(up)``), and up/down with ReLU or FATReLU, with or without biases. Names
    only propose an FFN: it is accepted if its own forward returns what our formula returns, on
    random tokens. This is for inference. Parameters and state dict stay as they are; a transposed
    copy of W_d is kept, which follows the weight: call it again only after a change through
    ``.data``, to a compiled model, or of a module.

    Args:
        model: such as Llama, Qwen3, Arcee, OPT or T5 from transformers, in bf16 or fp16 on its GPU.
        threshold: of FATReLU: gates up to it count as zero, in addition to those that the model's
            own activation sets to zero. 0 changes nothing.
        kernels: ``auto`` runs a layer dense while measurements say that dense is faster at its
            present density, so the last bits of a result may differ between calls; ``sparse`` and
            ``dense`` always use the same path, and their results are deterministic.
        format: of the sparse kernels: ``union``, which is faster where neighbouring tokens share
            neurons, or the paper's ``twell``. Up to 64 tokens use neither.
        token_order: ``auto`` lets the sparse kernels sort the tokens of a long prompt or a batch so
            that neighbours share more neurons, where the model's embedding sees their ids;
            ``none`` keeps the natural order.

    Returns:
        What was accelerated, and what looks like an FFN but was not, with the reasons.

    Raises:
        ValueError: a negative threshold, an unknown ``kernels``, ``format`` or ``token_order``.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold {threshold} must not be negative")
    if token_order not in ("auto", "none"):
        raise ValueError(f"token_order {token_order!r} must be auto or none")
    new_dispatch(kernels, False, format)  # refuses what is unknown before anything is changed
    restore(model)
    done = Acceleration()
    for found in find_ffns(model):
        try:
            dispatch = _accept(found, threshold, kernels, format)
        except OtherFormula as reason:
            done.left_alone[found.name] = str(reason)
        else:
            done.accelerated.append(found.name)
            done.dispatches[found.name] = dispatch
    take_order_from(model, done.prefill)
    if done.accelerated and token_order == "auto" and format == "union":
        done.prefill.watch(model)
    return done


def accelerate_whole(
    model: nn.Module, kernels: Kernels, token_order: TokenOrder = "none"
) -> Acceleration:
    """`accelerate` for callers that need every FFN accelerated.

    Raises:
        ValueError: some FFN cannot be accelerated; the message says which, and why.
    """
    done = accelerate(model, kernels=kernels, token_order=token_order)
    if done.left_alone or not done.accelerated:
        restore(model)
        why = "; ".join(done.reasons()) or "nothing in this model looks like an FFN"
        raise ValueError(f"kernels {kernels}: {why}")
    return done


def restore(model: nn.Module) -> None:
    """Undoes `accelerate`. Does nothing to a model that was not accelerated."""
    stop_ordering(model)
    for module in model.modules():
        put_back(module)


def _accept(found: Found, threshold: float, kernels: Kernels, format: Format) -> Dispatch:
    """Replaces the forward of a module that looks like an FFN.

    Raises:
        OtherFormula: the kernels do not support it; the message says why.
    """
    module, names = found.module, found.names
    if names is None:
        raise OtherFormula(found.reason)
    ffn = projections(module, names)
    activation, own_threshold = activation_of(module), None
    if activation is not None:
        own_threshold = threshold_of(activation, ffn.up.weight)
        if own_threshold is None:
            name = getattr(activation, "__name__", type(activation).__name__)
            raise OtherFormula(f"its activation is {name}, not ReLU")
    if reason := cannot_compute(ffn):
        raise OtherFormula(reason)
    accept = _accept_in_layer if is_layer(module, names) else _accept_module
    with torch.no_grad(), _evaluating(module):
        dispatch = new_dispatch(kernels, ffn.up.weight.is_cuda, format)
        accept(module, names, own_threshold or 0.0, threshold, dispatch)
    return dispatch


def _accept_module(
    module: nn.Module, names: Names, own_threshold: float, threshold: float, dispatch: Dispatch
) -> None:
    """An FFN that is a module of its own."""
    if required := further_arguments(module.forward):
        raise OtherFormula(f"its forward needs further arguments: {', '.join(required)}")
    ffn = projections(module, names)
    x_MK = probe_tokens(ffn.up.in_features, like=ffn.up.weight)
    y_MK = _try(module.forward, x_MK)
    formula = find_formula(x_MK, y_MK, weights_of(ffn, Formula(own_threshold, relu_up=False)))
    formula = formula._replace(threshold=max(formula.threshold, threshold))
    replace_forward(module, names, formula, dispatch)


def _accept_in_layer(
    layer: nn.Module, names: Names, own_threshold: float, threshold: float, dispatch: Dispatch
) -> None:
    """An FFN that a layer's own forward computes, as up, activation, down in a row."""
    activation = activation_module(layer)
    ffn = projections(layer, names)
    k, n = ffn.up.in_features, ffn.up.out_features
    if names.gate is not None or activation is None:
        raise OtherFormula(
            "its layer computes it, and not as up, activation module, down in a row: there is no "
            "forward to replace"
        )
    if k == n:
        raise OtherFormula("its layer computes it, with an intermediate_size of hidden_size")
    if is_replaced(activation):
        raise OtherFormula("its layer computes it, with another layer's activation module")
    x_MK = probe_tokens(k, like=ffn.up.weight)
    y_MK = _try(lambda x: ffn.down(activation(ffn.up(x))), x_MK)
    formula = find_formula(x_MK, y_MK, weights_of(ffn, Formula(own_threshold, relu_up=False)))
    expected = _layer_output(layer, x_MK)
    if not _runs_in_a_row(layer, [ffn.up, activation, ffn.down], x_MK):
        raise OtherFormula("its layer does more than up, activation, down in a row with it")
    replace_in_layer(layer, names, activation, formula, dispatch)
    try:
        if differs(_layer_output(layer, x_MK), expected):
            raise OtherFormula("its layer's output would change")
    except OtherFormula:
        for module in layer.modules():
            put_back(module)
        raise
    if threshold > formula.threshold:
        for module in layer.modules():
            put_back(module)
        replace_in_layer(layer, names, activation, Formula(threshold, relu_up=False), dispatch)


def _layer_output(layer: nn.Module, x_MK: Tensor) -> Tensor:
    """The layer's output for one sequence of these tokens; other required arguments are None."""
    others: dict[str, Any] = dict.fromkeys(further_arguments(layer.forward))
    found = _try(lambda x: layer(x, **others), x_MK[None])
    output = found[0] if isinstance(found, tuple) else found
    if not isinstance(output, Tensor) or output.shape[-1] != x_MK.shape[-1]:
        raise OtherFormula(f"its layer returns a {type(output).__name__}, not tokens")
    return output


def _runs_in_a_row(layer: nn.Module, chain: list[nn.Module], x_MK: Tensor) -> bool:
    """Whether a layer calls each of these once, on the output of the previous one."""
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []
    hooks = [
        module.register_forward_hook(lambda m, given, found: calls.append((m, given[0], found)))
        for module in chain
    ]
    try:
        _layer_output(layer, x_MK)
    finally:
        for hook in hooks:
            hook.remove()
    in_order = [module for module, _, _ in calls] == chain
    return in_order and all(
        torch.equal(found, given) for (_, _, found), (_, given, _) in itertools.pairwise(calls)
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
