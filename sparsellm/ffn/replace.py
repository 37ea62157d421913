"""The forward that `sparsellm.accelerate` installs in a module, and its removal.

Shapes: K hidden_size, N intermediate_size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sparsellm.ffn.discover import Names, Projections, projections
from sparsellm.ffn.dispatch import Dispatch
from sparsellm.ffn.formula import Formula
from sparsellm.ffn.inference_ops import sparse_ffn
from sparsellm.ffn.prefill_order import PrefillOrder
from sparsellm.ffn.types import FFNWeights

DOWN_NK, INSTALLED = "sparsellm_down_NK", "sparsellm_installed"
# Up to these sizes host time dominates a dense FFN: an H200 reads 256 MiB in 65 µs, which is as
# long as queueing the operator takes.
FEW_TOKENS, LARGE_BYTES = 64, 2**28


@dataclass
class _Replaced:
    """What is remembered about a module whose forward was replaced."""

    previous: Callable[..., Any] | None  # a forward of the instance's own
    owner: nn.Module  # of the FFN: the module itself, or the layer that it is part of
    names: Names  # of the matrices in the owner
    drops: bool  # something in the owner drops activations while it trains
    dtype: torch.dtype  # of the weights, and so of the tokens that are served


@dataclass
class _Serving(_Replaced):
    """… by the kernels; the transposed W_d is a buffer of the module."""

    dispatch: Dispatch
    formula: Formula
    large: bool  # a GPU takes longer to read the weights than a host to queue the operator
    parameters: dict[str, Any]  # of the replaced forward, with their defaults
    version: int | None  # of the W_d that was transposed, see `_version`
    prefill: PrefillOrder | None = None  # of the model


def weights_of(ffn: Projections, formula: Formula) -> FFNWeights:
    """An FFN's weights and biases as they are now, for a formula."""
    gate_NK, b_gate_N = (None, None) if ffn.gate is None else _parameters(ffn.gate)
    up_NK, b_up_N = _parameters(ffn.up)
    down_KN, b_down_K = _parameters(ffn.down)
    return FFNWeights(gate_NK, up_NK, down_KN, b_gate_N, b_up_N, b_down_K, *formula)


