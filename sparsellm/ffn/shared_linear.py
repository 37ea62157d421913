"""Linear layers whose weight is handled once per optimizer step instead of in every micro-batch.

Autocast casts an fp32 weight in each micro-batch, and autograd writes its gradient in bf16, casts
it and adds it to ``.grad``. Here the cast is shared by the micro-batches of a step, and the matrix
product that computes the gradient adds it in fp32: 8 bytes of memory traffic a parameter in place
of 20, and no rounding to bf16 in between. step_shared.py has the same for FFNs on their sparsity
pattern.

Shapes: M tokens, K in_features, N out_features.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sparsellm.ffn.fills import Fills
from sparsellm.ffn.step_shared import add_to_gradient, gradient_memory, summable


def share_weights(module: nn.Module) -> None:
    """Replaces the module's own linear layers without bias by `SharedLinear`, in place."""
    for name, linear in list(module.named_children()):
        if isinstance(linear, nn.Linear) and linear.bias is None:
            setattr(module, name, SharedLinear(linear.weight))


def shared_linears(module: nn.Module) -> list[SharedLinear]:
    """The module's own linear layers that share their weight."""
    return [linear for linear in module.children() if isinstance(linear, SharedLinear)]


class SharedLinear(nn.Linear):
    """An `nn.Linear` without bias, and between `begin_step` and `end_step` one that shares.

    Args:
        weight: (N, K), used as it is.
    """

    def __init__(self, weight: nn.Parameter) -> None:
        num_out, num_in = weight.shape
        super().__init__(num_in, num_out, bias=False, device="meta")
        self.weight = weight
        # Inputs of a compiled graph, which is compiled anew where one comes or goes, not by step.
        self.ready_NK: Tensor | None = None  # the weight in the type of the step's products
        self.sum_NK: Tensor | None = None  # fp32, to which backward passes add the gradient

    @torch.no_grad()
    def begin_step(self, dtype: torch.dtype, accumulate: bool, fills: Fills) -> None:
        """Called before a step's first micro-batch. The weight must not change until `end_step`.

        Does nothing for a shard, and for weights that are frozen or not fp32.

        Args:
            dtype: in which the step computes.
            accumulate, fills: as in `step_shared.begin_step`.
        """
        if isinstance(self.weight, DTensor) or not summable(self.weight):
            return
        self.ready_NK = fills.cast(self.weight, dtype)
        self.sum_NK = gradient_memory(self.weight, fills) if accumulate else None

    @torch.no_grad()
    def end_accumulation(self) -> None:
        """Called before a step's last micro-batch; see `step_shared.end_accumulation`."""
        if self.sum_NK is not None:
            add_to_gradient(self.weight, self.sum_NK)
        self.sum_NK = None

    def end_step(self) -> None:
        """Called after a step's last micro-batch."""
        self.ready_NK = self.sum_NK = None

    def forward(self, x: Tensor) -> Tensor:
        """(…, K) → (…, N)."""
        if self.ready_NK is None:
            return F.linear(x, self.weight)
        x_MK = x.reshape(-1, x.shape[-1]).to(self.ready_NK.dtype)
        y_MN = shared_linear(x_MK, self.weight, self.ready_NK, self.sum_NK)
        return y_MN.view(*x.shape[:-1], -1)


def shared_linear(
    x_MK: Tensor, weight_NK: Tensor, ready_NK: Tensor, sum_NK: Tensor | None
) -> Tensor:
    """``x Wᵀ``, (M, N).

    Args:
        x_MK: of the type of ``ready_NK``.
        weight_NK: the parameter; only its gradient is computed.
        ready_NK: its values, in the type to compute in.
        sum_NK: to which the backward pass adds the weight's gradient; autograd then gets none.
    """
    y_MN: Tensor = torch.ops.sparsellm.shared_linear(x_MK, weight_NK, ready_NK, sum_NK)
    return y_MN


def add_weight_gradient(sum_NK: Tensor, dy_MN: Tensor, x_MK: Tensor) -> None:
    """``sum += dyᵀ x`` by one matrix product, which accumulates in the type of the sum."""
    torch.ops.sparsellm.add_weight_gradient(sum_NK, dy_MN, x_MK)


def _product(x_MK: Tensor, weight_NK: Tensor, ready_NK: Tensor, sum_NK: Tensor | None) -> Tensor:
    return x_MK @ ready_NK.t()


class _SharedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_MK: Tensor, weight_NK: Tensor, ready_NK: Tensor, sum_NK: Tensor | None
    ) -> Tensor:
        ctx.own = weight_NK.dtype
        ctx.save_for_backward(x_MK, ready_NK, sum_NK)
        return _product(x_MK, weight_NK, ready_NK, sum_NK)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_MK, ready_NK, sum_NK = ctx.saved_tensors
        dx_MK, d_weight_NK = dy_MN @ ready_NK, None
        if sum_NK is None:
            d_weight_NK = (dy_MN.t() @ x_MK).to(ctx.own)
        else:
            add_weight_gradient(sum_NK, dy_MN, x_MK)
        return dx_MK, d_weight_NK, None, None


def _add_weight_gradient(sum_NK: Tensor, dy_MN: Tensor, x_MK: Tensor) -> None:
    # Autocast, which compiled code may still see here, leaves products in place as they are.
    dy_NM = dy_MN.t()
    if sum_NK.dtype == x_MK.dtype:
        sum_NK.addmm_(dy_NM, x_MK)
    elif x_MK.is_cuda:  # only there products of bf16 can be fp32
        torch.addmm(sum_NK, dy_NM, x_MK, out_dtype=sum_NK.dtype, out=sum_NK)
    else:
        sum_NK.addmm_(dy_NM.to(sum_NK.dtype), x_MK.to(sum_NK.dtype))


# Registered without `torch.library.custom_op`, whose wrapper takes the host 20 to 30 µs a call. The
# product itself is no call at all in compiled code: autograd's kernel is plain torch, which is what
# is traced. Were the `autograd.Function` called directly, Dynamo would trace it: such graphs bypass
# the cache on disk, and in torch 2.11 gradients were wrong where two arguments were one tensor.
_library = torch.library.Library("sparsellm", "FRAGMENT")
_library.define(
    "shared_linear(Tensor x_MK, Tensor weight_NK, Tensor ready_NK, Tensor? sum_NK) -> Tensor",
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("shared_linear", _SharedProduct.apply, "Autograd")
_library.impl("shared_linear", _product, "CompositeExplicitAutograd")
_library.define(
    "add_weight_gradient(Tensor(a!) sum_NK, Tensor dy_MN, Tensor x_MK) -> ()",
    tags=torch.Tag.pt2_compliant_tag,
)
for _device in ("CPU", "CUDA"):
    _library.impl("add_weight_gradient", _add_weight_gradient, _device)
torch.library.register_fake(
    "sparsellm::add_weight_gradient", lambda sum_NK, dy_MN, x_MK: None, lib=_library
)
