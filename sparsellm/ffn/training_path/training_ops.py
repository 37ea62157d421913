"""Training the FFN on its sparsity pattern: forward and backward as `torch.library` operators.

The operators are the same for every format (formats.py). They hold no state: their results
depend only on their arguments, so that compiling, recomputing and sharding work as for any other
operator.

Shapes: M tokens, K hidden_size, N intermediate_size.
"""

import hashlib
import importlib
from collections.abc import Iterable
from contextlib import AbstractContextManager
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from sparsellm.ffn.formats import ELL_WIDTH, FORMATS
from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.inference_ops import check_limits, check_tensors
from sparsellm.ffn.operators import define, define_differentiable
from sparsellm.ffn.quantised import quantised_from
from sparsellm.ffn.step_shared import Fills, kernel_weights, transposed
from sparsellm.ffn.token_order import in_order
from sparsellm.ffn.types import (
    BackwardInputs,
    FFNStats,
    FFNWeights,
    Format,
    MatrixGradients,
    Room,
    StepShared,
    TokenOrder,
)


def sparse_ffn_training(  # noqa: PLR0917
    x_MK: Tensor,
    w: FFNWeights,
    capacity: int,
    order: TokenOrder | None = None,
    shared: StepShared | None = None,
    format: Format = "union",
    ell_width: int = ELL_WIDTH,
    *,
    fp8: bool = False,
    l1: bool = True,
) -> tuple[Tensor, FFNStats]:
    """``y = (act(x W_g) * (x W_u)) W_d`` and its statistics, for training.

    Computes in the type of x, or under autocast in autocast's type. Weights may be of another type:
    they are cast inside, and their gradients come back in their own type without being rounded to
    the type of x. Nothing is lost if the pattern does not fit: backward then computes it again.

    Args:
        x_MK: the tokens; bf16 on a GPU.
        w: the FFN, without biases; its threshold must be 0.
        capacity: what is reserved for the pattern until the backward pass, see `Room`; 0 if there
            will be no backward pass. In the union format these are columns: ``blocks * N`` are
            always enough, and the capacity did not suffice if ``stats.union_sum`` exceeds it. In
            the hybrid format these are rows of the dense backup; ``stats.recomputed`` counts the
            tokens that it had no row for.
        order: the order in which to compute; it changes ``stats.union_sum`` and the order of sums,
            and nothing else.
        shared: what this optimizer step shares. The matrices are then not cast and transposed here;
            with ``shared.sums`` backward adds their gradients there, and autograd gets none.
        format: in which the pattern is kept.
        ell_width: of ``twell``; tokens with more non-zeros, or with a tile that overflows TwELL,
            are stored densely.
        fp8: the product that decides the pattern, and with it the gate's values, is computed in
            FP8. Ignored with ``shared``: then FP8 is used if the shared weights are quantised.
        l1: whether the loss has L1 of this FFN. Otherwise it is stated as 0, as `dense_ffn` does.

    Raises:
        ValueError: shapes, types, devices or a room that do not fit, by name; a bias.
    """
    if any(bias is not None for bias in (w.b_gate_N, w.b_up_N, w.b_down_K)):
        raise ValueError("sparse_ffn: training takes no biases; they are for inference")
    device = x_MK.device.type
    if torch.is_autocast_enabled(device):
        x_MK = x_MK.to(torch.get_autocast_dtype(device))
    x_MK = x_MK.contiguous() if order is None else in_order(x_MK, order)
    token_M = None if order is None else order.token_M
    tensors = FFNTensors.of(x_MK, w, token_M, shared, fp8=fp8)
    arguments = (*tensors, capacity, ell_width, format, w.activation)
    # Eagerly the operator would only cost the host time.
    if _needs_operators(tensors):
        outputs = torch.ops.sparsellm.sparse_ffn_training.default(*arguments)
    else:
        outputs = _differentiable_forward(*arguments)
    y_MK, l1_sum, nnz_M, active_N, union_sum, saved = outputs
    if not l1:
        l1_sum = torch.zeros_like(l1_sum)
    recomputed = FORMATS[format].saved(*saved).recomputed
    return y_MK, FFNStats(l1_sum, nnz_M, active_N, union_sum, recomputed)


