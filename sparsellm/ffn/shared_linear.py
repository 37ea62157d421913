"""Linear layers whose weight is handled once per optimizer step instead of in every micro-batch.

Autocast casts an fp32 weight in each micro-batch, and autograd writes its gradient in bf16, casts
it and adds it to ``.grad``. Here the cast is shared by the micro-batches of a step, and the matrix
product that computes the gradient adds it in fp32: 8 bytes of memory traffic per parameter instead
of 20, and no rounding to bf16 in between. step_shared.py does the same for FFNs on their sparsity
pattern.

With FP8 the output and the gradient of the input are computed from e4m3 numbers (fp8.py), and a
step's micro-batches share the quantised weight; the weight's own gradient is computed in bf16. Of
the head only the output is: most probabilities, of which the gradient of the logits consists, are
so far below a row's largest number that e4m3 would round them to zero.

Shapes: M tokens, K in_features, N out_features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparsellm.ffn.fp8 import quantised_rows
from sparsellm.ffn.operators import define, define_differentiable
from sparsellm.ffn.quantised import QuantisedRows, scaled_product
from sparsellm.ffn.step_shared import Fills, add_to_gradient, gradient_memory, summable, transposed


def share_weights(module: nn.Module, **options: bool) -> None:
    """Replaces the module's own linear layers without bias by `SharedLinear`, in place."""
    for name, linear in list(module.named_children()):
        if isinstance(linear, nn.Linear) and linear.bias is None:
            setattr(module, name, SharedLinear(linear.weight, **options))


def shared_linears(module: nn.Module) -> list[SharedLinear]:
    """The module's own linear layers that share their weight."""
    return [linear for linear in module.children() if isinstance(linear, SharedLinear)]


