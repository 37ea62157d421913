"""Finds out what a module computes by running it, because names and classes do not tell.

Shapes: B sequences, T tokens of each, K hidden_size, N intermediate_size.
"""

import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sparsellm.ffn.activations import ACTIVATIONS, RECTIFIED, Rectified
from sparsellm.ffn.inference_path.discover import ForeignFFN, Formula, Projections, Unsupported
from sparsellm.ffn.reference import fatrelu_ffn
from sparsellm.ffn.types import ELEMENTS

# Several scales, as a forward may clamp large values or drop small ones; fp16 overflows.
_SCALES = {dtype: (0.1, 1.0, 10.0) for dtype in ELEMENTS} | {torch.float32: (1e-4, 1e-2, 1.0, 1e2)}
_TOKENS_PER_SCALE = 2
# Two orders of the same operations differ by under 0.5% in bf16, 0.1% in fp16 and 0.001% in fp32.
_TOLERANCE = {dtype: 2 * torch.finfo(dtype).eps for dtype in ELEMENTS} | {torch.float32: 2e-5}

Activation = Callable[[Tensor], Any]


def formula_of(foreign: ForeignFFN, activation: Activation | None) -> Formula:
    """The formula that a module, or a layer's FFN, computes in evaluation mode.

    Raises:
        Unsupported: the kernels do not support it; the message says why.
    """
    owner, ffn = foreign.owner, foreign.ffn
    forward, x = owner.forward, probe_tokens(ffn)
    if foreign.is_layer:
        up, act, *_, down = foreign.inside
        forward = nn.Sequential(up, act, down)
        if ffn.up.in_features == ffn.up.out_features:
            raise Unsupported("its layer computes it, and its intermediate_size equals hidden_size")
    elif required := _further_arguments(forward):
        raise Unsupported(f"its forward needs further arguments: {', '.join(required)}")
    with torch.no_grad(), evaluating(owner):
        formula = _formula_on(x, forward, ffn, activation)
        with _in_fp32(ffn):
            _formula_on(probe_tokens(ffn), forward, ffn, activation)
        if foreign.is_layer:
            _check_use(owner, [up, act, down], x)
        else:  # a matrix of tokens, too
            _formula_on(x.flatten(0, 1), forward, ffn, activation)
    return formula


def activation_formulas(activation: Activation | None, like: Tensor) -> list[Formula]:
    """The formulas of an FFN with this activation; all formulas if the module names none.

    Args:
        activation: of a foreign module.
        like: a tensor of the type and device to try it with.

    Raises:
        Unsupported: it is another activation.
    """
    if activation is None:
        return [Formula(0.0, relu_up=False, activation=name) for name in RECTIFIED]
    for name, kernels in RECTIFIED.items():
        threshold = _threshold_of(activation, kernels, like)
        if threshold is not None:
            return [Formula(threshold, relu_up=False, activation=name)]
    name = getattr(activation, "__name__", type(activation).__name__)
    titles = " or ".join(ACTIVATIONS[name].title for name in RECTIFIED)
    raise Unsupported(f"its activation is {name}, not {titles}")


def _formula_on(
    x: Tensor, forward: Callable[[Tensor], Any], ffn: Projections, activation: Activation | None
) -> Formula:
    """The formula by which a forward computes its result from these tokens."""
    y = _try(forward, x)
    if not isinstance(y, Tensor) or y.shape != x.shape:
        kind = f"{tuple(y.shape)}" if isinstance(y, Tensor) else f"a {type(y).__name__}"
        raise Unsupported(f"its forward returns {kind} for tokens of {tuple(x.shape)}")
    if not y.isfinite().all(dim=-1).any():
        raise Unsupported(f"its forward overflows {y.dtype} on every random token")
    if not y.any():
        raise Unsupported("its forward gives zero for every token that was tried")
    candidates = activation_formulas(activation, like=x)
    if ffn.gate is not None:
        candidates += [formula._replace(relu_up=True) for formula in candidates]
    errors = [relative_error(y, fatrelu_ffn(x, ffn.weights(formula))) for formula in candidates]
    best = min(range(len(errors)), key=errors.__getitem__)
    if errors[best] <= _TOLERANCE[x.dtype]:
        return candidates[best]
    formulas = " or ".join(_text_of(formula, gated=ffn.gate is not None) for formula in candidates)
    raise Unsupported(
        f"its forward does not compute {formulas}: on random tokens it differs by "
        f"{errors[best]:.2%}"
    )


def _check_use(layer: nn.Module, chain: list[nn.Module], x_BTK: Tensor) -> None:
    """Checks that a layer computes the chain in a row, and uses nothing but its result.

    Raises:
        Unsupported: it does not.
    """
    calls: list[tuple[nn.Module, Tensor, Tensor]] = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        calls.append((module, inputs[0], output))

    with ExitStack() as hooks:
        for module in chain:
            hooks.enter_context(module.register_forward_hook(note))
        expected = _layer_output(layer, x_BTK)
    # The same tensor, not an equal one: a factor between them may happen to be 1.
    in_a_row = all(
        output is argument for (*_, output), (_, argument, _) in itertools.pairwise(calls)
    )
    if [module for module, *_ in calls] != chain or not in_a_row:
        raise Unsupported("its layer does more than up, activation, down in a row with it")
    y_BTK = calls[-1][-1]
    results = (lambda x: x, lambda x: x, lambda _: y_BTK)
    try:
        for module, result in zip(chain, results, strict=True):
            vars(module)["forward"] = result
        replaced_output = _layer_output(layer, x_BTK)
    finally:
        for module in chain:
            vars(module).pop("forward", None)
    if not torch.equal(replaced_output.nan_to_num(), expected.nan_to_num()):
        raise Unsupported("its layer's output would change")


