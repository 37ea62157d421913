"""`sparsellm.accelerate`: the sparse kernels under any Hugging Face model with ReLU or ReLU² FFNs.

`discover` proposes FFNs by their names and says which may be taken over, `formula` finds out what
they compute, and `replace` swaps their forward for the kernels.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import nn

from sparsellm.ffn.dispatch import Dispatch, Kernels, Path, check_choice
from sparsellm.ffn.fp8 import unsupported
from sparsellm.ffn.inference_path import linears
from sparsellm.ffn.inference_path.discover import (
    ForeignFFN,
    Formula,
    Unsupported,
    activation_of,
    check_model,
    check_weights_of,
    find_ffns,
    foreign_ffn,
)
from sparsellm.ffn.inference_path.formula import activation_formulas, formula_of
from sparsellm.ffn.inference_path.memory_layout import move
from sparsellm.ffn.inference_path.replace import put_back, reads_e4m3_alone, replace_forward
from sparsellm.ffn.token_order import PrefillOrder
from sparsellm.ffn.types import Format
from sparsellm.words import reasons

TokenOrder = Literal["auto", "none"]
Precision = Literal["model", "fp8"]


@dataclass
class Acceleration:
    """What `accelerate` did, by module name."""

    left_alone: dict[str, str] = field(default_factory=dict)  # name → why
    dispatches: dict[str, Dispatch] = field(default_factory=dict, repr=False)
    linears: list[str] = field(default_factory=list, repr=False)  # other layers in FP8
    on_cpu: list[str] = field(default_factory=list, repr=False)  # weights that FP8 does not read
    prefill: PrefillOrder = field(default_factory=PrefillOrder, repr=False)
    training: bool = False  # the model was in training mode, where it computes as before

    @property
    def accelerated(self) -> list[str]:
        """The names of the FFNs that were accelerated."""
        return list(self.dispatches)

    def paths(self) -> dict[str, dict[int, Path]]:
        """The present path of each FFN, by the largest number of tokens that takes it."""
        return {name: dispatch.paths() for name, dispatch in self.dispatches.items()}

    def reasons(self) -> list[str]:
        """Why FFNs were not accelerated, one line per reason."""
        return reasons(self.left_alone)

    def __str__(self) -> str:
        waits = self.training and self.accelerated
        waiting = ", which run their own forward until model.eval()" if waits else ""
        fp8_text = f" and {len(self.linears)} linear layers in FP8" if self.linears else ""
        lines = [f"{len(self.accelerated)} FFNs accelerated{fp8_text}{waiting}"]
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
    precision: Precision = "model",
) -> Acceleration:
    """Runs every supported FFN of a model on the sparse kernels. Changes the model in place.

    Supported are gate/up/down with ReLU, ReLU² (``relu(gate)² * up``), FATReLU (its threshold is
    read from the module) or dReLU (``relu(gate) * relu(up)``), and up/down with ReLU, ReLU² or
    FATReLU, with or without biases. The names of its submodules make a module a candidate. It is
    accepted if its matrices are plain `nn.Linear` on a GPU, if none of its modules has hooks or a
    tensor that the formula does not use, and if its own forward returns what the formula returns on
    random tokens, in its own dtype and in fp32.

    This is for inference: an FFN falls back to its own forward where a gradient is needed, in
    training mode, and after anything but the values of its weights has changed, such as a module,
    the threshold of an activation or a hook. Parameters, state dict and values stay as they are.
    Only the strides of W_d change: it is stored in the memory layout of its transpose, which the
    kernels read. `restore` undoes this. safetensors' ``save_file`` accepts such a tensor after
    ``.contiguous()``; ``save_pretrained`` and ``save_model`` call that themselves.

    Args:
        model: a transformers model such as Llama, Qwen3, Arcee, OPT or T5, in bf16 or fp16, on a
            GPU.
        threshold: the threshold of FATReLU: gates up to it count as zero, in addition to those that
            the model's own activation sets to zero. 0 changes nothing.
        kernels: ``auto`` runs a layer dense while measurements say that dense is faster at its
            present density, so the last bits of a result may differ between calls; ``sparse`` and
            ``dense`` always use the same path, and their results are deterministic.
        format: how the sparse kernels store the active neurons: ``union``, which is faster if
            neighbouring tokens share neurons, or the paper's ``twell``. Calls of up to 64 tokens
            use neither.
        token_order: ``auto`` sorts the tokens of a long prompt or a batch so that neighbours share
            more neurons, if the model's embedding receives their ids; ``none`` keeps their order.
        precision: ``model`` computes in the model's dtype. ``fp8`` multiplies e4m3 numbers, with a
            scale per token and per neuron, in three places: the product of an FFN that decides
            which neurons are active, the linear layers of attention, and the layer that returns the
            logits. Results then differ from those of the dense model by FP8 rounding, a few percent
            of the output of an FFN or a layer. In calls of up to 64 tokens, only the weights are
            e4m3. It requires an Ada, Hopper or newer GPU. The GPU then holds only the 8-bit form of
            these weights. The CPU holds the originals, for `state_dict`; they return to the GPU
            where they are needed, for example for a gradient. The 8-bit form is updated when the
            originals change. Call `accelerate` again only after a change through ``.data``, to
            weights that were created in inference mode (torch counts no changes for them), or to a
            compiled model.

    Returns:
        The FFNs that were accelerated, and those that were not, with the reasons.

    Raises:
        ValueError: ``model`` is not a model (but a path, for example); a negative threshold; an
            unknown ``kernels``, ``format``, ``token_order`` or ``precision``; a GPU without FP8.
    """
    check_model(model, "accelerate")
    if not threshold >= 0:
        raise ValueError(f"threshold {threshold} must not be negative")
    check_choice("token_order", token_order, TokenOrder)
    check_choice("precision", precision, Precision)
    check_choice("kernels", kernels, Kernels)
    check_choice("format", format, Format)
    restore(model)
    done, fp8 = Acceleration(training=model.training), precision == "fp8"
    movable = _held_once(model) if fp8 else {}
    for name, module in find_ffns(model):
        try:
            foreign = foreign_ffn(module)
            formula = _accepted(foreign, threshold, fp8=fp8)
        except Unsupported as reason:
            done.left_alone[name] = str(reason)
        else:
            dispatch = Dispatch(kernels, foreign.ffn.up.weight.is_cuda, format)
            replace_forward(foreign, formula, dispatch, done.prefill, fp8=fp8)
            done.dispatches[name] = dispatch
            if fp8 and reads_e4m3_alone(dispatch):
                done.on_cpu += _move_to_cpu(foreign.ffn.gate or foreign.ffn.up, movable)
    if done.accelerated and fp8:
        for name, linear in linears.find_linears(model):
            linears.use_fp8(linear)
            done.linears.append(name)
            done.on_cpu += _move_to_cpu(linear, movable)
    if done.accelerated and token_order == "auto" and format == "union":
        done.prefill.watch(model)
    return done


def _held_once(model: nn.Module) -> dict[int, str]:
    """The names of the parameters that one module alone holds, by `id`.

    Where it is tied, the head's weight is the embedding's too, which reads it in 16 bits.
    """
    holders = Counter(id(p) for m in model.modules() for p in m._parameters.values())
    return {id(p): name for name, p in model.named_parameters() if holders[id(p)] == 1}


def _move_to_cpu(linear: nn.Linear, movable: dict[int, str]) -> list[str]:
    """Moves a weight that is read in e4m3 alone; returns its name, or nothing if it stays."""
    name = movable.get(id(linear.weight))
    if name is None:
        return []
    move(linear.weight, torch.device("cpu"))
    return [name]


def accelerate_whole(
    model: nn.Module,
    kernels: Kernels,
    token_order: TokenOrder = "none",
    precision: Precision = "model",
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
    """Undoes `accelerate`. Does nothing if the model was not accelerated.

    Raises:
        ValueError: ``model`` is not a model.
    """
    check_model(model, "restore")
    for module in model.modules():
        put_back(module)
        linears.put_back(module)


def _accepted(foreign: ForeignFFN, threshold: float, *, fp8: bool) -> Formula:
    """What the kernels compute in place of a module's forward.

    Raises:
        Unsupported: they do not support it; the message says why.
    """
    activation, up_NK = activation_of(foreign.owner), foreign.ffn.up.weight
    activation_formulas(activation, like=up_NK)
    check_weights_of(foreign.ffn)
    formula = formula_of(foreign, activation)
    if fp8 and (reason := unsupported(up_NK.device)):
        raise ValueError(f"precision fp8: {reason}; use precision='model'")
    if fp8 and any(size % 16 for size in up_NK.shape):
        raise Unsupported(f"its {tuple(up_NK.shape)} weights: FP8 needs multiples of 16")
    return formula._replace(threshold=max(formula.threshold, threshold))
