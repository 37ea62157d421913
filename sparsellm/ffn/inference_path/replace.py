"""The forward that `sparsellm.accelerate` installs in a module, and its removal.

Shapes: K hidden_size, N intermediate_size.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsellm.ffn.dispatch import Dispatch
from sparsellm.ffn.inference_ops import sparse_ffn
from sparsellm.ffn.inference_path.derived import Derived, quantised_buffers, quantised_of
from sparsellm.ffn.inference_path.discover import ForeignFFN, Formula
from sparsellm.ffn.inference_path.memory_layout import move, restore_layout, transposed_in_place
from sparsellm.ffn.reference import activation_function
from sparsellm.ffn.token_order import PrefillOrder
from sparsellm.ffn.types import FFNWeights

INSTALLED = "sparsellm_installed"
# Up to these sizes host time dominates a dense FFN: an H200 reads 256 MiB in 65 µs, which is as
# long as queueing the operator takes.
FEW_TOKENS, LARGE_BYTES = 64, 2**28


@dataclass
class _Serving:
    """An FFN that the kernels compute."""

    foreign: ForeignFFN
    formula: Formula
    dispatch: Dispatch
    prefill: PrefillOrder  # of the model
    dtype: torch.dtype  # of the weights; tokens of another type are not served
    large: bool  # a GPU takes longer to read the weights than a host to queue the operator
    parameters: dict[str, Any]  # of the replaced forward, with their defaults
    previous: Callable[..., Any] | None  # a forward that was set on the FFN's instance
    derived: Derived | None  # in FP8: the quantised matrix, as buffers of the calling module


def replace_forward(
    foreign: ForeignFFN, formula: Formula, dispatch: Dispatch, prefill: PrefillOrder, *, fp8: bool
) -> None:
    """Replaces the forward of an FFN, or of the modules that form one within a layer.

    Such modules run in a row: up and activation then pass the tokens through unchanged, K wide, and
    down computes the whole FFN. An input that is N wide was computed by up itself, as in training;
    so K must not be N.

    The memory of W_d becomes that of its transpose. In FP8 the module that computes the FFN is
    given the quantised matrix, too.
    """
    up, down, w = foreign.ffn.up, foreign.ffn.down, foreign.ffn.weights(formula)
    server = down if foreign.is_layer else foreign.owner
    parameters = inspect.signature(server.forward).parameters.values()
    serving = _Serving(
        foreign=foreign,
        formula=formula,
        dispatch=dispatch,
        prefill=prefill,
        dtype=w.down_KN.dtype,
        large=sum(tensor.nbytes for tensor in foreign.ffn.tensors()) > LARGE_BYTES,
        parameters={p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD},
        previous=vars(server).get("forward"),
        derived=Derived(server, quantised_buffers, w.first[0]) if fp8 else None,
    )
    if foreign.is_layer:
        _install(up, _up_forward, serving)
        _install(foreign.inside[1], _activation_forward, serving)
        _install(down, _down_forward, serving)
    else:
        _install(server, _ffn_forward, serving)
    transposed_in_place(w.down_KN)
    foreign.remember()


def _install(module: nn.Module, forward: Callable[..., Any], serving: _Serving) -> None:
    attributes = vars(module)
    attributes[INSTALLED] = serving
    # Not a closure: a copy of the module then computes with its own weights. Not a bound method,
    # which `torch.save` writes as an attribute of the module's class.
    attributes["forward"] = partial(forward, module)


def reads_e4m3_alone(dispatch: Dispatch) -> bool:
    """Whether in FP8 the 16-bit weight of the pattern is not read.

    TwELL computes tokens that overflow it from that weight.
    """
    return dispatch.format == "union"


def is_replaced(module: nn.Module) -> bool:
    """Whether `replace_forward` replaced the module's forward."""
    return INSTALLED in vars(module)


def forget_order(module: nn.Module) -> None:
    """Ends the order of a prompt's tokens where their forward pass was not the model's own."""
    serving: _Serving | None = vars(module).get(INSTALLED)
    if serving is not None:
        serving.prefill.forget()


def put_back(module: nn.Module) -> None:
    """Restores a module's own forward, if it was replaced, and removes the hooks of its order."""
    attributes = vars(module)
    serving: _Serving | None = attributes.pop(INSTALLED, None)
    if serving is None:
        return
    serving.prefill.unwatch()
    restore_layout(serving.foreign.ffn.down.weight)
    _bring_back(serving)
    if serving.derived is not None:
        serving.derived.remove(module)
    del attributes["forward"]
    if serving.previous is not None:
        attributes["forward"] = serving.previous