class FFNTensors(NamedTuple):
    """The tensors that operators take, one by one."""

    x_MK: Tensor
    w_gate_NK: Tensor | None
    w_up_NK: Tensor
    w_down_KN: Tensor
    token_M: Tensor | None  # (M,) int32, the token of each row of x
    quantised_NK: Tensor | None  # `FFNWeights.quantised`, both or none
    quantised_scale_N: Tensor | None
    ready_gate_NK: Tensor | None  # as kernels read the matrices, where the step shares them
    ready_up_NK: Tensor | None
    ready_down_NK: Tensor | None
    sum_gate_NK: Tensor | None  # `MatrixGradients`, all or none
    sum_up_NK: Tensor | None
    sum_down_NK: Tensor | None

    @classmethod
    def of(
        cls,
        x_MK: Tensor,
        w: FFNWeights,
        token_M: Tensor | None,
        shared: StepShared | None,
        *,
        fp8: bool,
    ) -> "FFNTensors":
        """The tensors of a call of `sparse_ffn_training`."""
        ready: tuple[Tensor | None, ...] = (None,) * 3
        sums, quantised = ready, None
        if shared is not None:
            ready = (shared.weights.gate_NK, shared.weights.up_NK, shared.weights.down_NK)
            sums, quantised = shared.sums or sums, shared.weights.quantised
        elif fp8:
            quantised = quantised_rows(w.first[0].to(x_MK.dtype))
        return cls(x_MK, *w[:3], token_M, *(quantised or (None, None)), *ready, *sums)

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """x and the parameters."""
        return self[:4]

    def weights(self, activation: str) -> FFNWeights:
        """The weights in the type of x: shared by the step, or made here."""
        quantised = quantised_from(self.quantised_NK, self.quantised_scale_N)
        w = FFNWeights(*self[1:4], activation=activation, quantised=quantised)
        gate_NK, up_NK, down_NK = self.ready_gate_NK, self.ready_up_NK, self.ready_down_NK
        if up_NK is not None and down_NK is not None:
            down_KN = down_NK.t()
            return w._replace(gate_NK=gate_NK, up_NK=up_NK, down_KN=down_KN, down_NK=down_NK)
        dtype = self.x_MK.dtype
        if runs_kernels(self.x_MK):
            fills = Fills()
            w = kernel_weights(w, dtype, fills)
            fills.fill()
            return w
        gate_NK = None if w.gate_NK is None else w.gate_NK.to(dtype)
        return w._replace(gate_NK=gate_NK, up_NK=w.up_NK.to(dtype), down_KN=w.down_KN.to(dtype))

    @property
    def sums(self) -> MatrixGradients | None:
        """Where the gradients of the matrices are added up; None if they are not."""
        if self.sum_up_NK is None or self.sum_down_NK is None:
            return None
        return MatrixGradients(self.sum_gate_NK, self.sum_up_NK, self.sum_down_NK)


def _schema(sums: str) -> str:
    return (
        "Tensor x_MK, Tensor? w_gate_NK, Tensor w_up_NK, Tensor w_down_KN, "
        "Tensor? token_M, Tensor? quantised_NK, Tensor? quantised_scale_N, "
        "Tensor? ready_gate_NK, Tensor? ready_up_NK, Tensor? ready_down_NK, " + sums
    )


_GIVEN = "Tensor dy_MK, Tensor d_l1, Tensor[] saved, str format, str activation"
_READ = "Tensor? sum_gate_NK, Tensor? sum_up_NK, Tensor? sum_down_NK"
_WRITTEN = "Tensor(a!)? sum_gate_NK, Tensor(b!)? sum_up_NK, Tensor(c!)? sum_down_NK"
_FORWARD = (
    f"({_schema(_READ)}, SymInt capacity, SymInt ell_width, str format, str activation) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor[])"
)