class SharedLinear(nn.Linear):
    """An `nn.Linear` without bias that shares its weight between `begin_step` and `end_step`.

    Args:
        weight: (N, K), used as it is.
        fp8: computes in FP8, always; K and N are then multiples of 16.
        fp8_gradient: the gradient of the input, too.
        accumulates: in a step, the matrix product that computes the weight's gradient adds it up.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        *,
        fp8: bool = False,
        fp8_gradient: bool = True,
        accumulates: bool = True,
    ) -> None:
        num_out, num_in = weight.shape
        if fp8 and (num_in % 16 or num_out % 16):
            raise ValueError(
                f"precision fp8: a linear layer of {num_in} → {num_out} features: both must be "
                "multiples of 16"
            )
        super().__init__(num_in, num_out, bias=False, device="meta")
        self.weight, self.fp8, self.fp8_gradient = weight, fp8, fp8_gradient
        self.accumulates = accumulates
        # Inputs of a compiled graph. It is compiled again when one of them becomes None or stops
        # being None, but not for every step.
        self.ready: list[Tensor] | None = None  # the weight as `_product` takes it
        self.sum_NK: Tensor | None = None  # fp32, to which backward passes add the gradient

    @torch.no_grad()
    def begin_step(self, dtype: torch.dtype, accumulate: bool, fills: Fills) -> None:
        """Called before a step's first micro-batch. The weight must not change until `end_step`.

        Does nothing for a shard, and for weights that are frozen. Weights that are in ``dtype``
        already, as FSDP2 gathers them, are only quantised; autograd has their gradients.

        Args:
            dtype: in which the step computes.
            accumulate, fills: as in `SparseFFN.begin_step`.
        """
        if isinstance(self.weight, DTensor) or not self.weight.requires_grad:
            return
        is_summable = summable(self.weight)
        if not is_summable and not (self.fp8 and self.weight.dtype == dtype):
            return
        ready_NK = fills.cast(self.weight, dtype)
        self.ready = [ready_NK]
        if self.fp8:
            turned = fills.quantised(transposed(self.weight, dtype)) if self.fp8_gradient else None
            self.ready = [*fills.quantised(ready_NK), *(turned or self.ready)]
        if accumulate and self.accumulates and is_summable:
            self.sum_NK = gradient_memory(self.weight, fills)

    @torch.no_grad()
    def end_accumulation(self) -> None:
        """Called before a step's last micro-batch; see `SparseFFN.end_accumulation`."""
        if self.sum_NK is not None:
            add_to_gradient(self.weight, self.sum_NK)
        self.sum_NK = None

    def end_step(self) -> None:
        """Called after a step's last micro-batch."""
        self.ready = self.sum_NK = None

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) → (…, N)."""
        ready, dtype = self.ready, x.dtype
        if self.fp8:
            if torch.is_autocast_enabled(x.device.type):
                dtype = torch.get_autocast_dtype(x.device.type)
            if ready is None:
                ready = fp8_weight(self.weight.detach().to(dtype), gradient=self.fp8_gradient)
        elif ready is None:
            return F.linear(x, self.weight)
        else:
            dtype = ready[0].dtype
        x_MK = x.reshape(-1, x.shape[-1]).to(dtype)
        y_MN: Tensor = torch.ops.sparsellm.shared_linear(x_MK, self.weight, ready, self.sum_NK)
        return y_MN.view(*x.shape[:-1], -1)


def fp8_weight(weight_NK: Tensor, *, gradient: bool = True) -> list[Tensor]:
    """A weight that is in the type of the tokens, as `_product` takes it in FP8.

    ``gradient``: see `SharedLinear.fp8_gradient`.
    """
    for_gradient = quantised_rows(weight_NK.t().contiguous()) if gradient else [weight_NK]
    return [*quantised_rows(weight_NK), *for_gradient]


def _product(x_MK: Tensor, weight_NK: Tensor, ready: list[Tensor], sum_NK: Tensor | None) -> Tensor:
    """``x Wᵀ``, (M, N).

    Args:
        x_MK: the tokens.
        weight_NK: the parameter; only its gradient is computed.
        ready: its values, in the type of x. In FP8 two tensors, its rows in e4m3, for the output;
            then, for the gradient of the input, two more, those of its transpose, or its values in
            the type of x.
        sum_NK: to which the backward pass adds the weight's gradient; autograd then gets none.
    """
    if len(ready) == 1:
        return x_MK @ ready[0].t()
    return scaled_product(quantised_rows(x_MK), QuantisedRows(*ready[:2]), x_MK.dtype)


class _SharedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, ready: list[Tensor], sum_NK: Tensor | None
    ) -> Tensor:
        ctx.own = weight_NK.dtype
        ctx.save_for_backward(x_MK, sum_NK, *(ready[2:] or ready))
        return _product(x_MK, weight_NK, ready, sum_NK)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_MK, sum_NK, *ready = ctx.saved_tensors
        if len(ready) == 1:
            dx_MK = dy_MN @ ready[0]
        else:
            dx_MK = scaled_product(quantised_rows(dy_MN), QuantisedRows(*ready), x_MK.dtype)
        if sum_NK is None:
            return dx_MK, (dy_MN.t() @ x_MK).to(ctx.own), None, None
        torch.ops.sparsellm.add_weight_gradient(sum_NK, dy_MN, x_MK)
        return dx_MK, None, None, None


def _add_weight_gradient(sum_NK: Tensor, dy_MN: Tensor, x_MK: Tensor) -> None:
    """``sum += dyᵀ x`` by one matrix product, which accumulates in the type of the sum."""
    # Autocast, which compiled code may still see here, leaves products in place as they are.
    dy_NM = dy_MN.t()
    if sum_NK.dtype == x_MK.dtype:
        sum_NK.addmm_(dy_NM, x_MK)
    elif x_MK.is_cuda:  # only a GPU can return fp32 products of bf16
        torch.addmm(sum_NK, dy_NM, x_MK, out_dtype=sum_NK.dtype, out=sum_NK)
    else:
        sum_NK.addmm_(dy_NM.to(sum_NK.dtype), x_MK.to(sum_NK.dtype))


define_differentiable(
    "shared_linear",
    "(Tensor x_MK, Tensor weight_NK, Tensor[] ready, Tensor? sum_NK) -> Tensor",
    _product,
    _SharedProduct.apply,
)
define(
    "add_weight_gradient",
    "(Tensor(a!) sum_NK, Tensor dy_MN, Tensor x_MK) -> ()",
    _add_weight_gradient,
    lambda sum_NK, dy_MN, x_MK: None,
)