def _ffn_forward(module: nn.Module, *arguments: Any, **named: Any) -> Any:
    serving: _Serving = module.__dict__[INSTALLED]
    x = arguments[0] if len(arguments) == 1 and not named else _tokens(serving, arguments, named)
    if x is None or not _is_for_kernels(x, serving):
        return _own_forward(module, *arguments, **named)
    return _compute(x, serving, module)


def _up_forward(up: nn.Linear, x: Tensor) -> Tensor:
    return x if _is_for_kernels(x, up.__dict__[INSTALLED]) else _own_forward(up, x)


def _activation_forward(activation: nn.Module, x: Tensor) -> Tensor:
    serving: _Serving = activation.__dict__[INSTALLED]
    is_up = x.shape[-1] != serving.foreign.ffn.up.in_features
    return _own_forward(activation, x) if is_up else x


def _down_forward(down: nn.Linear, x: Tensor) -> Tensor:
    is_h = x.shape[-1] == down.in_features
    return _own_forward(down, x) if is_h else _compute(x, down.__dict__[INSTALLED], down)


def _bring_back(serving: _Serving) -> None:
    """Moves the weight that FP8 does not read to where the other weights are."""
    ffn = serving.foreign.ffn
    move((ffn.gate or ffn.up).weight, ffn.down.weight.device)


def _own_forward(module: nn.Module, *arguments: Any, **named: Any) -> Any:
    serving: _Serving = module.__dict__[INSTALLED]
    _bring_back(serving)
    if serving.previous is not None:
        return serving.previous(*arguments, **named)
    return type(module).forward(module, *arguments, **named)


def _tokens(serving: _Serving, arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """The tokens of a call, if all other arguments have their default values; else None."""
    if len(arguments) > len(serving.parameters):
        return None
    values = dict(zip(serving.parameters, arguments, strict=False)) | named
    x: Tensor | None = values.pop(next(iter(serving.parameters)), None)
    defaults = serving.parameters
    are_defaults = all(
        name in defaults and value is defaults[name] for name, value in values.items()
    )
    return x if are_defaults else None


def _is_for_kernels(x: Tensor, serving: _Serving) -> bool:
    """Whether the kernels compute a call; else the replaced forward does.

    The replaced forward computes calls with tokens of another type or with no tokens, calls that
    need a gradient, calls in training, and all calls once the FFN has changed.
    """
    if x.dtype != serving.dtype or x.numel() == 0 or not serving.foreign.unchanged():
        return False
    if not torch.is_grad_enabled():
        return True
    return not (x.requires_grad or any(t.requires_grad for t in serving.foreign.ffn.tensors()))


def _compute(x: Tensor, serving: _Serving, module: nn.Module) -> Tensor:
    w = serving.foreign.ffn.weights(serving.formula)
    if _few_stay_dense(x, serving):
        return _few_dense(x, w)
    w = w._replace(down_NK=transposed_in_place(w.down_KN))
    if serving.derived is not None:
        serving.derived.update(module, w.first[0])
        rows = quantised_of(module)
        w = w.in_fp8(rows) if reads_e4m3_alone(serving.dispatch) else w._replace(quantised=rows)
    x_MK = x if x.ndim == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()
    y_MK = sparse_ffn(x_MK, w, serving.dispatch.handle, serving.prefill.token_M(x_MK))
    return y_MK if x.ndim == 2 else y_MK.view(x.shape)


def _few_stay_dense(x: Tensor, serving: _Serving) -> bool:
    """Whether `_few_dense` is faster for a call than the operator.

    It is not faster if host time does not matter, that is with large weights or in the capture of a
    CUDA graph: the operator's dense path has one kernel where `_few_dense` has two.
    """
    num_tokens = x.numel() // x.shape[-1]
    return (
        num_tokens <= FEW_TOKENS
        and not serving.large
        and serving.derived is None
        and serving.formula.threshold == 0
        and not torch.compiler.is_compiling()
        and not (x.is_cuda and torch.cuda.is_current_stream_capturing())
        and serving.dispatch.stays_dense(num_tokens)
    )


def _few_dense(x: Tensor, w: FFNWeights) -> Tensor:
    """The dense FFN by PyTorch's operators, which take less host time than ours with its checks."""
    up = F.linear(x, w.up_NK, w.b_up_N)
    if w.relu_up:
        up = F.relu(up)
    activation = activation_function(w.activation)
    h = activation(up) if w.gate_NK is None else activation(F.linear(x, w.gate_NK, w.b_gate_N)) * up
    return F.linear(h, w.down_KN, w.b_down_K)
