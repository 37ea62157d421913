"""`sparsellm.accelerate`: the sparse kernels under any Hugging Face model with ReLU or ReLU² FFNs.

`discover` proposes FFNs by their names, `admission` says which may be taken over, `formula` finds
out what they compute, and `replace` swaps their forward for the kernels.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Literal, get_args

from torch import Tensor, nn

from sparsellm.ffn.admission import check_weights_of, foreign_ffn
from sparsellm.ffn.discover import Unsupported, activation_of, find_ffns
from sparsellm.ffn.dispatch import Dispatch, Kernels, Path, check_format, check_kernels
from sparsellm.ffn.formula import formula_of, own_formulas
from sparsellm.ffn.fp8 import unsupported
from sparsellm.ffn.replace import put_back, replace_forward, stop_ordering, take_order_from
from sparsellm.ffn.token_order import PrefillOrder
from sparsellm.ffn.types import Format

TokenOrder = Literal["auto", "none"]
Precision = Literal["own", "fp8"]


@dataclass
class Acceleration:
    """What `accelerate` did, by module name."""

    accelerated: list[str] = field(default_factory=list)
    left_alone: dict[str, str] = field(default_factory=dict)  # name → why
    dispatches: dict[str, Dispatch] = field(default_factory=dict, repr=False)
    prefill: PrefillOrder = field(default_factory=PrefillOrder, repr=False)
    training: bool = False  # the model was in training mode, where it computes as before

    def paths(self) -> dict[str, dict[int, Path]]:
        """The present path of each FFN, by the largest number of tokens that takes it."""
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
        waiting = ", which run their own forward until model.eval()" if self.training else ""
        lines = [f"{len(self.accelerated)} FFNs accelerated{waiting}"]
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
    *,
    precision: Precision = "own",
) -> Acceleration:
    """Runs every FFN that the sparse kernels support on them. Changes the model in place.

    Supported are gate/up/down with ReLU, ReLU² (``relu(gate)² * up``), FATReLU (its threshold is
    read from the module) or dReLU (``relu(gate) * relu(up)``), and up/down with ReLU, ReLU² or
    FATReLU, with or without biases. Names
    only propose an FFN. It is accepted if its matrices are plain `nn.Linear` on a GPU, if none of
    its modules has hooks or a tensor that the formula does not use, and if its own forward returns
    what the formula returns: on random tokens, in its own type and in fp32.

    This is for inference: an FFN's own forward runs where a gradient is needed and while the module
    trains. It also runs once anything but the weights' values has changed, such as a module, an
    activation's threshold or a hook. Parameters and state dict stay as they are; a transposed copy
    of W_d is kept, which follows the weight: call it again only after a change through ``.data``
    or to a compiled model.

    Args:
        model: from transformers, such as Llama, Qwen3, Arcee, OPT or T5; in bf16 or fp16, on a GPU.
        threshold: FATReLU's: gates up to it count as zero, in addition to those that the model's
            own activation sets to zero. 0 changes nothing.
        kernels: ``auto`` runs a layer dense while measurements say that dense is faster at its
            present density, so the last bits of a result may differ between calls; ``sparse`` and
            ``dense`` always use the same path, and their results are deterministic.
        format: how the sparse kernels store a pattern: ``union``, which is faster if neighbouring
            tokens share neurons, or the paper's ``twell``. Calls of up to 64 tokens use neither.
        token_order: ``auto`` lets the sparse kernels sort the tokens of a long prompt or a batch so
            that neighbours share more neurons, where the model's embedding sees their ids;
            ``none`` keeps the natural order.
        precision: ``own`` computes in the model's type. ``fp8`` multiplies e4m3 numbers, with a
            scale per token and per neuron, in the one product of an FFN that decides what fires,
            where it runs on the sparse kernels: outputs then differ from the dense model's by FP8
            rounding, a few percent of an FFN's output. In calls of up to 64 tokens only its weights
            are e4m3. It requires an Ada, Hopper or newer GPU, and keeps that matrix in 8 bits too.

    Returns:
        What was accelerated, and what looks like an FFN but was not, with the reasons.

    Raises:
        ValueError: a negative threshold; an unknown ``kernels``, ``format``, ``token_order`` or
            ``precision``; a GPU without FP8.
    """
    if not threshold >= 0:
        raise ValueError(f"threshold {threshold} must not be negative")
    if token_order not in ("auto", "none"):
        raise ValueError(f"token_order {token_order!r} must be auto or none")
    if precision not in get_args(Precision):
        raise ValueError(f"precision {precision!r} must be {' or '.join(get_args(Precision))}")
    check_kernels(kernels)
    check_format(format)
    restore(model)
    done = Acceleration(training=model.training)
    for name, module in find_ffns(model):
        try:
            dispatch = _accept(module, threshold, kernels, format, fp8=precision == "fp8")
        except Unsupported as reason:
            done.left_alone[name] = str(reason)
        else:
            done.accelerated.append(name)
            done.dispatches[name] = dispatch
    take_order_from(model, done.prefill)
    if done.accelerated and token_order == "auto" and format == "union":
        done.prefill.watch(model)
    return done


def accelerate_whole(
    model: nn.Module,
    kernels: Kernels,
    token_order: TokenOrder = "none",
    precision: Precision = "own",
) -> Acceleration:
    """`accelerate` for callers that need every FFN accelerated.

    Raises:
        ValueError: some FFN cannot be accelerated; the message says which, and why.
    """
    done = accelerate(model, kernels=kernels, token_order=token_order, precision=precision)
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


def _accept(
    module: nn.Module, threshold: float, kernels: Kernels, format: Format, *, fp8: bool
) -> Dispatch:
    """Replaces the forward of a module that looks like an FFN.

    Raises:
        Unsupported: the kernels do not support it; the message says why.
    """
    foreign, activation = foreign_ffn(module), activation_of(module)
    up_NK = foreign.ffn.up.weight
    own_formulas(activation, like=up_NK)
    check_weights_of(foreign.ffn)
    formula = formula_of(foreign, activation)
    formula = formula._replace(threshold=max(formula.threshold, threshold))
    if fp8:
        _check_fp8(up_NK)
    dispatch = Dispatch(kernels, up_NK.is_cuda, format)
    replace_forward(foreign, formula, dispatch, fp8=fp8)
    return dispatch


def _check_fp8(up_NK: Tensor) -> None:
    if reason := unsupported(up_NK.device):
        raise ValueError(f"precision fp8: {reason}; use precision='own'")
    if up_NK.shape[0] % 16 or up_NK.shape[1] % 16:
        raise Unsupported(f"its {tuple(up_NK.shape)} weights: FP8 needs multiples of 16")