def _forward(*arguments: Any) -> tuple[Any, ...]:
    """Takes `FFNTensors`, `Room`, the format and the activation; see `sparse_ffn_training`.

    Returns:
        y (M, K); l1_sum () fp32; nnz (M,) and active (N,) int32; union_sum () int64; what the
        format saves. Gradients flow through y and l1_sum.
    """
    tensors, room, format, activation = _split(arguments)
    x_MK = tensors.x_MK
    _check(tensors, room, format)
    with _computing(x_MK):
        inputs = (x_MK, tensors.weights(activation), room, tensors.token_M)
        y_MK, stats, saved = _implementation(format, x_MK).forward(*inputs)
    return y_MK, *stats[:4], list(saved)


def runs_kernels(x_MK: Tensor) -> bool:
    """Whether an operator runs the kernels: on a GPU, if there are any tokens."""
    return x_MK.is_cuda and x_MK.shape[0] > 0


def _implementation(format: Format, x_MK: Tensor) -> Any:
    """The module with ``forward`` and ``backward``: the format's kernels, or plain torch."""
    if not runs_kernels(x_MK):
        return FORMATS[format]
    return importlib.import_module(f"sparsellm.ffn.kernels.{FORMATS[format].kernels}")


def _computing(x_MK: Tensor) -> AbstractContextManager[object]:
    if runs_kernels(x_MK):
        return torch.cuda.device(x_MK.get_device())
    # Autocast still applies inside an operator, where every type has been chosen already.
    return torch.autocast(x_MK.device.type, enabled=False)


def _split(arguments: tuple[Any, ...]) -> tuple[FFNTensors, Room, Format, str]:
    *tensors, capacity, ell_width, format, activation = arguments
    return FFNTensors(*tensors), Room(capacity, ell_width), format, activation


def _fake_forward(*arguments: Any) -> tuple[Any, ...]:
    tensors, room, format, _ = _split(arguments)
    x_MK, (m, n) = tensors.x_MK, (tensors.x_MK.shape[0], tensors.w_up_NK.shape[0])
    gated = tensors.w_gate_NK is not None
    return (
        torch.empty_like(x_MK),
        x_MK.new_empty((), dtype=torch.promote_types(x_MK.dtype, torch.float32)),
        x_MK.new_empty(m, dtype=torch.int32),
        x_MK.new_empty(n, dtype=torch.int32),
        x_MK.new_empty((), dtype=torch.int64),
        list(FORMATS[format].empty(x_MK, n, room, gated=gated)),
    )


def _backward(
    dy_MK: Tensor, d_l1: Tensor, saved: list[Tensor], format: Format, activation: str, *tensors: Any
) -> list[Tensor]:
    """Gradients of ``Σ dy * y + d_l1 * l1_sum``.

    Takes dy (contiguous, of x's type, by token), d_l1 (), what forward saved, the format, the
    activation and `FFNTensors`.

    Returns:
        The gradients of x, W_g (if there is one), W_u and W_d, each in its own type. With sums the
        matrices' gradients are added to these, and only that of x is returned.
    """
    ffn_tensors, pattern = FFNTensors(*tensors), FORMATS[format].saved(*saved)
    x_MK, sums = ffn_tensors.x_MK, ffn_tensors.sums
    with _computing(x_MK):
        w = ffn_tensors.weights(activation)
        out = sums or MatrixGradients.empty(w, ffn_tensors.w_up_NK.dtype)
        inputs = BackwardInputs(dy_MK, d_l1, x_MK, w, pattern, ffn_tensors.token_M)
        dx_MK = _implementation(format, x_MK).backward(inputs, out, adds=sums is not None)
    if sums is not None:
        return [dx_MK]
    gradients = (dx_MK, out.gate_NK, out.up_NK, transposed(out.down_NK, out.down_NK.dtype))
    return [gradient for gradient in gradients if gradient is not None]


def _fake_backward(*arguments: Any) -> list[Tensor]:
    differentiable = FFNTensors(*arguments[5:]).differentiable
    return [tensor.new_empty(tensor.shape) for tensor in differentiable if tensor is not None]


_PLAIN = frozenset({Tensor, nn.Parameter, NoneType})