def _layer_output(layer: nn.Module, x_BTK: Tensor) -> Tensor:
    """The layer's output for these sequences; other required arguments are None."""
    arguments: dict[str, Any] = dict.fromkeys(_further_arguments(layer.forward))
    result = _try(lambda x: layer(x, **arguments), x_BTK)
    output = result[0] if isinstance(result, tuple) else result
    if not isinstance(output, Tensor) or output.shape != x_BTK.shape:
        raise Unsupported(f"its layer returns a {type(output).__name__}, not tokens")
    return output


def _try(forward: Callable[[Tensor], Any], x: Tensor) -> Any:
    try:
        return forward(x)
    except Exception as error:  # a foreign module may raise anything
        first_line = str(error).partition("\n")[0]
        raise Unsupported(
            f"its forward could not be tried: {type(error).__name__}: {first_line}"
        ) from error


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards every part is in the mode that it was in."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


def _further_arguments(forward: Callable[..., Any]) -> list[str]:
    """The arguments that a forward requires besides its first."""
    kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = list(inspect.signature(forward).parameters.values())[1:]
    return [p.name for p in parameters if p.default is p.empty and p.kind not in kinds]


def _threshold_of(
    activation: Callable[[Tensor], Any], rectified: Rectified, like: Tensor
) -> float | None:
    """The t of an activation that is ``act(x) if x > t else 0``; 0 for ReLU.

    Every finite value of the type of ``like`` is tried; for fp32 those of bf16, and all near t.
    """
    dtype = like.dtype if like.dtype in ELEMENTS else ELEMENTS[0]
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16, device="cpu").view(dtype)
    device = "cpu" if like.is_meta else like.device
    x = every[every.isfinite()].to(like.dtype).to(device)
    threshold = _threshold_among(activation, rectified, x)
    if threshold and like.dtype not in ELEMENTS:
        next_up = x[x > threshold].min()
        bits = torch.stack([x.new_tensor(threshold), next_up]).float().view(torch.int32).tolist()
        fp32_bits = torch.arange(bits[0], bits[1] + 1, dtype=torch.int32, device=device)
        threshold = _threshold_among(activation, rectified, fp32_bits.view(torch.float32))
    return threshold


def _threshold_among(
    activation: Callable[[Tensor], Any], rectified: Rectified, x: Tensor
) -> float | None:
    try:
        with torch.no_grad():
            y = activation(x)
    except Exception:  # a foreign module may raise anything; its activation is then unknown
        return None
    if not isinstance(y, Tensor) or (y.shape, y.dtype, y.device) != (x.shape, x.dtype, x.device):
        return None
    threshold = x[y == 0].max() if (y == 0).any() else x.min()
    # 0 first: small values may become zero in the activation itself, as the square of 1e-30 does.
    for candidate in (0.0, float(threshold)):
        right = rectified.value(torch.where(x <= candidate, 0, x))
        if threshold >= 0 and torch.equal(y, right):
            return candidate
    return None


def probe_tokens(ffn: Projections) -> Tensor:
    """(2, tokens, K) of several magnitudes, each with its negative; torch's RNG is not used."""
    generator, like = torch.Generator("cpu").manual_seed(0), ffn.up.weight
    shape = (_TOKENS_PER_SCALE, ffn.up.in_features)
    tokens = [
        scale * torch.randn(shape, generator=generator, device="cpu")
        for scale in _SCALES[like.dtype]
    ]
    x_MK = torch.stack(tokens, dim=1)
    return torch.stack([x_MK, -x_MK]).flatten(1, 2).to(like)


@contextmanager
def _in_fp32(ffn: Projections) -> Iterator[None]:
    """The matrices of an FFN compute with fp32 copies of their parameters.

    Raises:
        Unsupported: these do not fit into memory.
    """
    parameter_dicts: list[dict[str, Any]] = [linear._parameters for linear in ffn.present]
    before = [dict(parameters) for parameters in parameter_dicts]
    try:
        for parameters in parameter_dicts:
            parameters |= {n: p if p is None else p.float() for n, p in parameters.items()}
        yield
    except torch.OutOfMemoryError as error:
        raise Unsupported("there is too little memory for an fp32 copy of its weights") from error
    finally:
        for parameters, previous in zip(parameter_dicts, before, strict=True):
            parameters.update(previous)


def _text_of(formula: Formula, *, gated: bool) -> str:
    if not gated:
        return f"{formula.activation}(up)"
    return f"{formula.activation}(gate) * {'relu(up)' if formula.relu_up else 'up'}"


def relative_error(y: Tensor, expected: Tensor) -> float:
    """The largest relative error of a token; infinite where only one of the two is finite.

    fp16 ends at 65,504: a token on which both overflow says nothing.
    """
    says_something = y.isfinite().all(dim=-1) | expected.isfinite().all(dim=-1)
    y, expected = y[says_something].double(), expected[says_something].double()
    if not says_something.any():
        return float("inf")
    error = ((y - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)).max()
    return float(error) if error.isfinite() else float("inf")