def _parameters(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """Weight and bias, read from ``_parameters``: attribute lookup takes a microsecond."""
    own = linear._parameters
    weight = own.get("weight")
    if weight is None:  # parametrized
        return linear.weight, linear.bias
    return weight, own["bias"]


def replace_forward(module: nn.Module, names: Names, formula: Formula, dispatch: Dispatch) -> None:
    """The forward of an FFN that is a module of its own."""
    _serve(module, _ffn_forward, module, names, formula=formula, dispatch=dispatch)


def replace_in_layer(
    layer: nn.Module, names: Names, activation: nn.Module, formula: Formula, dispatch: Dispatch
) -> None:
    """The forward of an FFN that a layer computes as up, activation, down in a row; K ≠ N.

    Up and activation pass the tokens through unchanged, K wide, and down computes the whole FFN. An
    input that is N wide was computed by up itself, as in training.
    """
    ffn = projections(layer, names)
    _serve(ffn.down, _down_forward, layer, names, formula=formula, dispatch=dispatch)
    for module, forward in ((ffn.up, _up_forward), (activation, _activation_forward)):
        own = vars(module)
        own[INSTALLED] = _Replaced(
            own.get("forward"), layer, names, _drops(layer), ffn.up.weight.dtype
        )
        own["forward"] = MethodType(forward, module)


def _serve(
    module: nn.Module,
    forward: Callable[..., Any],
    owner: nn.Module,
    names: Names,
    *,
    formula: Formula,
    dispatch: Dispatch,
) -> None:
    ffn, own = projections(owner, names), vars(module)
    large = sum(linear.weight.nbytes for linear in ffn.present) > LARGE_BYTES
    parameters = inspect.signature(module.forward).parameters.values()
    named = {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
    # A buffer moves with the module, and a non-persistent one is not saved with it.
    module.register_buffer(DOWN_NK, ffn.down.weight.detach().t().contiguous(), persistent=False)
    own[INSTALLED] = _Serving(
        own.get("forward"),
        owner,
        names,
        _drops(owner),
        ffn.up.weight.dtype,
        dispatch,
        formula,
        large,
        named,
        _version(ffn.down.weight),
    )
    # A bound method, not a closure: a deep copy of the module then computes with its own weights.
    own["forward"] = MethodType(forward, module)


def _version(weight: Tensor) -> int | None:
    """Changes with the weight, except through ``.data``; None for a tensor of inference mode."""
    return None if weight.is_inference() else weight._version


def _transpose_again(down_NK: Tensor, down_KN: Tensor, serving: _Serving) -> None:
    """After a step of an optimizer, say, or a `load_state_dict`."""
    with torch.inference_mode():  # outside of which a buffer made in it cannot be written
        down_NK.copy_(down_KN.t())
    serving.version = _version(down_KN)


def _drops(owner: nn.Module) -> bool:
    """Whether a module has dropout: a dropout module, or a probability such as OPT's."""
    rates = [value for name, value in vars(owner).items() if "drop" in name]
    rates += [getattr(module, "p", 0) for module in owner.modules() if "Drop" in _kind(module)]
    return any(isinstance(rate, float) and rate > 0 for rate in rates)


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def take_order_from(model: nn.Module, prefill: PrefillOrder) -> None:
    """Makes all accelerated FFNs of a model compute in this order of the tokens."""
    for serving in _servings(model):
        serving.prefill = prefill


def stop_ordering(model: nn.Module) -> None:
    """Removes the hooks of a model's token order."""
    for serving in _servings(model):
        if serving.prefill is not None:
            serving.prefill.unwatch()


def _servings(model: nn.Module) -> list[_Serving]:
    kept = (vars(module).get(INSTALLED) for module in model.modules())
    return [serving for serving in kept if isinstance(serving, _Serving)]


def is_replaced(module: nn.Module) -> bool:
    """Whether a module's forward was replaced by one of those below."""
    return INSTALLED in vars(module)


def put_back(module: nn.Module) -> None:
    """Restores a module's own forward, if it was replaced."""
    own = vars(module)
    replaced: _Replaced | None = own.pop(INSTALLED, None)
    if replaced is None:
        return
    if DOWN_NK in module._buffers:
        delattr(module, DOWN_NK)
    del own["forward"]
    if replaced.previous is not None:
        own["forward"] = replaced.previous


def _ffn_forward(module: nn.Module, *arguments: Any, **named: Any) -> Any:
    serving: _Serving = module.__dict__[INSTALLED]
    x = arguments[0] if len(arguments) == 1 and not named else _tokens(serving, arguments, named)
    if x is None or _is_not_ours(x, module, serving):
        return _own_forward(module, serving, *arguments, **named)
    return _compute(x, serving, module)


def _up_forward(up: nn.Linear, x: Tensor) -> Tensor:
    replaced: _Replaced = up.__dict__[INSTALLED]
    if _is_not_ours(x, up, replaced):
        found: Tensor = _own_forward(up, replaced, x)
        return found
    return x


def _activation_forward(activation: nn.Module, x: Tensor) -> Tensor:
    replaced: _Replaced = activation.__dict__[INSTALLED]
    if x.shape[-1] != projections(replaced.owner, replaced.names).up.in_features:
        found: Tensor = _own_forward(activation, replaced, x)
        return found
    return x


def _down_forward(down: nn.Linear, x: Tensor) -> Tensor:
    serving: _Serving = down.__dict__[INSTALLED]
    if x.shape[-1] == down.in_features:
        found: Tensor = _own_forward(down, serving, x)
        return found
    return _compute(x, serving, down)


def _own_forward(module: nn.Module, replaced: _Replaced, *arguments: Any, **named: Any) -> Any:
    if replaced.previous is not None:
        return replaced.previous(*arguments, **named)
    return type(module).forward(module, *arguments, **named)


def _tokens(serving: _Serving, arguments: tuple[Any, ...], named: dict[str, Any]) -> Tensor | None:
    """The tokens of a call, if all other arguments have their default values; else None."""
    if len(arguments) > len(serving.parameters):
        return None
    given = dict(zip(serving.parameters, arguments, strict=False)) | named
    x: Tensor | None = given.pop(next(iter(serving.parameters)), None)
    defaults = serving.parameters
    others = all(name in defaults and value is defaults[name] for name, value in given.items())
    return x if others else None


def _is_not_ours(x: Tensor, module: nn.Module, replaced: _Replaced) -> bool:
    """Whether the replaced forward must handle a call: in training, of another type, or empty."""
    if x.dtype != replaced.dtype or x.numel() == 0 or (replaced.drops and module.training):
        return True
    if not torch.is_grad_enabled():
        return False
    return x.requires_grad or projections(replaced.owner, replaced.names).up.weight.requires_grad


def _compute(x: Tensor, serving: _Serving, module: nn.Module) -> Tensor:
    w = weights_of(projections(serving.owner, serving.names), serving.formula)
    if _few_stay_dense(x, serving):
        return _few_dense(x, w)
    down_NK, handle = module._buffers[DOWN_NK], serving.dispatch.handle
    assert down_NK is not None
    if not torch.compiler.is_compiling() and _version(w.down_KN) != serving.version:
        _transpose_again(down_NK, w.down_KN, serving)
    x_MK = x if x.ndim == 2 and x.is_contiguous() else x.reshape(-1, x.shape[-1]).contiguous()
    token_M = None if serving.prefill is None else serving.prefill.token_M(x_MK)
    y_MK = sparse_ffn(x_MK, w, down_NK, handle, token_M)
    return y_MK if x.ndim == 2 else y_MK.view(x.shape)


def _few_stay_dense(x: Tensor, serving: _Serving) -> bool:
    """Whether `_few_dense` is faster for a call than the operator.

    It is not where host time does not matter, with large weights or in the capture of a CUDA graph:
    the operator's dense path has one kernel where `_few_dense` has two.
    """
    num_tokens = x.numel() // x.shape[-1]
    return (
        num_tokens <= FEW_TOKENS
        and not serving.large
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
    h = F.relu(up) if w.gate_NK is None else F.relu(F.linear(x, w.gate_NK, w.b_gate_N)) * up
    return F.linear(h, w.down_KN, w.b_down_K)