def _needs_operators(tensors: Iterable[Tensor | None]) -> bool:
    """Whether something traces or intercepts operators; else what they do is called directly.

    Calling an operator with so many arguments costs the host as much as several kernel launches.
    """
    return (
        torch.compiler.is_compiling()
        or is_in_torch_dispatch_mode()
        or not _PLAIN.issuperset(map(type, tensors))
    )


class _SparseFFN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> tuple[Tensor, ...]:
        tensors, _, ctx.format, ctx.activation = _split(arguments)
        operator = torch.ops.sparsellm.sparse_ffn_forward.default
        compute = operator if _needs_operators(tensors) else _forward
        y_MK, l1_sum, *counts, saved = compute(*arguments)
        ctx.mark_non_differentiable(*counts, *saved)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *saved)
        return y_MK, l1_sum, *counts, *saved

    @staticmethod
    def backward(ctx: Any, *d_outputs: Any) -> tuple[Any, ...]:
        (dy_MK, d_l1, *_), saved_tensors = d_outputs, ctx.saved_tensors
        count = len(FFNTensors._fields)
        tensors, saved = FFNTensors(*saved_tensors[:count]), list(saved_tensors[count:])
        x_MK = tensors.x_MK
        # What the loss does not depend on has no gradient.
        dy_MK = torch.zeros_like(x_MK) if dy_MK is None else dy_MK.contiguous()
        if d_l1 is None:
            d_l1 = x_MK.new_zeros((), dtype=torch.promote_types(x_MK.dtype, torch.float32))
        arguments = (dy_MK, d_l1, saved, ctx.format, ctx.activation, *tensors)
        # The operator refuses second derivatives.
        as_operator = torch.is_grad_enabled() or _needs_operators((dy_MK, d_l1, *saved_tensors))
        if not as_operator:
            computed = _backward(*arguments)
        elif tensors.sums is None:
            computed = torch.ops.sparsellm.sparse_ffn_backward.default(*arguments)
        else:
            computed = [torch.ops.sparsellm.sparse_ffn_backward_into.default(*arguments)]
        rest = iter(computed)
        gradients = (None if t is None else next(rest, None) for t in tensors.differentiable)
        return (*gradients, *(None,) * count)  # count: all other tensors, and four options


def _differentiable_forward(*arguments: Any) -> tuple[Any, ...]:
    outputs = _SparseFFN.apply(*arguments)
    return *outputs[:5], list(outputs[5:])


define("sparse_ffn_forward", _FORWARD, _forward, _fake_forward)
define(
    "sparse_ffn_backward", f"({_GIVEN}, {_schema(_READ)}) -> Tensor[]", _backward, _fake_backward
)
define(
    "sparse_ffn_backward_into",
    f"({_GIVEN}, {_schema(_WRITTEN)}) -> Tensor",
    lambda *arguments: _backward(*arguments)[0],
    lambda *arguments: torch.empty_like(FFNTensors(*arguments[5:]).x_MK),
)
define_differentiable(
    "sparse_ffn_training",
    _FORWARD,
    torch.ops.sparsellm.sparse_ffn_forward.default,
    _differentiable_forward,
)


def _check(tensors: FFNTensors, room: Room, format: Format) -> None:
    x_MK, w = tensors.x_MK, FFNWeights(*tensors[1:4])
    m, k, n = check_tensors(x_MK, w, w.up_NK.dtype, tensors.token_M, as_kernels_read=False)
    FORMATS[format].check(m, n, room)
    if not runs_kernels(x_MK):
        return
    check_limits(m, k, n, remedy="use ffn.kernels=dense")
    if x_MK.dtype != torch.bfloat16:
        raise ValueError(
            f"sparse_ffn: x is {x_MK.dtype}; on a GPU sparse training takes only torch.bfloat16 "
            "(fp16 is for inference): train in bf16, or with ffn.kernels=dense"
        )


def operators_digest() -> str:
    """A digest of this folder's files, on which graphs compiled with its operators depend."""
    files = sorted(Path(__file__).parent.parent.rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]
